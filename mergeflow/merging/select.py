"""The exact k-th largest magnitude of each expert's whole task vector, without sorting or flattening it.

The bits of a non-negative float order as its value does. So histograms of 16 bits at a time, each over the elements that
share the leading bits already settled, find the k-th magnitude exactly: two passes for float32, four for float64.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import floor
from typing import Any

import torch
from torch import Tensor

from mergeflow.merging.method import Model, Stack, Statistic

DIGIT = 16
_BINS = 1 << DIGIT


@dataclass(frozen=True)
class Prefix:
    """What is settled after some digits: the leading bits of the k-th magnitude and the rank left within them."""

    bits: tuple[int, ...]
    left: tuple[int, ...]


Values = Callable[[Stack, Any], Tensor]


def threshold_statistics(
    values: Values, keep: Callable[[Any], float], dtype: torch.dtype, name: str = "threshold"
) -> tuple[Statistic, ...]:
    """Return the passes that find each expert's magnitude threshold over the whole model.

    Args:
        values: The [T, …] stack whose magnitudes count.
        keep: Share of elements to keep, 0 … 1, from the arguments; k = ⌊keep · n⌋.
        dtype: float32 or float64.
        name: Key of the result: a float64 tensor [T], +∞ where k = 0.
    """
    digits = dtype.itemsize * 8 // DIGIT
    steps = [
        Statistic(
            f"{name}.{digit}",
            lambda model, args: torch.zeros(len(model.experts), _BINS, dtype=torch.int64),
            partial(_observe, values, name, digit, digits),
            lambda a, b: a + b,
            partial(_settle, keep, name, digit, digits, dtype),
        )
        for digit in range(digits)
    ]
    return tuple(steps)


def _bits(values: Tensor) -> Tensor:
    """The magnitudes' bits as integers that order as the magnitudes do."""
    return values.abs().reshape(values.shape[0], -1).view(torch.int32 if values.dtype == torch.float32 else torch.int64)


def _observe(values: Values, name: str, digit: int, digits: int, counts: Tensor, stack: Stack, args: Any) -> Tensor:
    shift = DIGIT * (digits - 1 - digit)
    for index, bits in enumerate(_bits(values(stack, args))):
        if digit:
            prefix = stack.model.known[f"{name}.{digit - 1}"].bits[index]
            bits = bits[(bits >> (shift + DIGIT)) == prefix]
        if bits.numel():
            counts[index] += torch.bincount((bits >> shift) & (_BINS - 1), minlength=_BINS).cpu()
    return counts


def _settle(
    keep: Callable[[Any], float],
    name: str,
    digit: int,
    digits: int,
    dtype: torch.dtype,
    counts: Tensor,
    model: Model,
    args: Any,
) -> Prefix:
    before = model.known.get(f"{name}.{digit - 1}") if digit else None
    wanted = before.left if before else (floor(keep(args) * model.numel + 1e-9),) * len(model.experts)
    found_bits, found_left = [], []
    for index, k in enumerate(wanted):
        from_top = counts[index].flip(0).cumsum(0)
        at = int(torch.searchsorted(from_top, k)) if k else 0
        value = _BINS - 1 - at
        found_left.append(k - (int(from_top[at - 1]) if at else 0))
        found_bits.append(((before.bits[index] if before else 0) << DIGIT) | value)
    if digit == digits - 1:
        model.known[name] = _as_floats(found_bits, wanted, dtype)
    return Prefix(tuple(found_bits), tuple(found_left))


def _as_floats(bits: list[int], wanted: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    kept = [value if k else 0 for value, k in zip(bits, wanted, strict=True)]
    values = torch.tensor(kept, dtype=integer).view(dtype).double()
    return torch.where(torch.tensor([k > 0 for k in wanted]), values, torch.inf)
