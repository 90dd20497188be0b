"""Weights as LoRA, DoRA and retrained tokens change them, formed when read: differences, and whole weights."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from threading import Lock, local
from typing import TYPE_CHECKING
from weakref import ref

from mergeflow.checkpoints.reader import Entry
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LoraEntry:
    """The difference one adapted weight makes, factor · B A, or its transpose; of an embedding always that."""

    down: Entry
    up: Entry
    shape: tuple[int, int]
    rank: int
    factor: float
    transposed: bool
    embedding: bool = False
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


class _Recent:
    """The factors B that were read last, by any thread: experts of several stacks are read in turns.

    A stack's B has its experts innermost, so that all of it is read for any of them.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, Lock()
        self._held: OrderedDict[int, ref[ExpertsEntry]] = OrderedDict()

    def of(self, entry: ExpertsEntry) -> Tensor:
        """Return B of an entry, [experts, out, rank]."""
        with self._lock:
            if entry.kept:
                self._held.move_to_end(id(entry))
                return entry.kept[0]
        rows, size = entry.shape[0], entry.rank * entry.experts
        up = entry.up.read(0, rows * size).reshape(rows, entry.rank, entry.experts).permute(2, 0, 1).contiguous()
        with self._lock:
            entry.kept[:] = [up]
            self._held[id(entry)] = ref(entry)
            while len(self._held) > self._most:
                oldest = self._held.popitem(last=False)[1]()
                if oldest is not None:
                    oldest.kept.clear()
        return up


_RECENT = _Recent(16)  # two stacks of four adapters in two threads


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
    kept: list[Tensor] = field(default_factory=list)

    def turned(self) -> ExpertsEntry:
        """Return the entry of a stack that is stored as [experts, in, out]."""
        return replace(self, transposed=True, kept=[])

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] of one expert as they are stored, without the factor."""
        size = self.rank * self.shape[1]
        down = self.down.read(expert * size, (expert + 1) * size).reshape(self.rank, self.shape[1])
        return down, _RECENT.of(self)[expert]

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened difference, [stop − start], float32.

        Only the experts that have some of these elements are formed.
        """
        (rows, columns), each = self.shape, self.rank * self.shape[1]
        size = rows * columns
        first, last = start // size, -(-stop // size)
        down = self.down.read(first * each, last * each).reshape(-1, self.rank, columns)
        formed = _RECENT.of(self)[first:last].float() @ down.float() * self.factor
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


@dataclass(frozen=True)
class TokensEntry:
    """An embedding, or a head, of which an adapter retrained the rows of some tokens; the others are the base's.

    PEFT calls these rows a delta, but they stand in the place of the base's. The base's weight is bound when the
    adapter meets its base in a merge.
    """

    rows: Entry
    tokens: tuple[int, ...]
    width: int
    weight: Entry | None = None

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened weight, [stop − start], float32.

        Raises:
            MergeflowError: No base is bound.
        """
        if self.weight is None:
            raise MergeflowError(
                "an adapter of single tokens is a model only together with its base: give it as an expert."
            )
        piece = self.weight.read(start, stop).float()
        own = self.rows.read(0, len(self.tokens) * self.width).float()
        for row, token in enumerate(self.tokens):
            first, last = max(start, token * self.width), min(stop, (token + 1) * self.width)
            if first < last:
                offset = (row - token) * self.width
                piece[first - start : last - start] = own[first + offset : last + offset]
        return piece


def _piece(entry: LoraEntry | AddedEntry | DoraEntry, start: int, stop: int) -> Tensor:
    """Return a piece; a thread that reads from the first element on forms the weight once."""
    if start == 0 or not hasattr(entry.kept, "formed"):
        entry.kept.formed = entry.formed()
    piece: Tensor = entry.kept.formed[start:stop]
    if stop >= entry.kept.formed.numel():
        del entry.kept.formed
    return piece
