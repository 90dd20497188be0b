"""What the CART studies measured, put together again from their tidy rows, and judged by their own rules."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from tasks.studies.papers.rank_curve import findings as rank_curve
from tasks.studies.papers.rank_curve.results import LEVELS
from tasks.studies.papers.subset_scaling import findings as subset_scaling
from tasks.studies.results import Finding
from tasks.studies.rows import Row, picked


def of_rank_curve(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for (count, seed), own in grouped(rows, "tasks", "seed"):
        curves: dict[str, dict[str, list[Row]]] = {}
        for (kind, rule, ratio), points in grouped([row for row in own if row["rule"]], "curve", "rule", "ratio"):
            point = {"ratio": ratio, "scale": points[0]["scale"], "test": accuracy(points)}
            curves.setdefault(kind, {}).setdefault(rule, []).append(point)
        levels = {name: accuracy(picked(own, curve=name)) for name in LEVELS}
        found.append({"tasks": count, "seed": seed, "curves": curves, **levels})
    return rank_curve.findings(found)


def of_subset_scaling(rows: Sequence[Row], starts: Sequence[int]) -> list[Finding]:
    found, plans, known = [], {}, {}
    for (seed, size, subset), own in grouped(rows, "seed", "size", "subset"):
        methods = {name: {"test": accuracy(tasks)} for (name,), tasks in grouped(own, "method")}
        found.append({"seed": seed, "size": size, "tasks": subset.split(), "methods": methods})
        first = own[0]
        ends = {"range": [first["a"] / 100, first["b"] / 100], "margin": first["epsilon"] / 100}
        plans[size] = {"size": size, "population": first["population"], **ends}
        levels = known.setdefault(seed, {"individual": {}, "zero_shot": {}})
        for name, column in (("individual", "expert"), ("zero_shot", "zero_shot")):
            levels[name] |= {row["task"]: row[column] / 100 for row in own}
    return subset_scaling.findings(found, list(plans.values()), known, starts)


def grouped(rows: Sequence[Row], *keys: str) -> Iterable[tuple[Any, list[Row]]]:
    """Return the rows by the values of some columns, in the order in which these first stand."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in keys), []).append(row)
    return found.items()


def accuracy(rows: Sequence[Row]) -> dict[str, float]:
    """Return a fraction for each task from accuracies in %."""
    return {row["task"]: fraction(row["accuracy"]) for row in rows}


def fraction(percent: float) -> float:
    """Return the share of right answers, k / n with few images, of which `percent` is 100 times.

    Dividing by 100 may miss it by the last bit, which shows where two models are equal.

    Example:
        >>> 100 * (7 / 18) / 100 == 7 / 18, fraction(100 * (7 / 18)) == 7 / 18
        (False, True)
    """
    return float(Fraction(percent / 100).limit_denominator(100_000))
