"""What the results of the study `laboratory` are read from: tidy rows, chosen and fitted."""

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

from studies.old.rows import Row, picked

Rows = Sequence[Row]

CASE_C = 0.9  # Theorem 2 (C) asks for α < 1 − c; c = 0.9 (1 − α) is taken


def whole(rows: Rows) -> list[Row]:
    """Return the phase diagram's rows with whole task vectors."""
    return picked(rows, part="phase", kind="whole")


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
