"""Count the memory that work would take on a device: the work runs as it is, on tensors that have no values.

torch's fake tensors find out shapes and types alone, so a training step of any model costs milliseconds and no memory,
with a card or without one. They lie on the processor whatever the device is, because autograd has no queue for a device
that is not there; where a CUDA device computes in other types or rounds sizes up, so does the tally.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

T = TypeVar("T")

_aten = torch.ops.aten
_BLOCK = 512  # bytes: torch's CUDA allocator rounds every tensor up to a multiple of it
_MATH, _FLASH = 0, 1  # of torch's SDPBackend
# What autocast computes in float32 on CUDA but not on the processor, as far as models use it.
_WIDE: set[Callable[..., Any]] = {
    *(F.layer_norm, F.group_norm, F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, torch.exp, torch.log),
    *(torch.pow, torch.rsqrt, Tensor.softmax, Tensor.log_softmax, Tensor.exp, Tensor.log, Tensor.pow, Tensor.rsqrt),
}


@dataclass
class Tally:
    """The bytes of tensors on one device.

    Attributes:
        cuda: whether it is a CUDA device.
        held: bytes alive now.
        peak: the most that were alive at once.
        elsewhere: whether what is made now lies in another memory.
    """

    cuda: bool
    held: int = 0
    peak: int = 0
    elsewhere: bool = False
    _known: set[int] = field(default_factory=set)

    def add(self, tensor: Tensor) -> None:
        """Count the storage of a tensor [...] until nothing holds it, unless it is counted already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = 0 if self.elsewhere else storage.nbytes() + (-storage.nbytes() % _BLOCK if self.cuda else 0)
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.held -= size


@contextmanager
def tallied(cuda: bool) -> Iterator[Tally]:
    """Have every tensor that is made inside be one without values, counted; each number asked of one is 1.

    Args:
        cuda: whether to count as a CUDA device would hold it.

    Example:
        >>> with tallied(cuda=False) as tally:
        ...     one, other = torch.ones(1000), torch.ones(1000)
        ...     both = one + other
        ...     del one, other
        >>> tally.peak, tally.held
        (12000, 4000)
    """
    tally = Tally(cuda)
    with FakeTensorMode(), _Counting(tally), _AsOnCuda(tally) if cuda else nullcontext():
        yield tally


def without_values(thing: T) -> T:
    """Return tensors, modules and dataclasses of both as they would lie on the device: inside `tallied` alone.

    Modules are changed in place and keep shared parameters shared; what is no tensor stays as it is.

    Args:
        thing: a tensor, a module, a dataclass with some in its fields, or a list, tuple or dict of them.
    """
    if isinstance(thing, nn.Module):
        known: dict[Tensor, Tensor] = {}  # it keeps the old ones, whose places new ones could take otherwise
        for part in thing.modules():
            tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
            for table in tables:
                for name, value in table.items():
                    if value is not None:
                        table[name] = known[value] if value in known else known.setdefault(value, _bare(value))
        return thing
    if is_dataclass(thing) and not isinstance(thing, type):
        return replace(
            thing, **{one.name: without_values(getattr(thing, one.name)) for one in fields(thing) if one.init}
        )
    made: T = tree_map(lambda leaf: leaf if leaf is thing else without_values(leaf), thing)
    return tree_map_only(Tensor, _bare, made)


def _bare(tensor: Tensor) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


class _Counting(TorchDispatchMode):
    """Count what operations make, with the kernel of attention that devices have; each value that is asked for is 1."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_aten._local_scalar_dense.default, _aten.item.default):  # in inference mode it comes whole
            return 1.0 if args[0].is_floating_point() else 1
        if func is _aten._fused_sdp_choice.default:
            return _FLASH if torch.backends.cuda.flash_sdp_enabled() else _MATH
        if func is _aten.index.Tensor:  # a mask lets everything through
            args = (args[0], [place for index in args[1] for place in _places(index)])
        found = func(*args, **(kwargs or {}))
        if func is _aten._scaled_dot_product_flash_attention_for_cpu.default and self._tally.cuda:
            found = _attention_on_cuda(*found)
        for one in tree_flatten(found)[0]:
            if isinstance(one, FakeTensor):
                self._tally.add(one)
        return found


def _attention_on_cuda(output: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Lay attention's output [batch, heads, tokens, width] out as the kernel does that CUDA takes in float32.

    It keeps the tokens before the heads whatever the queries' layout is, so that a model which has the tokens first, as
    CLIP's, holds a copy of it; the kernel of half precision keeps the queries' layout, as the processor's does.
    """
    if output.dtype == torch.float32:
        output = torch.empty_like(output.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    return output, lengths


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Return an index, and instead of a mask [...] of booleans the places of all its elements, a tensor a dimension."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]


class _AsOnCuda(TorchFunctionMode):
    """Let `cpu()` leave the device; under autocast, compute in float32 what CUDA's autocast computes in float32."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cpu:
            self._tally.elsewhere = True
            try:
                return args[0].clone()
            finally:
                self._tally.elsewhere = False
        if func in _WIDE and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map_only(
                Tensor, lambda one: one.float() if one.is_floating_point() else one, (args, kwargs)
            )
        return func(*args, **kwargs)
