"""Weights as LoRA and DoRA change them, formed when they are read: differences, and whole weights of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from threading import local
from typing import TYPE_CHECKING

from mergeflow.checkpoints.reader import Entry
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoraEntry:
    """The difference one adapted weight makes, factor · B A, or its transpose."""

    down: Entry
    up: Entry
    shape: tuple[int, int]
    rank: int
    factor: float
    transposed: bool
    kept: local = field(default_factory=local)

    def delta(self) -> Tensor:
        """Return the difference as a matrix [out, in], float32, not transposed."""
        down, up = self.factors()
        return (up.float() @ down.float()) * self.factor

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [r, in] and B [out, r] as they are stored, without the factor."""
        rows, columns = self.shape
        down = self.down.read(0, self.rank * columns).reshape(self.rank, columns)
        return down, self.up.read(0, rows * self.rank).reshape(rows, self.rank)

    def formed(self) -> Tensor:
        """Return the flattened difference [numel] as the weight is stored, float32."""
        delta = self.delta()
        return (delta.T if self.transposed else delta).reshape(-1)

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened difference, [stop − start], float32."""
        return _piece(self, start, stop)


# The factors that a thread read last: pieces of one stack are read one after the other.
_READ = local()


@dataclass(frozen=True)
class ExpertsEntry:
    """The difference one adapter makes to the stacked experts of a mixture, factor · B_e A_e of each expert e.

    PEFT stores A as [experts · rank, in], and B as [out, rank · experts] with the experts innermost.
    """

    down: Entry
    up: Entry
    experts: int
    shape: tuple[int, int]
    rank: int
    factor: float
    transposed: bool = False

    def turned(self) -> ExpertsEntry:
        """Return the entry of a stack that is stored as [experts, in, out]."""
        return replace(self, transposed=True)

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [experts, rank, in] and B [experts, out, rank] as they are stored, without the factor."""
        if getattr(_READ, "entry", None) is not self:
            (rows, columns), size = self.shape, self.experts * self.rank
            down = self.down.read(0, size * columns).reshape(self.experts, self.rank, columns)
            up = self.up.read(0, rows * size).reshape(rows, self.rank, self.experts).permute(2, 0, 1)
            _READ.entry, _READ.factors = self, (down, up)
        found: tuple[Tensor, Tensor] = _READ.factors
        return found

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened difference, [stop − start], float32.

        Only the experts that have some of these elements are formed.
        """
        down, up = self.factors()
        size = self.shape[0] * self.shape[1]
        first, last = start // size, -(-stop // size)
        formed = up[first:last].float() @ down[first:last].float() * self.factor
        flat = (formed.mT if self.transposed else formed).reshape(-1)
        return flat[start - first * size : stop - first * size]


@dataclass(frozen=True)
class AddedEntry:
    """A weight that the adapter stores whole, with its LoRA difference added."""

    weight: Entry
    lora: LoraEntry
    kept: local = field(default_factory=local)

    def formed(self) -> Tensor:
        """Return the flattened adapted weight [numel], float32."""
        delta = self.lora.formed()
        return self.weight.read(0, delta.numel()).float() + delta

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened adapted weight, [stop − start], float32."""
        return _piece(self, start, stop)


@dataclass(frozen=True)
class DoraEntry:
    """A weight that DoRA adapts: magnitude · (W + Δ) / ‖W + Δ‖ for each of its outputs; W is the base's.

    The base's weight is bound when the adapter meets its base in a merge.
    """

    magnitude: Entry
    lora: LoraEntry
    weight: Entry | None = None
    kept: local = field(default_factory=local)

    def formed(self) -> Tensor:
        """Return the flattened adapted weight [numel], float32.

        Raises:
            MergeflowError: No base is bound.
        """
        if self.weight is None:
            raise MergeflowError("a DoRA adapter is a model only together with its base: give it as an expert.")
        rows, columns = self.lora.shape
        stored = self.weight.read(0, rows * columns).float()
        weight = stored.reshape(columns, rows).T if self.lora.transposed else stored.reshape(rows, columns)
        moved = weight + self.lora.delta()
        moved *= (self.magnitude.read(0, rows).float() / moved.norm(dim=1))[:, None]
        return (moved.T if self.lora.transposed else moved).reshape(-1)

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened adapted weight, [stop − start], float32."""
        return _piece(self, start, stop)


def _piece(entry: LoraEntry | AddedEntry | DoraEntry, start: int, stop: int) -> Tensor:
    """Return a piece; a thread that reads from the first element on forms the weight once."""
    if start == 0 or not hasattr(entry.kept, "formed"):
        entry.kept.formed = entry.formed()
    piece: Tensor = entry.kept.formed[start:stop]
    if stop >= entry.kept.formed.numel():
        del entry.kept.formed
    return piece
