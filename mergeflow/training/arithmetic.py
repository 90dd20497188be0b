"""Set the precision of forward passes, and torch's switches, which all threads of a process share."""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Condition, local
from typing import Any

import torch

from mergeflow.training.settings import Precision

Kind = tuple[bool, bool]  # TF32, deterministic

_changed = Condition()
_holding: dict[Kind, int] = {}  # one kind at a time, with the number of its holders
_own = local()  # .kinds: the settings that this thread holds, the innermost last
_restore: list[Callable[[], None]] = []  # restores torch's settings when the last holder has gone


@contextmanager
def arithmetic(*, tf32: bool = False, deterministic: bool = False) -> Iterator[None]:
    """Compute under torch's process-wide switches; wait while other threads compute under others.

    Without TF32, float32 products and convolutions on CUDA keep all 24 bits of their factors (torch itself lets
    convolutions use TF32); with it they keep 11, at several times the speed. Deterministic algorithms give the same
    bits for the same inputs on the same device and torch; without them sums over threads may differ in their last
    bits from run to run. The processor computes the same with and without both.

    A thread that already computes under other switches has these inside the block, and its own again after it.

    Example:
        >>> with arithmetic(deterministic=True):
        ...     torch.are_deterministic_algorithms_enabled()
        True
    """
    kinds: list[Kind] = _own.__dict__.setdefault("kinds", [])
    if kinds:
        _release(kinds[-1])
    kinds.append((tf32, deterministic))
    _hold(kinds[-1])
    try:
        yield
    finally:
        _release(kinds.pop())
        if kinds:
            _hold(kinds[-1])


def forward_in(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which models are judged in a precision.

    Args:
        precision: `float32` leaves everything as the caller has it. `tf32` lets a CUDA device cut the factors of
            float32 products to 11 bits. `bfloat16` computes under autocast: 8-bit factors, summed in float32.
    """
    warn_of_slow(precision, device)
    if precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    if precision == "tf32":
        return arithmetic(tf32=True, deterministic=torch.are_deterministic_algorithms_enabled())
    return nullcontext()


def warn_of_slow(precision: Precision, device: torch.device) -> None:
    """Warn of bfloat16 on a processor without AVX512: a step takes about 15 times as long as in float32."""
    if precision == "bfloat16" and device.type == "cpu" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        warnings.warn(
            "precision: this processor has no instructions for bfloat16, in which a step takes many times as long as "
            "in float32. Write `precision: float32`.",
            stacklevel=2,
        )


def _hold(kind: Kind) -> None:
    with _changed:
        _changed.wait_for(lambda: not _holding or kind in _holding)
        if not _holding:
            _restore.append(_switch(*kind))
        _holding[kind] = _holding.get(kind, 0) + 1


def _release(kind: Kind) -> None:
    with _changed:
        _holding[kind] -= 1
        if not _holding[kind]:
            del _holding[kind]
            _restore.pop()()
            _changed.notify_all()


def _switch(tf32: bool, deterministic: bool) -> Callable[[], None]:
    """Set torch's switches; return what sets them back."""
    cudnn: Any = torch.backends.cudnn
    places: list[tuple[Any, str, Any]] = [
        (torch.backends.cuda.matmul, "fp32_precision", "tf32" if tf32 else "ieee"),
        (cudnn.conv, "fp32_precision", "tf32" if tf32 else "ieee"),
        (cudnn, "deterministic", deterministic),
        (torch.utils.deterministic, "fill_uninitialized_memory", False),  # it costs time and finds bugs, not bits
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in places]
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    for place, name, value in places:
        setattr(place, name, value)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch refuses products without it
    torch.use_deterministic_algorithms(deterministic)

    def restore() -> None:
        for place, name, value in before:
            setattr(place, name, value)
        torch.use_deterministic_algorithms(was_deterministic)

    return restore
