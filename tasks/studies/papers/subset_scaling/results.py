"""What the study `subset_scaling` says: tables, findings and figures of its rows, one row per subset."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mergeflow.evaluation.subsets import promised_margin, sample_size
from tasks.studies.papers.subset_scaling.figures import scaling_figure
from tasks.studies.papers.subset_scaling.samples import (
    OURS,
    WIDER,
    Known,
    Rows,
    Sample,
    lost,
    name_of,
    samples_of,
    slope,
    told,
)
from tasks.studies.results import Cell, Finding, Table


def tables(rows: Rows, plans: Rows, known: Known, starts: Sequence[int]) -> list[Table]:
    """Return accuracies over N, what they lose, the sampling and what was chosen.

    Args: As of `findings`.
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
            "m measured": one.count,
            "promised ±": f"{_promised(one):.1f}",
            "widest ±, accuracy": f"{one.realised(one.absolute):.1f}",
            "widest ±, normalised": f"{one.realised(one.normalised):.1f}",
        }
        for one in samples
    ]
    return Table("The sample: promised and realised half intervals, points", rows)


def _promised(sample: Sample) -> float:
    """Return the ε that the subsets measured promise, in points; 0 where they are all there are."""
    return 100 * promised_margin(sample.bound, sample.count) if sample.count < sample.population else 0.0


def _chosen(sample: Sample, method: str) -> str:
    """Return the chosen values of what was searched, and how often each."""
    found = [row["methods"][method]["args"] for row in sample.rows]
    moving = [name for name in found[0] if name != "scale"] or ["scale"]
    counted = Counter(tuple(args[name] for name in moving) for args in found)
    return ", ".join(f"{'/'.join(f'{v:g}' for v in values)} × {n}" for values, n in sorted(counted.items()))


def _at(samples: Sequence[Sample], sizes: Sequence[int]) -> list[Sample]:
    return [sample for sample in samples if sample.size in sizes]


def findings(rows: Rows, plans: Rows, known: Known, starts: Sequence[int]) -> list[Finding]:
    """Hold the paper's statements against the subsets.

    Args:
        rows: as of `measure`, one for each subset.
        plans: what the study planned for each N.
        known: `individual` and `zero_shot` accuracy per task on test.
        starts: the N from which losses are counted.
    """
    samples = samples_of(rows, plans, known)
    methods = [method for method in rows[0]["methods"] if method != OURS]
    plain = [method for method in methods if not method.endswith(WIDER)]
    found = [_leads(samples, plain, "CART is at least as good as averaging, task arithmetic and TIES at every N.")]
    if plain != methods:
        wide = [method for method in methods if method not in plain]
        found.append(_leads(samples, wide, "So it is against task arithmetic that may choose larger λ."))
    found += [_loses_least(first, samples, methods) for first in _at(samples, starts)]
    return [*found, _steadiest(samples, methods), _promise(samples), _bounded(samples)]


def _leads(samples: Sequence[Sample], methods: Sequence[str], claim: str) -> Finding:
    gaps = {method: {one.size: one.interval(one.ahead(method)) for one in samples} for method in methods}
    measured = "; ".join(
        f"CART less {name_of(method)}: " + ", ".join(f"{told(gap, sign='+')} (N = {n})" for n, gap in over.items())
        for method, over in gaps.items()
    )
    return Finding("C7", claim, measured + ".", all(gap >= 0 for over in gaps.values() for gap, _ in over.values()))


def _loses_least(first: Sample, samples: Sequence[Sample], methods: Sequence[str]) -> Finding:
    """Compare the falls subset by subset: CART loses less where its lead grows."""
    last = samples[-1]
    falls = {m: lost(first, last, lambda sample, m=m: sample.normalised(m)) for m in (OURS, *methods)}  # type: ignore[misc]
    growth = {m: lost(last, first, lambda sample, m=m: sample.ahead(m)) for m in methods}  # type: ignore[misc]
    numbers = ", ".join(f"{name_of(method)} {told(fall)}" for method, fall in falls.items())
    more = ", ".join(f"{name_of(method)} by {told(gap, sign='+')}" for method, gap in growth.items())
    return Finding(
        "C7",
        f"CART degrades least from {first.size} to {last.size} tasks.",
        f"points lost: {numbers}; CART's lead grows over {more}.",
        all(gap > 0 for gap, _ in growth.values()),
    )


def _steadiest(samples: Sequence[Sample], methods: Sequence[str]) -> Finding:
    """CART's spread over subsets against the others', at each N that has more than one subset."""
    shown = [sample for sample in samples if sample.count > 1]
    smallest = {one.size: min(methods, key=one.deviation) for one in shown}
    steadier = [one.size for one in shown if one.deviation(OURS) <= one.deviation(smallest[one.size])]
    numbers = ", ".join(
        f"{one.deviation(OURS):.1f} (next {name_of(smallest[one.size])} {one.deviation(smallest[one.size]):.1f}) at "
        f"N = {one.size}"
        for one in shown
    )
    return Finding(
        "C7",
        "CART is the steadiest: its standard deviation over subsets is the smallest at every N but one.",
        f"{numbers}; smallest at {len(steadier)} of {len(shown)} N.",
        len(steadier) >= len(shown) - 1,
    )


def _promise(samples: Sequence[Sample]) -> Finding:
    sampled = [one for one in samples if one.count < one.population]
    kept = all(one.realised(one.absolute) <= _promised(one) for one in sampled)
    numbers = ", ".join(
        f"± {one.realised(one.absolute):.1f} of {_promised(one):.1f} (N = {one.size}, m = {one.count})"
        for one in sampled
    )
    claim = "The sample keeps its promise: no method's 95 % interval of mean accuracy is wider than ε."
    return Finding("C7", claim, f"widest half interval of what m promises, points: {numbers}.", kept)


def _bounded(samples: Sequence[Sample]) -> Finding:
    """The bound of σ rests on values in [a, b], which merging does not guarantee."""
    ends = [(one, [value for m in one.rows[0]["methods"] for value in one.absolute(m)]) for one in samples]
    inside = all(100 * one.plan["range"][0] <= min(v) and max(v) <= 100 * one.plan["range"][1] for one, v in ends)
    numbers = ", ".join(
        f"{min(v):.1f} … {max(v):.1f} in {100 * one.plan['range'][0]:.1f} … {100 * one.plan['range'][1]:.1f} "
        f"(N = {one.size})"
        for one, v in ends
    )
    return Finding("C7", "Every measured mean accuracy lies in [a, b], as the bound of σ assumes.", numbers, inside)


def notes(rows: Rows, plans: Rows, known: Known) -> list[str]:
    """Return what decides what was seen.

    Args:
        rows: as of `measure`, one for each subset.
        plans: what the study planned for each N.
        known: `individual` and `zero_shot` accuracy per task on test.
    """
    samples = samples_of(rows, plans, known)
    few, many = samples[0], samples[-1]
    found = [
        "CART's λ stays at 1 as in the paper. Subsets of many tasks share most of them, so their spread shrinks with N "
        "for every method; it says nothing about tasks that are not among these.",
        *[_slack(one) for one in samples if one.count > 1][:1],
    ]
    wide = [method for method in few.rows[0]["methods"] if method.endswith(WIDER)]
    for method in wide:
        plain = method.removesuffix(WIDER)
        gains = {
            one.size: float(np.mean(np.subtract(one.normalised(method), one.normalised(plain)))) for one in samples
        }
        found.append(
            f"What a wider choice of λ is worth to {name_of(plain)}: "
            + ", ".join(f"{gain:+.1f} (N = {n})" for n, gain in gains.items())
            + f" points. λ = 1/N is the average, so λ ≤ 0.3 shrinks it at N = {few.size} and stretches it "
            f"{0.3 * many.size:.0f} times at N = {many.size}: the paper's grid makes task arithmetic look flatter "
            "over N than it is at its best."
        )
    return found


def _slack(sample: Sample) -> str:
    """Return how far the bound of σ is from what was measured."""
    largest = max(float(np.std(sample.absolute(method), ddof=1)) for method in sample.rows[0]["methods"])
    enough = sample_size(largest / 100, promised_margin(sample.bound, sample.count)) if sample.bound else sample.count
    return (
        f"Popoviciu's bound knows only the ends: at N = {sample.size} it allows a standard deviation of "
        f"{100 * sample.bound:.1f} points, the largest measured is {largest:.1f}; with that known, {enough} instead of "
        f"{sample.count} subsets would have promised the same."
    )


def figures(rows: Rows, plans: Rows, known: Known) -> dict[str, Figure]:
    """Return the study's figures.

    Args:
        rows: as of `measure`, one for each subset.
        plans: what the study planned for each N.
        known: `individual` and `zero_shot` accuracy per task on test.
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
