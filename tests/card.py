"""A CUDA device without a card: tensors that say `cuda`, follow its rules, and compute real values on the processor.

torch's own fake tensors know shapes alone, so every `float(loss)` stops them, and autograd has no queue for `cuda`
where there is no driver. Here Python sees `cuda`, autograd sees `meta`, and each operation runs on the processor under
the rule of the device: all tensors on one device, except scalars and indices. Results therefore equal the processor's
bit for bit, and a tensor that was left behind is an error that names the operation. So is a convolution whose bits are
left to torch, which would cut its factors.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

from mergeflow.memory import Tally
from mergeflow.training import arithmetic

aten = torch.ops.aten
MOVES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}
CONVOLUTIONS = {aten.convolution, aten.convolution_backward}
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}


_tallies: list[Tally] = []


@contextmanager
def counted() -> Iterator[Tally]:
    """Count the bytes of the tensors that are made on cards inside, as long as something holds them."""
    _tallies.append(tally := Tally())
    yield tally
    _tallies.remove(tally)


class OnCard(Tensor):
    """A tensor on a card; `values` are its numbers, on the processor, and `number` is the card's."""

    values: Tensor
    number: int

    @staticmethod
    def __new__(cls, values: Tensor, number: int = 0, requires_grad: bool = False) -> Self:
        with no_dispatch(), torch.inference_mode(False):  # an inference tensor cannot become a subclass
            shell = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
            made: Self = Tensor._make_subclass(cls, shell, requires_grad, device_for_backend_keys=torch.device("cuda"))
        made.values, made.number = values, number
        for tally in _tallies:
            tally.add(values)
        return made

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.number)

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_meta(self) -> bool:
        return False

    @property
    def is_cpu(self) -> bool:
        return False

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def tolist(self) -> Any:
        return self.values.tolist()

    def record_stream(self, stream: Any) -> None: ...

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnCard({self.values!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        made = OnCard(self.values.clone(), self.number, self.requires_grad)
        made._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = made
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    on_card = any(isinstance(value, OnCard) for value in tensors)
    number = next((value.number for value in tensors if isinstance(value, OnCard)), 0)
    if func.overloadpacket is aten.to:  # in inference mode moves come whole, the device among their args
        with _Factories():
            return func.decompose(*args, **kwargs)
    if on_card and func not in MOVES:
        _check_devices(func, args, tensors)
        _check_switches(func)
    wanted = kwargs.get("device")
    if wanted is not None:
        place = torch.device(wanted)
        on_card = place.type in ("cuda", "meta")  # C++ asks where a tensor lies and is told `meta`
        number = number if place.type == "meta" else place.index or 0
        kwargs = {**kwargs, "device": torch.device("cpu") if on_card else wanted}
    pinned = kwargs.get("pin_memory")
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if func in MOVES and func is not aten._to_copy.default:
        on_card = False  # they write into what they are given
    func = (
        aten.zeros.default if func is aten._efficientzerotensor.default else func
    )  # zeros without memory, of C++ alone
    plain_args, plain_kwargs = tree_map_only(OnCard, lambda value: value.values, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    if pinned:
        result.is_pinned = lambda device=None: True
    wrapped_values = {id(value.values): value for value in tensors if isinstance(value, OnCard)}

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, OnCard):
            return value
        if id(value) in wrapped_values:  # in place: the same tensor comes back
            same = wrapped_values[id(value)]
            if same.shape != value.shape:  # `squeeze_`, with which a product with a vector ends
                with no_dispatch():
                    func(same, *args[1:], **kwargs)
            return same
        return OnCard(value, number) if on_card else value

    return tree_map(wrapped, result)


def _check_devices(func: Any, args: Any, tensors: list[Tensor]) -> None:
    if func in INDEXED and isinstance(args[0], OnCard):
        tensors = [value for value in tensors if value is args[0] or value.dtype not in (torch.int64, torch.bool)]
    places = {str(value.device): list(value.shape) for value in tensors if isinstance(value, OnCard) or value.ndim}
    if len(places) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {places}")


def _check_switches(func: Any) -> None:
    """Refuse a convolution that nobody told how many bits to keep: torch itself lets it cut its factors to 11."""
    if func.overloadpacket in CONVOLUTIONS and not arithmetic._holding:
        raise RuntimeError(f"{func} outside of mergeflow.training.arithmetic: torch would compute it with TF32")


class _Factories(TorchDispatchMode):
    """Make the tensors that are asked for on `cuda`, in this thread; no memory is pinned."""

    def __enter__(self) -> Self:
        self.before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") is then made here and moved
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch._C._set_only_lift_cpu_tensors(self.before)  # of the whole process: an inner one must not end it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Stream:
    """A queue whose work is done as soon as it is handed over, and an event in one."""

    def __init__(self, device: Any = None) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, stream: Any = None) -> None: ...


# What torch says of the device outside of any tensor; `_lazy_init` would look for a driver.
_SAID: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "get_device_name": lambda device=None: "a simulated card",
    "reset_peak_memory_stats": lambda device=None: None,
    "max_memory_allocated": lambda device=None: 7 * 2**20,
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: None,
    "is_bf16_supported": lambda *_: True,
    "synchronize": lambda device=None: None,
    "Stream": _Stream,
    "Event": _Stream,
    "current_stream": lambda device=None: _Stream(),
    "stream": lambda stream: nullcontext(),
}


@contextmanager
def driver(count: int = 1, memory: int = 80 * 2**30) -> Iterator[None]:
    """Let torch say that there are `count` cards with `memory` bytes each; torch's own fake tensors need no more."""
    torch._C._ensureCUDADeviceGuardSet()  # a guard that does nothing where there is no driver, as fake tensors have it
    said = {"device_count": lambda: count, "mem_get_info": lambda device=None: (memory, memory)}
    with ExitStack() as stack:
        for name, value in (_SAID | said).items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        yield


@contextmanager
def card(count: int = 1, memory: int = 80 * 2**30) -> Iterator[None]:
    """Have CUDA devices inside: `count` of them, with `memory` bytes each."""
    with driver(count, memory), ExitStack() as stack:
        stack.enter_context(patch.object(torch, "load", _load))
        # A module's parameters become those of another class, so `.to` must replace them, not their data.
        stack.enter_context(patch.object(torch.__future__, "_overwrite_module_params_on_conversion", True))
        stack.enter_context(patch.object(ThreadPoolExecutor, "submit", _submit))
        stack.enter_context(_Factories())
        yield


_plain_load = torch.load


def _load(*args: Any, map_location: Any = "cpu", **kwargs: Any) -> Any:
    """Read as torch does, and move where `map_location` says."""
    loaded = _plain_load(*args, map_location="cpu", **kwargs)
    return tree_map_only(Tensor, lambda value: value.to(map_location), loaded)


_plain_submit = ThreadPoolExecutor.submit


def _submit(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Hand work to a pool whose threads have the card too: a dispatch mode is its thread's own."""

    def with_card() -> Any:
        with _Factories():
            return work(*args, **kwargs)

    return _plain_submit(pool, with_card)


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CARDS = [pytest.param(False, id="simulated"), pytest.param(True, marks=cuda, id="real")]
on_cards = pytest.mark.parametrize("real", CARDS)


def on(real: bool) -> AbstractContextManager[Any]:
    return nullcontext() if real else card()
