"""Tables, notes and rows of the study `rank_curve`."""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from mergeflow.evaluation.averages import mean
from studies.old.claims import paired
from studies.old.leading import leader
from studies.old.results import Table, with_interval
from studies.old.rows import Row, accuracy_rows, tidy

KINDS = ("centred", "original", "matrices alone")
LEVELS = ("average", "experts", "zero_shot")
USED = 0.08  # the paper's rank ratio
RULES = ("once", "per rank")


def samples(rows: Sequence[Row], kind: str, rule: str, task: str | None = None) -> dict[float, list[float]]:
    """Return test accuracy in % over the ratio, of a task or of their mean, one value per seed.

    Args:
        rows: as of `measure`, for each seed.
        kind: a key of `METHODS`.
        rule: how λ was chosen: "once" or "per rank".
        task: one task; None for the mean over tasks.
    """
    found: dict[float, list[float]] = {}
    for row in rows:
        for point in row["curves"][kind][rule]:
            value = mean(point["test"]) if task is None else point["test"][task]
            found.setdefault(point["ratio"], []).append(100 * value)
    return found


def levels(rows: Sequence[Row], name: str) -> list[float]:
    """Return the mean over tasks of `average`, `experts` or `zero_shot`, in %, one value per seed."""
    return [100 * mean(row[name]) for row in rows]


def centre(rows: Sequence[Row], kind: str, rule: str, task: str | None = None) -> dict[float, float]:
    """Return the mean over seeds of `samples`.

    Args: As of `samples`.
    """
    return {ratio: fmean(values) for ratio, values in samples(rows, kind, rule, task).items()}


def peak(curve: dict[float, float]) -> float:
    """Return the ratio of the highest point; of equal ones the smallest.

    Example:
        >>> peak({0.0: 70.0, 0.08: 90.0, 0.16: 90.0, 1.0: 70.0})
        0.08
    """
    return max(sorted(curve), key=lambda ratio: curve[ratio])


def suites(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Return the rows of each number of tasks."""
    return {count: [row for row in rows if row["tasks"] == count] for count in sorted({row["tasks"] for row in rows})}


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the curves, the levels beside them, the chosen λ, and every task's peak."""
    found = []
    for count, own in suites(rows).items():
        found.append(_curve_table(count, own))
        found.append(_peak_table(count, own))
    return [_level_table(rows), *found]


def _level_table(rows: Sequence[Row]) -> Table:
    def line(count: int, own: Sequence[Row]) -> dict[str, Any]:
        addition, best = samples(own, "original", "once")[1.0], centre(own, "centred", "once")
        tuned = centre(own, "centred", "per rank")
        return {
            "tasks": count,
            "zero-shot": with_interval(levels(own, "zero_shot")[:1]),
            "average": with_interval(levels(own, "average")),
            "task arithmetic": with_interval(addition),
            "centred, highest": f"{with_interval(samples(own, 'centred', 'once')[peak(best)])} at {peak(best):g}",
            "centred, λ per rank": f"{with_interval(samples(own, 'centred', 'per rank')[peak(tuned)])} "
            f"at {peak(tuned):g}",
            "experts": with_interval(levels(own, "experts")),
        }

    return Table("Mean test accuracy, %", [line(*each) for each in suites(rows).items()])


def _curve_table(count: int, rows: Sequence[Row]) -> Table:
    curves = {(kind, rule): samples(rows, kind, rule) for kind in KINDS for rule in RULES}

    def line(ratio: float) -> dict[str, Any]:
        cells: dict[str, Any] = {"k / r": f"{ratio:g}"}
        for (kind, rule), curve in curves.items():
            accuracy = with_interval(curve[ratio]) if ratio in curve else None
            if curve:
                cells[f"{kind}, λ {rule}"] = accuracy
                cells[f"λ of {kind} {rule}"] = _scales(rows, kind, rule, ratio)
        return cells

    ratios = sorted(set().union(*curves.values()))
    return Table(f"First {count} tasks: mean test accuracy over the rank ratio, %", [line(ratio) for ratio in ratios])


def _scales(rows: Sequence[Row], kind: str, rule: str, ratio: float) -> str:
    points = [point for row in rows for point in row["curves"][kind][rule] if point["ratio"] == ratio]
    return ", ".join(f"{point['scale']:g}" for point in points)


def _peak_table(count: int, rows: Sequence[Row]) -> Table:
    def line(task: str) -> dict[str, Any]:
        curve, original = centre(rows, "centred", "once", task), centre(rows, "original", "once", task)
        near = min(curve, key=lambda ratio: abs(ratio - USED))
        return {
            "task": task,
            "centred peaks at": f"{peak(curve):g}",
            "accuracy there": f"{curve[peak(curve)]:.1f}",
            f"at {near:g}": f"{curve[near]:.1f}",
            "average": f"{curve[1.0]:.1f}",
            "original peaks at": f"{peak(original):g}",
            "task arithmetic": f"{original[1.0]:.1f}",
            "expert": f"{100 * fmean(row['experts'][task] for row in rows):.1f}",
        }

    return Table(
        f"First {count} tasks: each task's peak, λ chosen once, % (mean over seeds)",
        [line(t) for t in rows[0]["experts"]],
    )


def tidy_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each number of tasks, seed, curve, rule, ratio and task, and one for each level."""
    points = [
        {
            "seed": row["seed"],
            "tasks": row["tasks"],
            "curve": kind,
            "rule": rule,
            "ratio": float(point["ratio"]),
            "scale": float(point["scale"]),
            "task": task,
            "accuracy": 100 * value,
        }
        for row in rows
        for kind, rules in row["curves"].items()
        for rule, points in rules.items()
        for point in points
        for task, value in point["test"].items()
    ]
    return tidy([*points, *accuracy_rows(rows, ("seed", "tasks"), LEVELS, as_column="curve")])


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what decides the place and the height of the peak."""
    return [note for count, own in suites(rows).items() for note in _notes(count, own)]


def _notes(count: int, rows: Sequence[Row]) -> list[str]:
    once, tuned = centre(rows, "centred", "once"), centre(rows, "centred", "per rank")
    original, addition = centre(rows, "original", "per rank"), centre(rows, "original", "once")[1.0]
    scales = [
        fmean(point["scale"] for row in rows for point in row["curves"]["centred"]["per rank"] if point["ratio"] == r)
        for r in tuned
    ]
    shared = [ratio for ratio in tuned if ratio in once]
    gain = max(shared, key=lambda ratio: tuned[ratio] - once[ratio])
    gained = paired(*(samples(rows, "centred", rule)[gain] for rule in ("per rank", "once")))
    near = min(once, key=lambda ratio: abs(ratio - USED))
    lost = [(curve := centre(rows, "centred", "once", task))[peak(curve)] - curve[near] for task in rows[0]["experts"]]
    return [
        f"{count} tasks, λ chosen per rank: the highest mean of the centred curve, {tuned[peak(tuned)]:.1f} %, is at "
        f"{_highest(rows, 'centred')} (with λ chosen once {once[peak(once)]:.1f} % at {peak(once):g}); choosing λ per "
        f"rank gains most in the mean at {gain:g}, {with_interval(gained)} points. The mean chosen λ is "
        + ", ".join(f"{scale:.2f} at {ratio:g}" for ratio, scale in zip(tuned, scales, strict=True))
        + f". The highest mean of the original curve, {max(original.values()):.1f} %, is at "
        f"{_highest(rows, 'original')} (task arithmetic {addition:.1f} %).",
        f"{count} tasks: what one ratio for all tasks costs, λ chosen once: at {near:g} a task lies {fmean(lost):.1f} "
        f"points below its own peak in the mean, {max(lost):.1f} at worst.",
        *_ends(count, rows),
    ]


def _highest(rows: Sequence[Row], kind: str) -> str:
    """Return the ratio where a curve with λ chosen per rank is highest, with its lead over the next highest."""
    curve = samples(rows, kind, "per rank")
    return leader(curve, {ratio: f"{ratio:g}" for ratio in curve})[1]


def _ends(count: int, rows: Sequence[Row]) -> list[str]:
    """Say where the λ that was taken is the smallest or the largest tried."""
    found = Counter(
        f"{kind} at {point['ratio']:g}"
        for row in rows
        for kind, scales in row["tried"].items()
        for point in row["curves"][kind]["per rank"]
        if point["scale"] in scales
    )
    if not found:
        return []
    told = ", ".join(f"{name} ({times} of {len(rows)} seeds)" for name, times in found.items())
    return [f"{count} tasks: λ chosen per rank stood at an end of those tried: {told}."]
