"""The exact k-th largest value of each expert over the whole model, without sorting or flattening anything.

The bits of a float, with those of negative numbers flipped, order as its value does. So histograms of 16 bits at a
time, each over the elements that share the leading bits already settled, find the k-th value exactly: two passes for
float32, four for float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil, floor, inf, sqrt
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import FLOAT32, DType
from mergeflow.late import np, torch
from mergeflow.merging.passes import Pass
from mergeflow.merging.stack import Model, Stack

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

DIGIT = 16
_FEW = 2**14  # values of a sample; so few are put in order as they are
_DEVIATIONS = 5  # half a window in standard errors of the sample
_BINS = 1 << DIGIT
_HALF = _BINS >> 1

Values = Callable[[Stack, Any], "Tensor"]
Rank = Callable[[Any, int], int]


@dataclass(frozen=True)
class Prefix:
    """What is settled after some digits: the leading bits of each k-th value and the rank left within them."""

    bits: tuple[int, ...]
    left: tuple[int, ...]


@dataclass(frozen=True)
class _Search:
    """One search: which values, which rank, under which name the result is known, and whether none is negative."""

    values: Values
    rank: Rank
    dtype: DType
    name: str
    magnitudes: bool

    @property
    def digits(self) -> int:
        return self.dtype.itemsize * 8 // DIGIT

    @property
    def integer(self) -> torch.dtype:
        return torch.int32 if self.dtype == FLOAT32 else torch.int64

    def start(self, model: Model, args: Any) -> Tensor:
        return torch.zeros(len(model.experts), _BINS, dtype=torch.int64)

    def observe(self, digit: int, counts: Tensor, stack: Stack, args: Any) -> Tensor:
        values = self.values(stack, args)
        shift = DIGIT * (self.digits - 1 - digit)
        for index, row in enumerate(values.reshape(values.shape[0], values[0].numel())):
            bits = row.abs().view(self.integer) if self.magnitudes else ordered_bits(row)
            if digit == 0:
                _count(counts[index, _HALF:] if self.magnitudes else counts[index], bits, shift, not self.magnitudes)
            else:
                settled = stack.model.known[f"{self.name}.{digit - 1}"].bits[index]
                _count(
                    counts[index], _within(bits, settled, shift + DIGIT) & ((1 << (shift + DIGIT)) - 1), shift, False
                )
        return counts

    def settle(self, digit: int, counts: Tensor, model: Model, args: Any) -> Prefix:
        before: Prefix | None = model.known.get(f"{self.name}.{digit - 1}") if digit else None
        wanted = before.left if before else (self.rank(args, model.numel),) * len(model.experts)
        bits, left = [], []
        for index, k in enumerate(wanted):
            from_top = counts[index].flip(0).cumsum(0)
            at = int(torch.searchsorted(from_top, k)) if k else 0
            value = _BINS - 1 - at
            left.append(k - (int(from_top[at - 1]) if at else 0))
            bits.append((before.bits[index] << DIGIT) | value if before else value - _HALF)
        if digit == self.digits - 1:
            model.known[self.name] = self._floats(bits, wanted)
        return Prefix(tuple(bits), tuple(left))

    def _floats(self, bits: list[int], wanted: tuple[int, ...]) -> Tensor:
        some = torch.tensor([k > 0 for k in wanted])
        kept = torch.tensor([value if k else 0 for value, k in zip(bits, wanted, strict=True)], dtype=self.integer)
        return torch.where(some, flip_negative(kept).view(self.dtype.torch).double(), torch.inf)


def _within(bits: Tensor, prefix: int, width: int) -> Tensor:
    """Return the bits whose part above the lowest `width` is the prefix; on the CPU by numpy, five times faster."""
    least = prefix << width
    if bits.device.type != "cpu":
        return bits[(bits >> width) == prefix]
    array = bits.numpy()
    return torch.from_numpy(array[(array - array.dtype.type(least)).view(f"u{array.itemsize}") < (1 << width)])


def _count(counts: Tensor, bits: Tensor, shift: int, signed: bool) -> None:
    """Add a histogram of the bits above `shift`, signed ones from the middle on, to the counts."""
    found = bits >> shift if shift else bits
    if signed:
        found = found + _HALF
    if found.numel() > _BINS // 8:
        counts += torch.bincount(found, minlength=len(counts)).cpu()
    elif found.numel():  # a histogram of its own would cost more than the few elements
        counts.index_add_(0, found.cpu(), torch.ones((), dtype=counts.dtype).expand(found.numel()))


def kth_smallest(values: Tensor, k: int, overwrite: bool = False) -> Tensor:
    """Return the k-th smallest of flat values [n], 0-d, k = 1 … n.

    NumPy's partition holds one copy of the values; torch's `kthvalue` holds one and the indices, at 2 to 5 × the time.

    Args:
        values: [n].
        k: 1 … n.
        overwrite: Whether the values may be put into another order, so that no copy is held.
    """
    if values.device.type != "cpu":
        return values.kthvalue(k).values
    array = values.detach().numpy()
    if len(array) > _FEW and (found := _near_sample(array, k)) is not None:
        return torch.tensor(found, dtype=values.dtype)
    array = array if overwrite else array.copy()
    array.partition(k - 1)
    return torch.from_numpy(array[k - 1 : k].copy())[0]


def _near_sample(array: NDArray[Any], k: int) -> float | None:
    """Return the k-th smallest of the values [n], or None where it does not lie where a sample says.

    Counting proves the answer. Values that are equal are counted and not sorted: numpy's partition takes 20 times as
    long where half of them are.
    """
    sample = np.sort(array[:: len(array) // _FEW])
    place = k / len(array) * len(sample)
    spread = _DEVIATIONS * sqrt(place * (1 - k / len(array))) + _DEVIATIONS
    first, last = floor(place - spread), ceil(place + spread)
    low = sample[first] if first >= 0 else -inf
    high = sample[last] if last < len(sample) else inf
    below, at_low, at_high, inside = 0, 0, 0, []
    for start in range(0, len(array), BLOCK):
        part = array[start : start + BLOCK]
        over, under = part > low, part < high
        below += int(np.count_nonzero(part < low))
        at_low += int(np.count_nonzero(part == low))
        at_high += int(np.count_nonzero(part == high))
        inside.append(part[np.logical_and(over, under, out=over)])
    rank = k - below
    if not 0 < rank <= at_low + sum(map(len, inside)) + (at_high if low < high else 0):
        return None
    if rank <= at_low:
        return float(low)
    between, rank = np.concatenate(inside), rank - at_low
    return float(np.partition(between, rank - 1)[rank - 1] if rank <= len(between) else high)


def ordered_bits(values: Tensor) -> Tensor:
    """Return integers that order as the floats do; `flip_negative` of them gives the floats' bits back.

    Example:
        >>> ordered_bits(torch.tensor([-1.0, -0.5, 0.5])).diff().gt(0).all().item()
        True
    """
    # Minus zero must order with zero, hence the addition.
    return flip_negative(
        (values + 0.0).contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int64)
    )


def flip_negative(bits: Tensor) -> Tensor:
    """Flip all bits but the sign of the negative integers [...]; applied twice it undoes itself.

    On integers throughout: seen as a float, a flipped tiny number is a signalling NaN, which arithmetic would alter.
    """
    last = bits.element_size() * 8 - 1
    return bits ^ ((bits >> last) & ((1 << last) - 1))


def kth_largest_passes(
    values: Values, rank: Rank, dtype: DType, name: str, magnitudes: bool = False
) -> tuple[Pass, ...]:
    """Return the passes that find each expert's k-th largest value over the whole model.

    Args:
        values: (stack, args) → values [T, …] in the type of arithmetic.
        rank: (args, n) → k, 0 … n, for n elements in the model.
        dtype: The type of arithmetic.
        name: Key of the result: a float64 tensor [T], +∞ where k = 0.
        magnitudes: Whether the magnitudes of the values are meant.
    """
    search = _Search(values, rank, dtype, name, magnitudes)
    return tuple(
        Pass(
            f"{name}.{digit}",
            search.start,
            partial(search.observe, digit),
            lambda a, b: a + b,
            partial(search.settle, digit),
            unless=name,
        )
        for digit in range(search.digits)
    )


def threshold_passes(
    values: Values, keep: Callable[[Any], float], dtype: DType, name: str = "threshold"
) -> tuple[Pass, ...]:
    """Return the passes that find the magnitude of each expert's ⌊keep · n⌋-th largest entry over the whole model.

    Args:
        values: (stack, args) → values [T, …] in the type of arithmetic.
        keep: args → the share that is kept, 0 … 1, of the n elements of the model.
        dtype: The type of arithmetic.
        name: Key of the result: a float64 tensor [T], +∞ where nothing is kept.
    """
    return kth_largest_passes(values, lambda args, n: kept_of(keep(args), n), dtype, name, magnitudes=True)


def kept_of(keep: float, n: int) -> int:
    """Return ⌊keep · n⌋, with a share such as .3 of 10 meant exactly."""
    return floor(keep * n + 1e-9)
