"""Trimming to a share of the largest magnitudes, and all that TIES must know of the whole model, in one reading.

A sample says between which two magnitudes each expert's k-th largest lies. One pass counts what is above that window,
tallies what is inside, and sums the elected signs; where an entry of the window could change a sign, the entries of
that place are kept. Counting makes both exact: where the sample was wrong, or too much would have to be kept, the full
passes run (`select.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil, inf, sqrt
from typing import TYPE_CHECKING, Any

from mergeflow.late import np, torch
from mergeflow.merging.passes import Pass
from mergeflow.merging.stack import Model, Stack
from mergeflow.merging.thresholds.tally import Tally, merged

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_DEVIATIONS = 4.0  # half the window in standard errors: one sample in some 16,000 misses
_KEPT = 64 * 2**20  # bytes of kept places, per worker

Rank = Callable[[Any, int], int]


def trim_to(values: Tensor, thresholds: Tensor, out: Tensor | None = None) -> Tensor:
    """Zero the entries below each expert's threshold; equal magnitudes at the cut stay together.

    Args:
        values: [T, …], one row for each expert.
        thresholds: [T]; 0 keeps all entries of a row, +∞ none.
        out: Where the result goes, [T, …]; a new tensor by default.

    Returns:
        [T, …] of the values' type.
    """
    kept = torch.empty_like(values) if out is None else out
    for row, target, threshold in zip(values, kept, thresholds.to(values.dtype).cpu(), strict=True):
        if threshold > 0:
            # hardshrink keeps what is above its bound in one fused pass: the bound is the number below the threshold.
            torch.hardshrink(row, float(torch.nextafter(threshold, torch.zeros_like(threshold))), out=target)
        else:
            target.copy_(row)
    return kept


def majority_of(total: int) -> float:
    """Return the sign that zero sums take."""
    return -1.0 if total < 0 else 1.0


@dataclass(frozen=True)
class _Windows:
    """Per expert the magnitudes between which its threshold lies, and the least one that is kept in any case."""

    low: Tensor
    high: Tensor
    floor: Tensor


def _sampled(found: dict[Any, Tensor], stack: Stack, args: Any) -> dict[Any, Tensor]:
    found[stack.name, stack.start] = stack.taus.flatten(1).abs().cpu()
    return found


def _sample_bytes(model: Model, elements: int, _workers: int) -> int:
    """Return the bytes of the runs, of those of all experts side by side, and of one expert's while they are sorted."""
    return (2 * len(model.experts) + 2) * elements * model.dtype.itemsize


def _windows(found: dict[Any, Tensor], model: Model, args: Any, rank: Rank) -> _Windows:
    runs = [found[key].numpy() for key in sorted(found)]
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
        spread = _DEVIATIONS * error * count + 4
    first, last = ceil(place - spread), ceil(place + spread)
    return float(ordered[count - last]) if last <= count else 0.0, float(ordered[count - first]) if first > 0 else inf


def _each(model: Model) -> range:
    return range(len(model.experts))


@dataclass
class _Found:
    """What one worker has seen."""

    above: list[int]
    equal: list[int]
    inside: list[Tally]
    alone: list[Tally]
    signs: int = 0
    places: list[tuple[Tensor, Tensor | None]] = field(default_factory=list)
    kept: int = 0
    room: Tensor | None = None  # reused: fresh memory costs a page fault for each 4 KB

    def like(self, values: Tensor) -> Tensor:
        """Return memory of the shape of the values, the same at each call."""
        if self.room is None or self.room.numel() < values.numel():
            self.room = torch.empty(values.numel(), dtype=values.dtype)
        return self.room[: values.numel()].reshape(values.shape)


def _start(model: Model, args: Any) -> _Found:
    count = len(model.experts)
    return _Found([0] * count, [0] * count, [Tally() for _ in _each(model)], [Tally() for _ in _each(model)])


def _merge(a: _Found, b: _Found) -> _Found:
    return _Found(
        [one + other for one, other in zip(a.above, b.above, strict=True)],
        [one + other for one, other in zip(a.equal, b.equal, strict=True)],
        merged(zip(a.inside, b.inside, strict=True)),
        merged(zip(a.alone, b.alone, strict=True)),
        a.signs + b.signs,
        a.places + b.places,
        max(a.kept, b.kept),
    )


def _observe(found: _Found, stack: Stack, args: Any, name: str) -> _Found:
    windows: _Windows = stack.model.known[f"{name}.sample"]
    taus = stack.taus.reshape(len(stack.taus), stack.base.numel()).cpu()
    room = found.like(taus)
    unsure = _count(found, taus.numpy(), windows, room.numpy())
    if found.kept > _KEPT:
        return found
    weights = stack.weight_column.reshape(-1, 1).cpu() if stack.model.has_weights else None
    sums = _weighted(trim_to(taus, windows.floor, room), weights).sum(0)
    found.signs += _sum_of_signs(sums)
    where = torch.from_numpy(np.flatnonzero(unsure))
    if len(where):
        found.signs -= _sum_of_signs(sums[where])
        _elect(found, taus.index_select(1, where), weights, windows)
    return found


def _count(found: _Found, taus: NDArray[Any], windows: _Windows, room: NDArray[Any]) -> NDArray[Any]:
    """Count magnitudes above the windows and tally those inside; returns where an expert's is inside and not zero."""
    unsure = np.zeros(taus.shape[1], dtype=bool)
    for index, row in enumerate(taus):
        low, high = (edge[index].numpy() for edge in (windows.low, windows.high))
        magnitudes = np.abs(row, out=room[index])
        over, above = magnitudes >= low, magnitudes > high
        counts = int(np.count_nonzero(over)), int(np.count_nonzero(above))
        found.above[index] += counts[1]
        found.equal[index] += counts[0] - counts[1]
        if low < high and counts[0] > counts[1]:
            inside = np.logical_xor(over, above, out=over)
            found.inside[index].add(magnitudes[inside])
            unsure |= inside if low > 0 else inside & (magnitudes > 0)
    return unsure


def _elect(found: _Found, taus: Tensor, weights: Tensor | None, windows: _Windows) -> None:
    """Sum the signs of places where an entry of a window cannot change them, and keep the others."""
    sure = trim_to(taus, windows.floor)
    maybe = trim_to(taus, windows.low).sub_(sure)
    certain, change = _weighted(sure, weights), _weighted(maybe, weights).abs().sum(0)
    total, size = certain.sum(0), certain.abs().sum(0)
    # The error of a sum of T numbers in any order is less than T · eps · Σ |x|.
    doubt = 4 * len(taus) * torch.finfo(taus.dtype).eps * (size + change)
    settled = (total.abs() > change + doubt) | (change == 0)
    found.signs += _sum_of_signs(total[settled])
    # Where nothing else counts, the sign is that of the one entry, if it is kept.
    single = ~settled & (size == 0) & ((maybe != 0).sum(0) == 1)
    entries = maybe[:, single]
    signed = torch.copysign(entries, _weighted(entries, weights))
    there = entries != 0  # row by row, so that the entries of an expert stand together
    for tally, some in zip(found.alone, signed[there].split(there.sum(1).tolist()), strict=True):
        tally.add(some.numpy())
    rest = (sure + maybe)[:, ~settled & ~single]
    found.places.append((rest, weights))
    found.kept += rest.nbytes


def _sum_of_signs(values: Tensor) -> int:
    array = values.numpy()
    return int(np.count_nonzero(array > 0)) - int(np.count_nonzero(array < 0))


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    return values if weights is None else values * weights


def _finish(found: _Found, model: Model, args: Any, rank: Rank, name: str) -> None:
    """Return the thresholds and the majority, where the counts prove them."""
    windows: _Windows = model.known[f"{name}.sample"]
    k, cuts = rank(args, model.numel), []
    for index in _each(model):
        left, tally = k - found.above[index], found.inside[index]
        if k and (not 0 < left <= found.equal[index] or tally.full):
            return
        exact = k and bool(windows.low[index] < windows.high[index])
        cuts.append(tally.kth_largest(left) if exact else float(windows.low[index]))
    thresholds = torch.tensor(cuts, dtype=torch.float64)
    model.known[name] = thresholds
    if found.kept > _KEPT or any(tally.full for tally in found.alone):
        return
    total = found.signs
    for cut, tally in zip(cuts, found.alone, strict=True):
        values, counts = tally.items()
        total += int((np.sign(values) * counts)[np.abs(values) >= cut].sum())
    for places, weights in found.places:
        total += _sum_of_signs(_weighted(trim_to(places, thresholds), weights).sum(0))
    model.known["majority"] = majority_of(total)


def trimming_passes(rank: Rank, name: str = "threshold") -> tuple[Pass, ...]:
    """Return the passes that find the magnitude of each expert's k-th largest entry, and the majority of the signs.

    Both are known afterwards, as `name` (a float64 tensor [T], +∞ where k = 0) and `majority`, or not at all.

    Args:
        rank: (args, n) → k, 0 … n, for n elements in the model.
        name: Key of the thresholds.
    """
    sample = Pass(
        f"{name}.sample",
        lambda model, args: {},
        _sampled,
        lambda a, b: {**a, **b},
        partial(_windows, rank=rank),
        sampled=True,
        held=_sample_bytes,
    )
    return sample, Pass(
        f"{name}.window",
        _start,
        partial(_observe, name=name),
        _merge,
        partial(_finish, rank=rank, name=name),
        finds=(name, "majority"),
        held=lambda model, elements, workers: min(
            workers * _KEPT, len(model.experts) * elements * model.dtype.itemsize
        ),
    )
