"""The variants of study `adaptation`: what is learned on which images, and their values over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Self, get_args

from studies.lab.adapting import Direction, Granularity, Split
from studies.lab.inputs import mean_accuracy
from studies.old.rows import Row, picked

NAMES = {"task_vectors": "task arithmetic", "cart": "CART"}


@dataclass(frozen=True)
class Variant:
    """What is learned, and on which images."""

    on: Direction
    granularity: Granularity
    images: Split

    @classmethod
    def all(cls) -> list[Self]:
        """Return every variant."""
        return [cls(*each) for each in product(get_args(Direction), get_args(Granularity), get_args(Split))]

    @property
    def folder(self) -> str:
        """Its folder's name."""
        return f"{self.on}_{self.granularity}_{self.images}"

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Return its rows, one per seed."""
        return picked(rows, **vars(self))


def values(rows: Sequence[Row], variant: Variant) -> list[float]:
    """Return a variant's mean test accuracy in %, one value per seed."""
    return [mean_accuracy(row["test"]) for row in variant.of(rows)]


def static(starts: Sequence[Row], on: str) -> list[float]:
    """Return the mean test accuracy of a static merge in %, one value per seed."""
    return [mean_accuracy(row[on]["test"]) for row in starts]


def gains(rows: Sequence[Row], starts: Sequence[Row], variant: Variant) -> list[float]:
    """Return adapted − start in points, one value per seed.

    Args:
        rows: the adaptations, as of `measure`.
        starts: the static merges, as of `start`, one for each seed.
        variant: whose accuracy is compared with that of its start.
    """
    return [after - before for after, before in zip(values(rows, variant), static(starts, variant.on), strict=True)]
