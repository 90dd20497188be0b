"""One seed's models of the study `cart_landscape`, found by how they are made."""

from collections.abc import Callable, Sequence

import numpy as np

from studies.old.results import with_interval
from studies.old.rows import Row

Rows = Sequence[Row]
SHOWN = 0.08  # CART's rank ratio that is marked, as in the paper's figures
LABELS = {
    "base": "θ0",
    "average": "θ_avg",
    "cart": "CART, λ = 1, 8 %",
    "cart, best": "CART, best k and λ",
    "task_arithmetic": "task arithmetic, best λ",
    "task_arithmetic, largest": "task arithmetic, largest λ",
}


class Seed:
    """One seed's models."""

    def __init__(self, row: Row) -> None:
        self.row, self.addition = row, float(row["addition"])
        self.tasks: list[str] = row["tasks"]

    def path(self, kind: str, scale: float) -> list[Row]:
        """Return the models of one λ over k."""
        found = [one for one in self.row["models"] if one["kind"] == kind and one["scale"] == scale]
        return sorted(found, key=lambda one: float(one["rank"]))

    def along(self, kind: str, rank: float | None = None) -> list[Row]:
        """Return the models of one rank over λ."""
        found = [one for one in self.row["models"] if one["kind"] == kind and one["rank"] == rank]
        return sorted(found, key=lambda one: float(one["scale"]))

    def one(self, kind: str, scale: float | None = None, rank: float | None = None) -> Row:
        """Return what was measured of one model.

        Args:
            kind: of the model.
            scale: λ; None where it has none.
            rank: share of the rank; None where it has none.
        """
        wanted = kind, scale, rank
        return next(one for one in self.row["models"] if (one["kind"], one["scale"], one["rank"]) == wanted)

    def named(self, name: str) -> Row:
        """Return one of the models that have a label."""
        if name == "cart":
            return self.one("cart", 1.0, SHOWN)
        if name == "cart, best":
            return min((one for one in self.row["models"] if one["kind"] == "cart"), key=total)
        if name == "task_arithmetic":
            return self.one("task_arithmetic", self.addition)
        if name == "task_arithmetic, largest":
            return self.along("task_arithmetic")[-1]
        return self.one(name)

    def experts(self) -> list[Row]:
        return [one for one in self.row["models"] if one["kind"] == "expert"]

    def lowest(self, kind: str = "cart", scale: float = 1.0) -> Row:
        """Return the model of the smallest multi-task loss on a path over k."""
        return min(self.path(kind, scale), key=total)

    def scales(self, kind: str) -> list[float]:
        return sorted({one["scale"] for one in self.row["models"] if one["kind"] == kind})

    def closer(self) -> float:
        """Return the share of the tasks whose loss is lower at CART than at task arithmetic."""
        ours, theirs = (self.named(name)["losses"] for name in ("cart", "task_arithmetic"))
        return float(np.mean([ours[task] < theirs[task] for task in self.tasks]))


def total(one: Row) -> float:
    """Return the multi-task loss Σ_t L_t of a model."""
    return float(sum(one["losses"].values()))


def seeds(rows: Rows) -> list[Seed]:
    return [Seed(row) for row in rows]


def each(rows: Rows, measure: Callable[[Seed], float], digits: int = 2) -> str:
    """Return a measure's mean and interval over seeds, in words.

    Args:
        rows: as of `measure`, one for each seed.
        measure: of one seed.
        digits: after the point.
    """
    return with_interval([measure(seed) for seed in seeds(rows)], digits)
