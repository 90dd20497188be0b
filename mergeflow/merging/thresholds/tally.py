"""Counts of values that come in pieces, small where values repeat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from mergeflow.late import np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PENDING = 1 << 18  # values that wait to be counted
_DISTINCT = 1 << 22  # distinct values beyond which a tally gives up


class Tally:
    """How often each value occurs.

    Attributes:
        total: Number of values.
        full: Whether there were too many distinct ones: nothing but their number is known then.
    """

    def __init__(self) -> None:
        self.total, self.full = 0, False
        self._values: NDArray[Any] | None = None
        self._counts: NDArray[Any] = np.zeros(0, dtype=np.int64)
        self._pending: list[NDArray[Any]] = []
        self._waiting = 0

    def add(self, values: NDArray[Any]) -> None:
        """Count some values [n]."""
        self.total += len(values)
        if self.full or not len(values):
            return
        self._pending.append(values)
        self._waiting += len(values)
        if self._waiting > _PENDING:
            self._count()

    def merge(self, other: Tally) -> Tally:
        """Count what another tally has counted, too."""
        other._count()
        self._count()
        if other._values is not None:
            self._join(other._values, other._counts)
        self.total, self.full = self.total + other.total, self.full or other.full
        return self

    def items(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the distinct values [n] in rising order, and how often each occurs, int [n]."""
        assert not self.full
        self._count()
        return (np.zeros(0) if self._values is None else self._values), self._counts

    def kth_largest(self, k: int) -> float:
        """Return the k-th largest value, 1 ≤ k ≤ total.

        Example:
            >>> tally = Tally()
            >>> tally.add(np.array([3.0, 1.0, 3.0, 2.0]))
            >>> [tally.kth_largest(k) for k in (1, 2, 3, 4)]
            [3.0, 3.0, 2.0, 1.0]
        """
        values, counts = self.items()
        from_top = counts[::-1].cumsum()
        return float(values[::-1][np.searchsorted(from_top, k)])

    def _count(self) -> None:
        if self._pending:
            pending, self._pending, self._waiting = np.concatenate(self._pending), [], 0
            self._join(*np.unique(pending, return_counts=True))

    def _join(self, values: NDArray[Any], counts: NDArray[Any]) -> None:
        if self._values is None:
            self._values, self._counts = values, counts
        else:
            both, where = np.unique(np.concatenate([self._values, values]), return_inverse=True)
            joined = np.zeros(len(both), dtype=np.int64)
            np.add.at(joined, where, np.concatenate([self._counts, counts]))
            self._values, self._counts = both, joined
        if len(self._values) > _DISTINCT:
            self.full, self._values, self._counts = True, None, self._counts[:0]


def merged(pairs: Iterable[tuple[Tally, Tally]]) -> list[Tally]:
    """Merge tallies pair by pair."""
    return [one.merge(other) for one, other in pairs]
