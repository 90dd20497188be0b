"""The change of a merge as factors: by algebra of adapters' factors, or by an SVD of the merged matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mergeflow.checkpoints.checks import all_finite, not_finite
from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.lora import EXPERT_STACKS, AddedEntry, DoraEntry, ExpertsEntry, LoraEntry, TokensEntry
from mergeflow.checkpoints.names import PartEntry
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.merging.adapters.factors import Factors, Loss, approximated, compressed, summed
from mergeflow.merging.adapters.slots import Slot
from mergeflow.merging.execution.engine import Engine, default_workers, single_threaded
from mergeflow.merging.execution.reader import Unit
from mergeflow.merging.files.fields import AdapterOptions
from mergeflow.merging.linalg.spectra import one_thread
from mergeflow.merging.method import Stack

# Adapters that cancel leave a sum of this share of them by rounding alone.
_NOTHING = 1e-12


@dataclass
class Reduction:
    """The factors of everything that changed and takes factors.

    Attributes:
        scale: The factor of its direction.
        options: What the recipe says of the adapter.
        dtype: The type of the factors; None for float32, or an adapter's own where its factors are kept as they are.
        factors: The factors found, by name in memory.
        losses: What they lose, by name in memory.
    """

    engine: Engine
    scale: float
    options: AdapterOptions
    dtype: torch.dtype | None = None
    factors: dict[str, Factors] = field(default_factory=dict)
    losses: dict[str, Loss] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def check_patterns(self, names: Mapping[str, str]) -> None:
        """Check that each pattern of ranks fits some matrix of the base; names as of `sum_adapters`.

        Raises:
            MergeflowError: Some fit none.
        """
        shapes = self.engine.stacks.model.shapes
        held = {name: stored for name, stored in names.items() if len(shapes.get(stored, ())) > 1}
        parts = sorted(part for pair in held.items() for part in self._parts(*pair))
        faults = [pattern for pattern, _ in self.options.ranks if not any(fnmatchcase(part, pattern) for part in parts)]
        if faults:
            listed, some = "', '".join(faults), "', '".join(parts[:: max(1, len(parts) // 4)][:4])
            raise MergeflowError(
                f"`ranks` (--rank-of): no matrix of the base fits '{listed}'. Matrices are such as '{some}'."
            )

    def sum_adapters(self, names: Mapping[str, str], slots: Mapping[str, Slot]) -> None:
        """Find the factors of Σ c_t · s_t B_t A_t, exactly or in the factors' own space; no matrix is formed.

        Args:
            names: Of the tensors in memory, each with that in the base's file.
            slots: Where the factors go, by name in memory.
        """
        with one_thread(), single_threaded(self.engine.workers or default_workers()) as pool:
            for done in [pool.submit(self._sum, *pair, slots[pair[0]].transposed) for pair in names.items()]:
                done.result()

    def _sum(self, name: str, stored: str, transposed: bool) -> None:
        states = self.engine.stacks.experts
        coefficients = zip(self.engine.model.experts, self.engine.coefficients(stored), strict=True)
        terms = []
        for expert, coefficient in coefficients:
            factors = stored_factors(states[expert], stored, transposed) if stored in states[expert] else []
            if not all(all_finite(side.reshape(-1)) for part in factors for side in (part.down, part.up)):
                raise not_finite(expert, name)
            terms += [(self.scale * coefficient, factors)] if factors else []
        for at, part in enumerate(self._parts(name, stored)):
            self._sum_part(part, [(c, factors[at]) for c, factors in terms if c])

    def _parts(self, name: str, stored: str) -> list[str]:
        """Return the names of the matrices that a tensor holds: its own, or one for each expert of a stack."""
        shape = self.engine.stacks.model.shapes[stored]
        stack = len(shape) == 3 and name.endswith(EXPERT_STACKS)
        return [f"{name}[{expert}]" for expert in range(shape[0])] if stack else [name]

    def _sum_part(self, name: str, terms: list[tuple[float, Factors]]) -> None:
        if not terms:
            return
        exact, rank = summed(terms), self.options.rank_of(name)
        norm = exact.norm()
        if norm <= _NOTHING * sum(abs(c) * term.norm() for c, term in terms):
            return
        if exact.rank > rank or self.options.error:
            self._keep(name, compressed(exact, min(rank, exact.rank), self.options.error), norm, exact)
        else:
            self._keep(name, exact, norm, exact, unchanged=exact is terms[0][1])

    def approximate(self, names: Mapping[str, str], slots: Mapping[str, Slot]) -> None:
        """Merge each tensor, and approximate its change by a truncated SVD; arguments as of `sum_adapters`."""
        shapes = self.engine.model.shapes
        loaded = {stored: name for name, stored in names.items()}

        def reduce(stored: str, change: Tensor) -> None:
            name = loaded[stored]
            matrices = change.reshape(shapes[stored])
            matrices = matrices.mT if slots[name].transposed else matrices
            parts = zip(self._parts(name, stored), matrices.reshape(-1, *matrices.shape[-2:]), strict=True)
            for part, matrix in parts:
                norm = float(matrix.double().norm())
                if norm:
                    rank = min(self.options.rank_of(part), *matrix.shape)
                    factors = approximated(matrix, rank, self.options.error)
                    self._keep(part, factors if self.options.error else factors.padded(rank), norm, matrix)

        WholeChanges(self.engine, self.scale).run(reduce, loaded)

    def _keep(self, name: str, factors: Factors, norm: float, exact: Factors | Tensor, unchanged: bool = False) -> None:
        """Store factors in their type, with what they lose of the exact change."""
        stored = factors if unchanged and self.dtype is None else factors.to(self.dtype or torch.float32)
        if not (all_finite(stored.up.reshape(-1)) and all_finite(stored.down.reshape(-1))):
            raise MergeflowError(f"the factors of '{name}' overflow {self.dtype}: choose a wider dtype.")
        if isinstance(exact, Tensor):
            lost = float((exact.double() - stored.product()).norm())
        else:
            lost = 0.0 if stored is exact else summed([(1.0, exact), (-1.0, stored)]).norm()
        with self._lock:
            self.factors[name], self.losses[name] = stored, Loss(name, stored.rank, norm, lost)


@dataclass
class WholeChanges:
    """Passes on a merge's change of each whole tensor, from worker threads."""

    engine: Engine
    scale: float
    _open: dict[str, Tensor] = field(default_factory=dict)
    _missing: dict[str, int] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def run(self, take: Callable[[str, Tensor], None], names: Iterable[str]) -> None:
        """Call `take` with each name and its flat change, scale · direction + anchor − θ0."""

        def sink(unit: Unit, stack: Stack | None, result: Any) -> None:
            piece = torch.zeros(len(result)) if stack is None else change_of(stack, result, self.scale)
            size = self.engine.stacks.infos[unit.name].numel
            with self._lock:
                whole = self._open.setdefault(unit.name, torch.empty(size, dtype=piece.dtype))
                self._missing.setdefault(unit.name, size)
            whole[unit.start : unit.stop] = piece
            with self._lock:
                self._missing[unit.name] -= piece.numel()
                finished = not self._missing[unit.name]
            if finished:
                take(unit.name, self._open.pop(unit.name))

        with one_thread():
            self.engine.run(sink, names)


def change_of(stack: Stack, result: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Return the change of one piece by the merge, flat: scale · direction + anchor − θ0.

    Args:
        stack: The piece of base and task vectors that was merged.
        result: Anchor and direction that the method gave, shaped as the stack's base.

    Returns:
        [n] on the CPU, in the type of arithmetic.
    """
    anchor, direction = result
    change = direction * scale
    if anchor is not stack.base:
        change = change + (anchor - stack.base)
    return change.reshape(-1).cpu()


def only_factors(base: LazyStateDict, states: Iterable[LazyStateDict], name: str) -> bool:
    """Whether all that is stored for a tensor is factors of its change, beside copies of the base's weight at most.

    PEFT stores such a copy with the factors of an embedding or a head.

    Args:
        states: The experts; one without the tensor does not change it.
    """
    entries = [state.entries[name] for state in states if name in state]
    copies = [entry.weight for entry in entries if isinstance(entry, AddedEntry)]
    count = base.infos[name].numel
    return all(isinstance(_whole(entry), LoraEntry | AddedEntry | ExpertsEntry) for entry in entries) and all(
        torch.equal(copy.read(start, stop).float(), base.read(name, start, stop).float())
        for copy in copies
        for start, stop in ((at, min(at + BLOCK, count)) for at in range(0, count, BLOCK))
    )


def retrained(states: Iterable[Any], name: str) -> bool:
    """Whether an adapter holds a tensor whole, as one of `modules_to_save`, and not as factors."""
    factored = DoraEntry | TokensEntry | AddedEntry
    held = [state for state in states if state.is_task_vector and name in state.absolute]
    return any(not isinstance(_whole(state.entries[name]), factored) for state in held)


def _whole(entry: Any) -> Any:
    return entry.whole if isinstance(entry, PartEntry) else entry


def stored_factors(state: Any, name: str, transposed: bool) -> list[Factors]:
    """Return an adapter's factors of one tensor in their stored type, of each expert where it is a stack.

    Args:
        transposed: Whether the tensor is to be the transpose of their product, unless it is a stack.
    """
    entry = state.entries[name]
    whole = _whole(entry)
    if isinstance(whole, ExpertsEntry):
        if entry is whole:
            pairs = map(whole.of_expert, range(whole.experts))
            return [Factors(down, up, whole.factor) for down, up in pairs]
        expert, start = divmod(entry.offset, whole.shape[0] * whole.shape[1])
        (down, up), first, rows = whole.of_expert(expert), start // whole.shape[1], state.infos[name].shape[0]
        return [Factors(down, up[first : first + rows], whole.factor)]
    entry = entry.lora if isinstance(entry, AddedEntry) else entry
    assert isinstance(entry, LoraEntry), name
    down, up = entry.factors()
    return [Factors(*((up.T, down.T) if entry.transposed != transposed else (down, up)), entry.factor)]
