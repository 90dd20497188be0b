"""Tables, notes and figures of the study `subset_scaling`, from its rows, one for each seed and subset."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from studies.old.papers.subset_scaling.figures import scaling_figure
from studies.old.papers.subset_scaling.samples import (
    OURS,
    WIDER,
    Known,
    Rows,
    Sample,
    lost,
    name_of,
    samples_of,
    seeds_of,
    slope,
    told,
)
from studies.old.results import Cell, Table, with_interval
from studies.old.rows import tidy


def tables(rows: Rows, plans: Rows, known: Mapping[int, Known], starts: Sequence[int]) -> list[Table]:
    """Return accuracies over N, what they lose, the sampling and what was chosen.

    Args:
        rows: as of `measure`, one for each seed and subset.
        plans: what the study planned for each N.
        known: seed → `individual` and `zero_shot` accuracy per task on test.
        starts: the N from which losses are told.
    """
    samples = samples_of(rows, plans, known)
    methods = list(rows[0]["methods"])
    others = [method for method in methods if method != OURS]

    def over(cell: Callable[[Sample, str], Cell], columns: Sequence[str]) -> list[dict[str, Cell]]:
        return [{"N": one.size, "subsets": one.count, **{name_of(m): cell(one, m) for m in columns}} for one in samples]

    return [
        Table("Normalised test accuracy, %", over(lambda s, m: told(s.interval(s.normalised(m))), methods)),
        Table(
            "Normalised accuracy of CART less that of the others, subset by subset, points",
            over(lambda s, m: told(s.interval(s.ahead(m)), sign="+"), others),
        ),
        _losses(samples, methods, starts),
        Table("Mean test accuracy, %", over(lambda s, m: told(s.interval(s.absolute(m))), methods)),
        Table(
            "Standard deviation of normalised accuracy over subsets, points",
            [row for row in over(lambda s, m: f"{s.deviation(m):.1f}", methods) if row["subsets"] != 1],
        ),
        _sampling(samples),
        Table("What validation chose, how often", over(_chosen, [m for m in methods if m != "average"])),
    ]


def _losses(samples: Sequence[Sample], methods: Sequence[str], starts: Sequence[int]) -> Table:
    last = samples[-1]
    rows: list[dict[str, Cell]] = []
    for method in methods:
        cells: dict[str, Cell] = {"method": name_of(method)}
        for first in _at(samples, starts):
            fall = lost(first, last, lambda sample, m=method: sample.normalised(m))  # type: ignore[misc]
            cells[f"lost from N = {first.size} to {last.size}"] = told(fall)
        rows.append({**cells, "slope, points per task": f"{slope(samples, method):+.2f}"})
    return Table("What more tasks cost, normalised accuracy in points", rows)


def _sampling(samples: Sequence[Sample]) -> Table:
    rows: list[dict[str, Cell]] = [
        {
            "N": one.size,
            "subsets there are": one.population,
            "a, %": f"{100 * one.plan['range'][0]:.1f}",
            "b, %": f"{100 * one.plan['range'][1]:.1f}",
            "bound of σ, points": f"{100 * one.bound:.1f}",
            "m by the rule": one.plan["wanted"],
            "s of the pilot, points": f"{100 * one.plan['spread']:.1f}",
            "m in two stages": one.plan["asked"],
            "m measured": one.count,
            "widest ±, accuracy": f"{one.realised(one.absolute):.1f}",
            "widest ±, normalised": f"{one.realised(one.normalised):.1f}",
        }
        for one in samples
    ]
    return Table("The sample: promised and realised half intervals, points", rows)


def _chosen(sample: Sample, method: str) -> str:
    """Return the chosen values of what was searched, and how often each."""
    found = [row["methods"][method]["args"] for row in sample.rows]
    moving = [name for name in found[0] if name != "scale"] or ["scale"]
    counted = Counter(tuple(args[name] for name in moving) for args in found)
    return ", ".join(f"{'/'.join(f'{v:g}' for v in values)} × {n}" for values, n in sorted(counted.items()))


def _at(samples: Sequence[Sample], sizes: Sequence[int]) -> list[Sample]:
    return [sample for sample in samples if sample.size in sizes]


def tidy_rows(rows: Rows, plans: Rows, known: Mapping[int, Known]) -> list[dict[str, Any]]:
    """Return one row for each seed, subset, method and task.

    Args:
        rows: as of `measure`, one for each seed and subset.
        plans: what the study planned for each N.
        known: seed → `individual` and `zero_shot` accuracy per task on test.
    """
    planned = {plan["size"]: plan for plan in plans}
    return tidy(
        {
            "seed": row["seed"],
            "size": row["size"],
            "subset": " ".join(row["tasks"]),
            "method": method,
            "task": task,
            "accuracy": 100 * value,
            "expert": 100 * known[row["seed"]]["individual"][task],
            "zero_shot": 100 * known[row["seed"]]["zero_shot"][task],
            "validation": 100 * found["validation"],
            **found["args"],
            "a": 100 * planned[row["size"]]["range"][0],
            "b": 100 * planned[row["size"]]["range"][1],
            "epsilon": 100 * planned[row["size"]]["margin"],
            "population": planned[row["size"]]["population"],
        }
        for row in rows
        for method, found in row["methods"].items()
        for task, value in found["test"].items()
    )


def notes(rows: Rows, plans: Rows, known: Mapping[int, Known]) -> list[str]:
    """Return what decides what was seen.

    Args:
        rows: as of `measure`, one for each seed and subset.
        plans: what the study planned for each N.
        known: seed → `individual` and `zero_shot` accuracy per task on test.
    """
    by_seed = seeds_of(rows, plans, known)
    samples = samples_of(rows, plans, known)
    few, many = samples[0], samples[-1]
    found = [
        "CART's λ stays at 1 as in the paper. Subsets of many tasks share most of them, so that their spread says "
        "nothing about tasks that are not among these.",
        *[_slack(one) for one in samples if one.count > 1][:1],
    ]
    wide = [method for method in few.rows[0]["methods"] if method.endswith(WIDER)]
    for method in wide:
        plain = method.removesuffix(WIDER)
        gains = {
            one.size: [float(np.mean(np.subtract(s.normalised(method), s.normalised(plain)))) for s in same]
            for one, same in zip(samples, zip(*by_seed.values(), strict=True), strict=True)
        }
        found.append(
            f"What a wider choice of λ is worth to {name_of(plain)}: "
            + ", ".join(f"{with_interval(gain)} (N = {n})" for n, gain in gains.items())
            + f" points. λ = 1/N is the average, so λ ≤ 0.3 shrinks it at N = {few.size} and stretches it "
            f"{0.3 * many.size:.0f} times at N = {many.size}: the paper's grid makes task arithmetic look flatter "
            "over N than it is at its best."
        )
    return [*found, *_ends(rows)]


def _ends(rows: Rows) -> list[str]:
    """Say how often the smallest or the largest value of an argument was taken."""
    counts = Counter(row["size"] for row in rows)
    found = Counter(
        (method, argument, row["size"])
        for row in rows
        for method, one in row["methods"].items()
        for argument in one["ends"]
    )
    if not found:
        return []
    told = ", ".join(
        f"{name_of(method)}'s {argument} with {size} tasks {100 * times / counts[size]:.0f} %"
        for (method, argument, size), times in found.items()
    )
    return [f"How often an end of what was tried was taken, of all subsets and seeds: {told}."]


def _slack(sample: Sample) -> str:
    """Return how far the bound of σ is from what was measured."""
    largest = max(float(np.std(sample.absolute(method), ddof=1)) for method in sample.rows[0]["methods"])
    return (
        f"Popoviciu's bound knows only the ends: at N = {sample.size} it allows a standard deviation of "
        f"{100 * sample.bound:.1f} points, the largest measured is {largest:.1f}."
    )


def figures(rows: Rows, plans: Rows, known: Mapping[int, Known]) -> dict[str, Figure]:
    """Draw normalised accuracy over N and what CART is ahead, of the first seed.

    Args:
        rows: as of `measure`, one for each seed and subset.
        plans: what the study planned for each N.
        known: seed → `individual` and `zero_shot` accuracy per task on test.
    """
    samples = samples_of(rows, plans, known)
    methods = list(rows[0]["methods"])
    curves: dict[str, Any] = {
        name_of(m): {one.size: one.interval(one.normalised(m)) for one in samples} for m in methods
    }
    gaps = {name_of(m): {one.size: one.interval(one.ahead(m)) for one in samples} for m in methods if m != OURS}
    zero = {one.size: _zero_shot(one) for one in samples}
    return {"scaling": scaling_figure(curves, gaps, zero)}


def _zero_shot(sample: Sample) -> float:
    """Return the base's normalised accuracy in %, mean over the same subsets."""
    base, own = sample.known["zero_shot"], sample.known["individual"]
    return float(np.mean([100 * np.mean([base[t] / own[t] for t in row["tasks"]]) for row in sample.rows]))
