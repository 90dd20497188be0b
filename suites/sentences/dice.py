"""Chance that is the same on every machine and version of Python."""

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """Draws that need `random()` alone, the one method whose sequence Python promises to keep.

    Args:
        path: what the draws are for; equal paths give equal draws.

    Example:
        >>> Dice(0, "answers").pick("abc") == Dice(0, "answers").pick("abc")
        True
    """

    def __init__(self, *path: str | int) -> None:
        self._random = Random("/".join(map(str, path))).random

    def below(self, count: int) -> int:
        """Return a whole number of 0 to count − 1."""
        return int(self._random() * count)

    def chance(self, probability: float) -> bool:
        """Return true with the given probability."""
        return self._random() < probability

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of the choices."""
        return choices[self.below(len(choices))]

    def some(self, choices: Sequence[T], count: int) -> list[T]:
        """Return `count` different ones of the choices, in random order."""
        left = list(choices)
        return [left.pop(self.below(len(left))) for _ in range(count)]

    def other(self, count: int, than: int) -> int:
        """Return a whole number of 0 to count − 1 that is not `than`."""
        return (than + 1 + self.below(count - 1)) % count
