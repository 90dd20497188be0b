"""The subsets of study `subset_scaling` by their number of tasks, and what the methods reached on them."""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt

import numpy as np

from mergeflow.evaluation.averages import mean, normalised, popoviciu_bound, subset_interval
from studies.lab.inputs import Accuracy
from studies.old.rows import Row

WIDER = ", wider λ"
OURS = "cart"
NAMES = {"average": "average", "task_arithmetic": "task arithmetic", "ties": "TIES", OURS: "CART"}
Rows = Sequence[Row]
Known = Mapping[str, Accuracy]
Interval = tuple[float, float]


class Sample:
    """The subsets of one N and what the methods reached on them.

    Args:
        plan: what the study planned for this N.
        rows: one per subset.
        known: `individual` and `zero_shot` accuracy per task on test.
    """

    def __init__(self, plan: Row, rows: Rows, known: Known) -> None:
        self.plan, self.size, self.known = plan, int(plan["size"]), known
        self.rows = [row for row in rows if row["size"] == plan["size"]]
        self.count, self.population = len(self.rows), int(plan["population"])
        self.bound = popoviciu_bound(*plan["range"])

    def absolute(self, method: str) -> list[float]:
        """Return mean accuracy in %, one value per subset."""
        return [100 * mean(row["methods"][method]["test"]) for row in self.rows]

    def normalised(self, method: str) -> list[float]:
        """Return normalised accuracy in %, one value per subset."""
        return [100 * normalised(row["methods"][method]["test"], self._own(row)) for row in self.rows]

    def ahead(self, method: str) -> list[float]:
        """Return CART's normalised accuracy less a method's in points, subset by subset."""
        return [one - other for one, other in zip(self.normalised(OURS), self.normalised(method), strict=True)]

    def interval(self, values: Sequence[float]) -> Interval:
        return subset_interval(values, self.population)

    def realised(self, measure: Callable[[str], list[float]]) -> float:
        """Return the widest half interval of all methods, in points."""
        return max(self.interval(measure(method))[1] for method in self.rows[0]["methods"])

    def deviation(self, method: str) -> float:
        """Return the standard deviation of normalised accuracy over subsets in points; of one subset nan."""
        return float(np.std(self.normalised(method), ddof=1)) if self.count > 1 else float("nan")

    def _own(self, row: Row) -> Accuracy:
        return {task: self.known["individual"][task] for task in row["tasks"]}


def seeds_of(rows: Rows, plans: Rows, known: Mapping[int, Known]) -> dict[int, list[Sample]]:
    """Return one sample for each N, by the seed of the experts.

    Args:
        rows: as of `measure`, one for each seed and subset.
        plans: what the study planned for each N.
        known: seed → `individual` and `zero_shot` accuracy per task on test.
    """
    return {
        seed: [Sample(plan, [row for row in rows if row["seed"] == seed], own) for plan in plans]
        for seed, own in known.items()
    }


def samples_of(rows: Rows, plans: Rows, known: Mapping[int, Known]) -> list[Sample]:
    """Return the samples of the first seed, which the tables show.

    Args: As of `seeds_of`.
    """
    return next(iter(seeds_of(rows, plans, known).values()))


def name_of(method: str) -> str:
    """Return a method's name for readers.

    Example:
        >>> name_of("task_arithmetic, wider λ")
        'task arithmetic, wider λ'
    """
    plain = method.removesuffix(WIDER)
    return NAMES.get(plain, plain) + method[len(plain) :]


def told(interval: Interval, digits: int = 1, sign: str = "") -> str:
    """Return mean ± half-width; the mean alone where all subsets were measured or one says nothing about others.

    Args:
        interval: mean and half-width.
        digits: after the point.
        sign: "+" shows the sign of positive numbers too.

    Example:
        >>> told((71.04, 1.26)), told((3.0, 0.0), sign="+")
        ('71.0 ± 1.3', '+3.0')
    """
    centre, half = interval
    spread = f" ± {half:.{digits}f}" if 0 < half < float("inf") else ""
    return f"{centre:{sign}.{digits}f}{spread}"


def lost(first: Sample, last: Sample, measure: Callable[[Sample], list[float]]) -> Interval:
    """Return by how much a mean falls from one N to another, with the interval of two independent samples.

    Args:
        first: the subsets of the smaller N.
        last: those of the larger N.
        measure: gives the values of a sample, one for each subset.
    """
    (one, half), (other, rest) = (sample.interval(measure(sample)) for sample in (first, last))
    return one - other, sqrt(half**2 + rest**2)


def slope(samples: Sequence[Sample], method: str) -> float:
    """Return the least-squares slope of mean normalised accuracy over N, in points per task."""
    means = [float(np.mean(sample.normalised(method))) for sample in samples]
    return float(np.polyfit([sample.size for sample in samples], means, 1)[0])
