"""What the results of the study `laboratory` are read from: tidy rows, chosen, grouped by seed and fitted."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from tasks.studies.rows import Row

Rows = Sequence[Row]

CASE_C = 0.9  # Theorem 2 (C) asks for α < 1 − c; c = 0.9 (1 − α) is taken


def part(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def per_seed(rows: Rows, measure: Callable[[Rows], float]) -> list[float]:
    """Return `measure` of each seed's rows, by seed."""
    seeds = sorted({row["seed"] for row in rows})
    return [measure([row for row in rows if row["seed"] == seed]) for seed in seeds]


def whole(rows: Rows) -> list[Row]:
    """Return the phase diagram's rows with whole task vectors."""
    return part(rows, part="phase", kind="whole")


def critical(rows: Rows, solved: float) -> float:
    """Return the smallest λ ≥ 0 from which task 2 is solved, interpolated; rows of one α and seed, ascending in λ."""
    ahead = [row for row in rows if row["scale"] >= 0]
    for before, after in pairwise(ahead):
        if after["hinge_2"] <= solved < before["hinge_2"]:
            share = (before["hinge_2"] - solved) / (before["hinge_2"] - after["hinge_2"])
            return float(before["scale"] + share * (after["scale"] - before["scale"]))
    return float(ahead[0]["scale"])


def retained_until(rows: Rows, solved: float) -> float:
    """Return the most negative λ down to which task 1 stays solved, interpolated; rows of one α < 0 and seed."""
    below = sorted((row for row in rows if row["scale"] <= 0), key=lambda row: -float(row["scale"]))
    for before, after in pairwise(below):
        if before["hinge_1"] <= solved < after["hinge_1"]:
            share = (solved - before["hinge_1"]) / (after["hinge_1"] - before["hinge_1"])
            return float(before["scale"] + share * (after["scale"] - before["scale"]))
    return float(below[-1]["scale"])


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Return the least-squares slope of y on x."""
    x, y = np.array(list(points), dtype=float).T
    return float(np.polyfit(x, y, 1)[0])
