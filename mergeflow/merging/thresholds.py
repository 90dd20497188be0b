"""Exact selection over a whole model, as first passes: k-th largest values, and trimming to a share of the largest.

The bits of a float, with those of negative numbers flipped, order as its value does. So histograms of 16 bits at a
time, each over the elements that share the leading bits already settled, find the k-th value exactly: two passes for
float32, four for float64.

TIES needs one reading: a sample says between which two magnitudes each expert's k-th largest lies. One pass counts
what is above that window, tallies what is inside, and sums the elected signs; where an entry of the window could change
a sign, the entries of that place are kept. Counting makes both exact: where the sample was wrong, or too much would
have to be kept, the histograms are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, floor, inf, sqrt
from operator import add
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import FLOAT32, DType
from mergeflow.late import np, torch
from mergeflow.merging.method import ByUnit, Elementwise, Model, Pass, Stack, gathering

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_PENDING = 1 << 18  # values that wait to be counted
_DISTINCT = 1 << 22  # distinct values beyond which a tally gives up


class Tally:
    """How often each value occurs; where it is `full`, there were too many, of which only the number is known."""

    def __init__(self) -> None:
        self.total, self.full = 0, False
        self._values: NDArray[Any] | None = None
        self._counts: NDArray[Any] = np.zeros(0, dtype=np.int64)
        self._pending: list[NDArray[Any]] = []
        self._waiting = 0

    def add(self, values: NDArray[Any]) -> None:
        """Count some values [n]."""
        self.total += len(values)
        if self.full or not len(values):
            return
        self._pending.append(values)
        self._waiting += len(values)
        if self._waiting > _PENDING:
            self._count()

    def merge(self, other: Tally) -> Tally:
        other._count()
        self._count()
        if other._values is not None:
            self._join(other._values, other._counts)
        self.total, self.full = self.total + other.total, self.full or other.full
        return self

    def items(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the distinct values [n] in rising order, and how often each occurs, int [n]."""
        assert not self.full
        self._count()
        return (np.zeros(0) if self._values is None else self._values), self._counts

    def kth_largest(self, k: int) -> float:
        """Return the k-th largest value, 1 ≤ k ≤ total."""
        values, counts = self.items()
        from_top = counts[::-1].cumsum()
        return float(values[::-1][np.searchsorted(from_top, k)])

    def _count(self) -> None:
        if self._pending:
            pending, self._pending, self._waiting = np.concatenate(self._pending), [], 0
            self._join(*np.unique(pending, return_counts=True))

    def _join(self, values: NDArray[Any], counts: NDArray[Any]) -> None:
        if self._values is None:
            self._values, self._counts = values, counts
        else:
            both, where = np.unique(np.concatenate([self._values, values]), return_inverse=True)
            joined = np.zeros(len(both), dtype=np.int64)
            np.add.at(joined, where, np.concatenate([self._counts, counts]))
            self._values, self._counts = both, joined
        if len(self._values) > _DISTINCT:
            self.full, self._values, self._counts = True, None, self._counts[:0]


DIGIT = 16
_WINDOW = 4.0  # half the window of a trimming pass in standard errors: one sample in some 16,000 misses
_KEPT = 64 * 2**20  # bytes of kept places, per worker
_FEW = 2**14  # values of a sample; so few are put in order as they are
_DEVIATIONS = 5  # half a window in standard errors of the sample
_BINS = 1 << DIGIT
_HALF = _BINS >> 1

Values = Callable[[Stack, Any], "Tensor"]
Rank = Callable[[Any, int], int]
Ranks = Callable[[Any, int, int], list[list[int]]]


def _within(bits: Tensor, prefix: int, width: int) -> Tensor:
    """Return the bits whose part above the lowest `width` is the prefix; on the CPU by numpy, five times faster."""
    least = prefix << width
    if bits.device.type != "cpu":
        return bits[(bits >> width) == prefix]
    array = bits.numpy()
    return torch.from_numpy(array[(array - array.dtype.type(least)).view(f"u{array.itemsize}") < (1 << width)])


def kth_smallest(values: Tensor, k: int, overwrite: bool = False) -> Tensor:
    """Return the k-th smallest of flat values [n], 0-d, k = 1 … n.

    NumPy's partition holds one copy of the values; torch's `kthvalue` holds one and the indices, at 2 to 5 × the time.

    Args:
        overwrite: Whether the values may be put into another order, so that no copy is held.
    """
    if values.device.type != "cpu":
        return values.kthvalue(k).values
    array = values.detach().numpy()
    if len(array) > _FEW and (near := _near_sample(array, k)) is not None:
        return torch.tensor(near, dtype=values.dtype)
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
    """Return integers [...] that order as the floats do; `flip_negative` of them gives the floats' bits back."""
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

    The result is a float64 tensor [T], +∞ where k = 0.

    Args:
        values: (stack, args) → values [T, …] in the type of arithmetic.
        rank: (args, n) → k, 0 … n, for n elements in the model.
    """

    def ranks(args: Any, n: int, experts: int) -> list[list[int]]:
        k = rank(args, n)
        return [[n - k + 1 if k else 0]] * experts

    def joined(rows: list[Tensor]) -> Tensor:
        return torch.cat(rows).double() if rows else torch.zeros(0, dtype=torch.float64)

    search = _Search(name, values, ranks, dtype, not magnitudes, joined)
    return tuple(replace(step, unless=name) for step in search.passes())


def kth_smallest_passes(ranks: Ranks, name: str, only: Elementwise) -> Callable[[Any, DType], tuple[Pass, ...]]:
    """Return the passes that find some k-th smallest magnitudes of each expert's task vector, tensor by tensor.

    Args:
        ranks: (args, elements of a tensor, experts) → for each expert the k's, 1 … elements.
        name: Key of the result: by tensor, for each expert the magnitude at each k.
    """

    def passes(args: Any, dtype: DType) -> tuple[Pass, ...]:
        search = _Search(
            name, lambda stack, _: stack.taus, ranks, dtype, False, lambda rows: [r.tolist() for r in rows]
        )
        return tuple(replace(step, only=only, within=True) for step in search.passes())

    return passes


@dataclass(frozen=True)
class _Ranked:
    """The leading bits of the values that are searched, and their ranks, from 0, among those that share them."""

    bits: list[list[int]]
    ranks: list[list[int]]


@dataclass
class _Histograms:
    """How often 16 bits occur: in all values of an expert, or in those that share the leading bits of one."""

    counts: dict[tuple[int, int], NDArray[Any]] = field(default_factory=dict)
    among: _Ranked | None = None

    def add(self, key: tuple[int, int], digits: Tensor) -> None:
        if key in self.counts and len(digits) <= _BINS // 8:  # a histogram of its own would cost more than the few
            np.add.at(self.counts[key], digits.cpu().numpy(), 1)
        else:
            counts = torch.bincount(digits, minlength=_BINS).cpu().numpy()
            self.counts[key] = self.counts[key] + counts if key in self.counts else counts

    def merge(self, other: _Histograms) -> _Histograms:
        for key, counts in other.counts.items():
            self.counts[key] = self.counts[key] + counts if key in self.counts else counts
        return _Histograms(self.counts, self.among or other.among)


@dataclass(frozen=True)
class _Search:
    """Passes that find values by their ranks, over the whole model or in each tensor by itself.

    One reading for each 16 bits of the type: the histogram of the leading ones, then that of the next ones among the
    values that share the leading ones of the k-th.

    Attributes:
        name: Key of the result.
        values: (stack, args) → values [T, …] in the type of arithmetic.
        ranks: (args, elements, experts) → for each expert the k's of the k-th smallest, or 0 for +∞.
        signed: Whether some may be negative.
        result: Of the values [k's] of each expert.
    """

    name: str
    values: Values
    ranks: Ranks
    dtype: DType
    signed: bool
    result: Callable[[list[Tensor]], Any]

    def passes(self) -> tuple[Pass, ...]:
        count = self.dtype.itemsize * 8 // DIGIT
        names = [*(f"{self.name}.{digit}" for digit in range(count - 1)), self.name]
        return tuple(
            Pass(
                names[digit],
                lambda model, args: _Histograms(),
                partial(self._observe, digit, names[digit - 1]),
                _Histograms.merge,
                partial(self._next_bits, digit == count - 1),
            )
            for digit in range(count)
        )

    def _observe(self, digit: int, before: str, histograms: _Histograms, stack: Stack, args: Any) -> _Histograms:
        earlier = stack.model.results[before] if digit else None
        among = histograms.among = earlier[stack.name] if isinstance(earlier, dict) else earlier
        values, integer = self.values(stack, args), torch.int32 if self.dtype == FLOAT32 else torch.int64
        shift = DIGIT * (self.dtype.itemsize * 8 // DIGIT - 1 - digit)
        for expert, row in enumerate(values.reshape(len(values), values[0].numel())):
            bits = ordered_bits(row) if self.signed else row.abs().view(integer)
            for place, prefix in enumerate(among.bits[expert] if among else [0]):
                inside = _within(bits, prefix, shift + DIGIT) if among else bits
                digits = inside >> shift
                histograms.add((expert, place), digits + _HALF if self.signed and not digit else digits & (_BINS - 1))
        return histograms

    def _next_bits(self, last: bool, histograms: _Histograms, model: Model, args: Any) -> Any:
        """Return the bits so far of each value that is searched; the values, where these bits are the last."""
        experts, among = len(model.experts), histograms.among
        first = 0 if among or not self.signed else _HALF
        if among is None:
            wanted = self.ranks(args, int(histograms.counts[0, 0].sum()) if histograms.counts else 0, experts)
            among = _Ranked([[0] * len(row) for row in wanted], [[k - 1 for k in row] for row in wanted])
        bits, rest = [list(row) for row in among.bits], [list(row) for row in among.ranks]
        for expert, row in enumerate(among.ranks):
            for place, rank in enumerate(row):
                counts = histograms.counts.get((expert, place if histograms.among else 0), np.zeros(1, dtype=np.int64))
                below = counts.cumsum()
                digit = int(np.searchsorted(below, rank, side="right"))
                bits[expert][place] = (among.bits[expert][place] << DIGIT | digit) - first
                rest[expert][place] = rank - (int(below[digit - 1]) if digit else 0)
        return self.result([*map(self._floats, bits, rest)]) if last else _Ranked(bits, rest)

    def _floats(self, bits: list[int], ranks: list[int]) -> Tensor:
        """Return the values of some bits; +∞ where the rank is that of none."""
        none = torch.tensor([rank < 0 for rank in ranks])
        masked = [0 if rank < 0 else pattern for pattern, rank in zip(bits, ranks, strict=True)]
        patterns = torch.tensor(masked, dtype=torch.int32 if self.dtype == FLOAT32 else torch.int64)
        return flip_negative(patterns).view(self.dtype.torch).masked_fill(none, inf)


def threshold_passes(values: Values, keep: Callable[[Any], float], dtype: DType) -> tuple[Pass, ...]:
    """Return the passes that find the magnitude of each expert's ⌊keep · n⌋-th largest entry over the whole model.

    The result is `threshold`, a float64 tensor [T], +∞ where nothing is kept.
    """
    return kth_largest_passes(values, lambda args, n: count_kept(keep(args), n), dtype, "threshold", magnitudes=True)


def count_kept(keep: float, n: int) -> int:
    """Return ⌊keep · n⌋, with a share such as .3 of 10 meant exactly."""
    return floor(keep * n + 1e-9)


def trim_to(values: Tensor, thresholds: Tensor, out: Tensor | None = None) -> Tensor:
    """Zero the entries of values [T, …] below each expert's threshold [T]; equal magnitudes at the cut stay together.

    Args:
        out: Where the result goes, [T, …]; a new tensor by default.
    """
    trimmed = torch.empty_like(values) if out is None else out
    for row, target, threshold in zip(values, trimmed, thresholds.to(values.dtype).cpu(), strict=True):
        if threshold > 0:
            # hardshrink keeps what is above its bound in one fused pass: the bound is the number below the threshold.
            torch.hardshrink(row, float(torch.nextafter(threshold, torch.zeros_like(threshold))), out=target)
        else:
            target.copy_(row)
    return trimmed


def majority_of(total: int) -> float:
    return -1.0 if total < 0 else 1.0


@dataclass(frozen=True)
class _Windows:
    """Per expert the magnitudes between which its threshold lies, and the least one that is kept in any case."""

    low: Tensor
    high: Tensor
    floor: Tensor


def _sample_bytes(model: Model, elements: int, _workers: int) -> int:
    """Return the bytes of the runs, of those of all experts side by side, and of one expert's while they are sorted."""
    return (2 * len(model.experts) + 2) * elements * model.dtype.itemsize


def _windows(samples: ByUnit[Tensor], model: Model, args: Any, rank: Rank) -> _Windows:
    runs = [samples[key].numpy() for key in sorted(samples)]
    starts = np.cumsum([0, *(run.shape[1] for run in runs)])[:-1]
    k = rank(args, model.numel)
    edges = [_window(row, starts, k, model.numel) for row in np.concatenate(runs, axis=1)] if runs else []
    low, high = torch.tensor(edges, dtype=model.dtype.torch).reshape(-1, 2).T
    # Where the sample knows a single magnitude, all that have it are taken to be kept; the count will tell.
    floor = torch.where(low < high, torch.nextafter(high, torch.full_like(high, inf)), low)
    return _Windows(low, high, floor)


def _window(sample: NDArray[Any], starts: NDArray[Any], k: int, numel: int) -> tuple[float, float]:
    """Return two magnitudes between which the k-th largest of all very probably lies; runs begin at `starts`."""
    count = len(sample)
    if k == 0 or count == 0:
        return inf, inf
    ordered = np.sort(sample)
    place, spread = k * count / numel, 0.0
    if count < numel:
        near = ordered[count - 1 - min(int(place), count - 1)]
        shares = np.add.reduceat(sample >= near, starts, dtype=np.float64) / np.diff(starts, append=count)
        # Neighbours in the model are alike: their differences tell the error of a sample that is spread evenly.
        error = sqrt(float(np.square(np.diff(shares)).sum()) / 2) / len(starts)
        spread = _WINDOW * error * count + 4
    first, last = ceil(place - spread), ceil(place + spread)
    return float(ordered[count - last]) if last <= count else 0.0, float(ordered[count - first]) if first > 0 else inf


@dataclass
class _Tallies:
    """What one worker has seen."""

    above: list[int]
    equal: list[int]
    inside: list[Tally]
    alone: list[Tally]
    signs: int = 0
    places: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    held_bytes: int = 0
    room: Tensor | None = None  # reused: fresh memory costs a page fault for each 4 KB

    def like(self, values: Tensor) -> Tensor:
        """Return memory of the shape of the values, the same at each call."""
        if self.room is None or self.room.numel() < values.numel():
            self.room = torch.empty(values.numel(), dtype=values.dtype)
        return self.room[: values.numel()].reshape(values.shape)


def _start(model: Model, args: Any) -> _Tallies:
    count = len(model.experts)
    return _Tallies([0] * count, [0] * count, [Tally() for _ in range(count)], [Tally() for _ in range(count)])


def _merge(a: _Tallies, b: _Tallies) -> _Tallies:
    return _Tallies(
        list(map(add, a.above, b.above)),
        list(map(add, a.equal, b.equal)),
        list(map(Tally.merge, a.inside, b.inside)),
        list(map(Tally.merge, a.alone, b.alone)),
        a.signs + b.signs,
        a.places + b.places,
        max(a.held_bytes, b.held_bytes),
    )


def _observe(counts_so_far: _Tallies, stack: Stack, args: Any) -> _Tallies:
    windows: _Windows = stack.model.results["threshold.sample"]
    taus = stack.taus.reshape(len(stack.taus), stack.base.numel()).cpu()
    room = counts_so_far.like(taus)
    unsure = _count(counts_so_far, taus.numpy(), windows, room.numpy())
    if counts_so_far.held_bytes > _KEPT:
        return counts_so_far
    weights = stack.weight_column.reshape(-1, 1).cpu() if stack.model.has_weights else None
    sums = _weighted(trim_to(taus, windows.floor, room), weights).sum(0)
    counts_so_far.signs += _sum_of_signs(sums)
    where = torch.from_numpy(np.flatnonzero(unsure))
    if len(where):
        counts_so_far.signs -= _sum_of_signs(sums[where])
        _elect(counts_so_far, taus.index_select(1, where), weights, windows)
    return counts_so_far


def _count(tallies: _Tallies, taus: NDArray[Any], windows: _Windows, room: NDArray[Any]) -> NDArray[Any]:
    """Count magnitudes above the windows and tally those inside; returns where an expert's is inside and not zero."""
    unsure = np.zeros(taus.shape[1], dtype=bool)
    for index, row in enumerate(taus):
        low, high = (edge[index].numpy() for edge in (windows.low, windows.high))
        magnitudes = np.abs(row, out=room[index])
        over, above = magnitudes >= low, magnitudes > high
        counts = int(np.count_nonzero(over)), int(np.count_nonzero(above))
        tallies.above[index] += counts[1]
        tallies.equal[index] += counts[0] - counts[1]
        if low < high and counts[0] > counts[1]:
            inside = np.logical_xor(over, above, out=over)
            tallies.inside[index].add(magnitudes[inside])
            unsure |= inside if low > 0 else inside & (magnitudes > 0)
    return unsure


def _elect(tallies: _Tallies, taus: Tensor, weights: Tensor | None, windows: _Windows) -> None:
    """Sum the signs of places where an entry of a window cannot change them, and keep the others."""
    sure = trim_to(taus, windows.floor)
    maybe = trim_to(taus, windows.low).sub_(sure)
    certain, change = _weighted(sure, weights), _weighted(maybe, weights).abs().sum(0)
    total, size = certain.sum(0), certain.abs().sum(0)
    # The error of a sum of T numbers in any order is less than T · eps · Σ |x|.
    doubt = 4 * len(taus) * torch.finfo(taus.dtype).eps * (size + change)
    settled = (total.abs() > change + doubt) | (change == 0)
    tallies.signs += _sum_of_signs(total[settled])
    # Where nothing else counts, the sign is that of the one entry, if it is kept.
    single = ~settled & (size == 0) & ((maybe != 0).sum(0) == 1)
    entries = maybe[:, single]
    signed = torch.copysign(entries, _weighted(entries, weights))
    nonzero = entries != 0  # row by row, so that the entries of an expert stand together
    for tally, some in zip(tallies.alone, signed[nonzero].split(nonzero.sum(1).tolist()), strict=True):
        tally.add(some.numpy())
    rest = (sure + maybe)[:, ~settled & ~single]
    tallies.places.append((rest, weights))
    tallies.held_bytes += rest.nbytes


def _sum_of_signs(values: Tensor) -> int:
    array = values.numpy()
    return int(np.count_nonzero(array > 0)) - int(np.count_nonzero(array < 0))


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    return values if weights is None else values * weights


def _finish(tallies: _Tallies, model: Model, args: Any, rank: Rank) -> None:
    """Return the thresholds and the majority, where the counts prove them."""
    windows: _Windows = model.results["threshold.sample"]
    k, cuts = rank(args, model.numel), []
    for index in range(len(model.experts)):
        left, tally = k - tallies.above[index], tallies.inside[index]
        if k and (not 0 < left <= tallies.equal[index] or tally.full):
            return
        exact = k and bool(windows.low[index] < windows.high[index])
        cuts.append(tally.kth_largest(left) if exact else float(windows.low[index]))
    thresholds = torch.tensor(cuts, dtype=torch.float64)
    model.results["threshold"] = thresholds
    if tallies.held_bytes > _KEPT or any(tally.full for tally in tallies.alone):
        return
    total = tallies.signs
    for cut, tally in zip(cuts, tallies.alone, strict=True):
        values, counts = tally.items()
        total += int((np.sign(values) * counts)[np.abs(values) >= cut].sum())
    for places, weights in tallies.places:
        total += _sum_of_signs(_weighted(trim_to(places, thresholds), weights).sum(0))
    model.results["majority"] = majority_of(total)


def trimming_passes(rank: Rank) -> tuple[Pass, ...]:
    """Return the passes that find the magnitude of each expert's k-th largest entry, and the majority of the signs.

    Both are known afterwards, as `threshold` (a float64 tensor [T], +∞ where k = 0) and `majority`, or not at all.
    """
    sample = gathering(
        "threshold.sample",
        lambda stack, args: stack.taus.flatten(1).abs().cpu(),
        partial(_windows, rank=rank),
        sampled=True,
        held=_sample_bytes,
    )
    return sample, Pass(
        "threshold.window",
        _start,
        _observe,
        _merge,
        partial(_finish, rank=rank),
        finds=("threshold", "majority"),
        held=lambda model, elements, workers: min(
            workers * _KEPT, len(model.experts) * elements * model.dtype.itemsize
        ),
    )
