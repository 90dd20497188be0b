"""Tables whose rows are tokens, read in another order of rows: own rows, and for tokens that a model lacks others'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import ceil
from typing import TYPE_CHECKING

from mergeflow.checkpoints.header import FLOAT64, DType
from mergeflow.checkpoints.reader import Entry
from mergeflow.late import np, torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Rows = NDArray[np.int64]
"""Of each row of the result the row to take, -1 where none."""


@dataclass(frozen=True)
class Picked:
    """A table and which of its rows are taken."""

    entry: Entry
    rows: Rows


@dataclass(frozen=True)
class AlignedEntry:
    """A table in the rows of another vocabulary, formed when it is read.

    row i = own[own row of i], or where it has none (1/n) Σ over n donors of donor[its row for i], or 0 without a donor

    A row that is no token's and that no model has is the mean of the tokens' rows: as a row of a head it is never the
    most likely one, which a row of zeros is where all other scores are negative.

    Attributes:
        own: The table, and the row of each token there.
        donors: Tables of the models that give rows to those without an own one.
        width: Elements of a row.
        dtype: The table's type.
        spare: Which rows are no token's, [rows].
    """

    own: Picked
    donors: tuple[Picked, ...]
    width: int
    dtype: DType
    spare: NDArray[np.bool_]

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened table, [stop − start], in its type."""
        first, last = start // self.width, ceil(stop / self.width)
        out = torch.zeros(last - first, self.width, dtype=self.dtype.torch)
        rows = self.own.rows[first:last]
        self._fill(out, self.own.entry, rows)
        absent = rows < 0
        if absent.any():
            given = [np.where(absent, donor.rows[first:last], -1) for donor in self.donors]
            self._give(out, given)
            empty = absent & self.spare[first:last] & np.all([one < 0 for one in given], axis=0)
            if empty.any():
                out[empty] = self._mean.to(out.dtype)
        return out.reshape(-1)[start - first * self.width : stop - first * self.width]

    @cached_property
    def _mean(self) -> Tensor:
        """The mean of the tokens' rows, [width] in float64."""
        tokens = np.flatnonzero(~self.spare)
        total = torch.zeros(self.width, dtype=torch.float64)
        for part in np.array_split(tokens, ceil(len(tokens) / 4096)):
            start, stop = int(part[0]), int(part[-1]) + 1
            rows = self.read(start * self.width, stop * self.width).reshape(-1, self.width)
            total += rows[torch.from_numpy(part - start)].double().sum(0)
        return total / len(tokens)

    def _give(self, out: Tensor, given: list[Rows]) -> None:
        """Fill the rows that donors give: copied from a single one, the mean of several."""
        count = sum(((rows >= 0).astype(np.int64) for rows in given), np.zeros(len(out), np.int64))
        for donor, rows in zip(self.donors, given, strict=True):
            self._fill(out, donor.entry, np.where(count == 1, rows, -1))
        places = np.flatnonzero(count > 1)
        if len(places):
            wide = torch.float64 if self.dtype == FLOAT64 else torch.float32
            total = torch.zeros(len(places), self.width, dtype=wide)
            for donor, rows in zip(self.donors, given, strict=True):
                part = torch.zeros_like(total)
                self._fill(part, donor.entry, rows[places])
                total += part
            out[places] = (total / torch.from_numpy(count[places])[:, None]).to(self.dtype.torch)

    def _fill(self, out: Tensor, entry: Entry, rows: Rows) -> None:
        for begin, end in _runs(rows):
            row = int(rows[begin])
            piece = entry.read(row * self.width, (row + end - begin) * self.width)
            out[begin:end] = piece.reshape(-1, self.width).to(out.dtype)


def _runs(rows: Rows) -> Iterator[tuple[int, int]]:
    """Yield where runs of rows that follow each other begin and end; rows of -1 are left out."""
    if not len(rows):
        return
    breaks = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] < 0)) + 1
    edges = [0, *breaks.tolist(), len(rows)]
    yield from ((begin, end) for begin, end in pairwise(edges) if rows[begin] >= 0)
