"""Reading what a merge works on: what is known of the models, and pieces of base and task vectors, checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import local
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.checks import all_finite, check_computed, check_copied, infos_of, not_finite
from mergeflow.checkpoints.fingerprint import BLOCK, raw_bytes
from mergeflow.checkpoints.header import FLOAT32, FLOAT64, DType, TensorInfo
from mergeflow.checkpoints.lora import LoraEntry
from mergeflow.checkpoints.reader import FileEntry, LazyStateDict, tied_names
from mergeflow.errors import MergeflowError
from mergeflow.late import torch
from mergeflow.merging.architectures.architecture import architecture_of
from mergeflow.merging.architectures.blocks import depth
from mergeflow.merging.linalg.spectra import FactorCache
from mergeflow.merging.method import Model, Stack
from mergeflow.merging.values import at

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]


def model_of(
    base: State,
    experts: Mapping[str, State],
    weights: Mapping[str, float] | None = None,
    data: Mapping[str, Any] | None = None,
    cache: FactorCache | None = None,
    config: Mapping[str, Any] | None = None,
    base_only: Collection[str] = (),
    varied: Mapping[str, Any] | None = None,
    extra_tensors: int = 0,
) -> Model:
    """Describe the whole model to methods, from shapes and types alone.

    Args:
        experts: In the order of the recipe.
        config: The base's config.json, for a base in memory.
        base_only: Names of tensors that stay the base's.
        weights, data, varied, extra_tensors: As of `Model`, weights by expert.
    """
    infos, given = infos_of(base), weights or {}
    dtypes = [info.dtype for state in (base, *experts.values()) for info in infos_of(state).values()]
    return Model(
        experts=tuple(sorted(experts)),
        listed=tuple(experts),
        weights=tuple(float(given.get(name, 1.0)) for name in sorted(experts)),
        shapes={
            name: info.shape
            for name, info in sorted(infos.items())
            if info.dtype.is_floating_point and name not in base_only
        },
        dtype=FLOAT64 if FLOAT64 in dtypes else FLOAT32,
        data=data or {},
        tied=common_ties(base, experts),
        cache=cache,
        varied=varied or {},
        architecture=architecture_of(base, config),
        extra_tensors=extra_tensors,
    )


def common_ties(base: State, experts: Mapping[str, State]) -> dict[str, str]:
    """Return the names that share storage in the base and stay equal in every expert, with the first of their group."""
    return {
        name: first
        for name, first in tied_names(base).items()
        if all(_tied_in(state, name, first) for state in experts.values())
    }


def _tied_in(state: State, name: str, first: str) -> bool:
    """Whether two names tied in the base are so in an expert; of task vectors only their values can tell."""
    if tied_names(state).get(name) == first:
        return True
    if not getattr(state, "is_task_vector", False) or (name in state) != (first in state):
        return False
    return name not in state or torch.equal(state[name], state[first])


PIECE = 8 * 2**20  # bytes of base and experts, in the type of arithmetic, that a worker treats at a time
OnPiece = Callable[[str, str, int, memoryview, int], None]
"""Takes a piece that was read: owner, tensor, first element, its bytes as they are stored, bytes of an element."""


@dataclass(frozen=True)
class Unit:
    """A piece of work: a whole tensor, or one block of a tensor whose elements are treated alone."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


@dataclass
class Stacks:
    """Base and experts, to be read piece by piece from any thread.

    Attributes:
        on_piece: Sees every piece that is read for a result (not those read for first passes).
        on_read: Told the number of bytes after each read, first passes included.
        same: The expert that is the base itself: its task vector is 0 and it is not read again.
        piece: Elements of a tensor that are read at a time.
    """

    base: State
    experts: Mapping[str, State]
    model: Model
    device: str = "cpu"
    on_piece: OnPiece | None = None
    on_read: Callable[[int], None] | None = None
    same: str | None = None
    infos: dict[str, TensorInfo] = field(init=False)
    piece: int = field(init=False)
    _scratch: local = field(default_factory=local)
    _depths: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.infos = infos_of(self.base)
        self.piece = piece_of(self.model)

    def stack(self, unit: Unit, on_piece: OnPiece | None = None) -> Stack:
        """Read one unit of base and experts and form the task vectors; buffers are reused by each worker."""
        count, copied = unit.stop - unit.start, False
        alone = count > BLOCK and (len(unit.shape) > 1 or count > self.piece)
        try:
            base, taus = (self._tensor if alone else self._block)(unit, on_piece)
        except MergeflowError:
            if not self._share_infinities(unit):
                raise
            copied = True
            base, taus = self._empty(count).zero_(), self._empty(len(self.experts), count).zero_()
        check_computed(unit.name, base, self.model.experts, taus)
        return Stack(
            self.model.tied.get(unit.name, unit.name),
            base.reshape(unit.shape).to(self.device),
            taus.reshape(len(taus), *unit.shape).to(self.device),
            unit.start,
            self.model_at(unit.name),
            partial(self.factors, unit.name),
            copied,
        )

    def _share_infinities(self, unit: Unit) -> bool:
        """Whether base and experts hold the same infinities in a unit and differ nowhere in it, as bounds do."""
        base = read(self.base, unit.name, unit.start, unit.stop).to(self.model.dtype.torch)
        states = {name: state for name, state in self.experts.items() if not self._is_zero(name, unit.name)}
        return not bool(base.isnan().any()) and all(
            not self._is_difference(name, unit.name)
            and torch.equal(read(state, unit.name, unit.start, unit.stop).to(base.dtype), base)
            for name, state in states.items()
        )

    def _tensor(self, unit: Unit, on_piece: OnPiece | None) -> tuple[Tensor, Tensor]:
        """Return a unit of many blocks, checked one by one: the base [n] and the task vectors [T, n]."""
        count = unit.stop - unit.start
        base, taus = self._empty(count), self._empty(len(self.experts), count)  # apart: a method lets go of the second
        self._load("base", self.base, unit, base, on_piece)
        for row, name in zip(taus, self.model.experts, strict=True):
            self._task_vector(name, unit, base, row, on_piece)
        return base, taus

    def _block(self, unit: Unit, on_piece: OnPiece | None) -> tuple[Tensor, Tensor]:
        """Return a piece of the base [n], and the task vectors [T, n], in the worker's own buffer.

        Workers wait for each other at every call of torch, however small: there are few for each unit, not for each
        expert.
        """
        rows = self._rows(self.model.dtype, unit.stop - unit.start)
        self._fill(rows, unit, on_piece)
        weights = [
            index
            for index, name in enumerate(self.model.experts, 1)
            if name != self.same and not self._is_difference(name, unit.name)
        ]
        if len(weights) == len(self.experts):
            rows[1:].sub_(rows[0])
        else:
            for index in weights:
                rows[index].sub_(rows[0])
        if not all_finite(rows):
            self._refuse(unit)
        return rows[0], rows[1:]

    def _fill(self, rows: Tensor, unit: Unit, on_piece: OnPiece | None) -> None:
        """Read a unit of base and experts, as they are stored, into rows [1 + T, n]; 0 where nothing is stored."""
        owners = ("base", *self.model.experts)
        states = [self.base, *(self.experts[name] for name in self.model.experts)]
        entries = [_file_entry(state, unit.name) for state in states]
        into = rows
        if len(types := {entry.info.dtype if entry else None for entry in entries}) == 1 and (stored := types.pop()):
            # Files of one type are read into rows of it, and turned into the type of arithmetic all at once.
            into = self._rows(stored, unit.stop - unit.start)
        data = raw_bytes(into.reshape(-1))
        size = len(data) // len(rows)
        for index, (owner, state, entry) in enumerate(zip(owners, states, entries, strict=True)):
            if index and self._is_zero(owner, unit.name):
                into[index].zero_()
            elif entry is not None and entry.info.dtype.torch == into.dtype:
                piece = data[index * size : (index + 1) * size]
                entry.read_bytes(piece, unit.start)
                self._report(owner, unit, piece, into.itemsize, on_piece)
            else:
                self._read(owner, state, unit, rows[index], on_piece)
        if into is not rows:
            rows.copy_(into)

    def factors(self, name: str) -> list[tuple[Tensor, Tensor] | None] | None:
        """Return A and B, scaled, of each adapter's change [out, in]; None where some expert has no factors."""
        factors: list[tuple[Tensor, Tensor] | None] = []
        for expert in self.model.experts:
            state = self.experts[expert]
            if getattr(state, "is_task_vector", False) and name not in state:
                factors.append(None)
                continue
            entry = state.entries[name] if isinstance(state, LazyStateDict) else None
            if not isinstance(entry, LoraEntry):
                return None
            down, up = entry.factors()
            pair = (down.double(), up.double() * entry.factor)
            # Conv1D is stored as [in, out] and told so by its architecture; an embedding by its adapter alone.
            turned = entry.transposed != self.model.architecture.form(name, self.infos[name].shape, False).transposed
            pair = (pair[1].T, pair[0].T) if turned else pair
            factors.append((pair[0].to(self.device), pair[1].to(self.device)))
        return factors

    def read_ahead(self, unit: Unit) -> None:
        """Announce that a unit of base and experts will be read soon."""
        for state in (self.base, *self.experts.values()):
            if isinstance(state, LazyStateDict):
                state.read_ahead(unit.name, unit.start, unit.stop)

    def depth(self, name: str) -> float:
        """Return where a tensor's block stands, from 0 (and before the blocks) to 1 (and behind them)."""
        stored = self.model.tied.get(name, name)
        if stored not in self._depths:
            self._depths[stored] = depth(stored, self.model.shapes)
        return self._depths[stored]

    def model_at(self, name: str) -> Model:
        """Return the model's description with the weights that experts have in one tensor."""
        varied, model = self.model.varied, self.model
        if not varied:
            return model
        stored = model.tied.get(name, name)
        of_tensor = [
            at(varied[expert], stored, self.depth(name)) if expert in varied else None for expert in model.experts
        ]
        pairs = zip(of_tensor, model.weights, strict=True)
        return replace(model, weights=tuple(constant if weight is None else weight for weight, constant in pairs))

    def one_by_one(self, name: str, experts: Sequence[str] | None = None) -> tuple[Tensor, Iterator[Tensor]]:
        """Return a tensor [...] of the base, and its task vectors one expert after the other (or of some experts).

        The task vectors come in one buffer: each is gone when the next is asked for.
        """
        info = self.infos[name]
        unit = Unit(name, 0, info.numel, info.shape)
        base, row = self._empty(info.numel), self._empty(info.numel)
        self._load("base", self.base, unit, base, None)

        def taus() -> Iterator[Tensor]:
            for expert in self.model.experts if experts is None else experts:
                self._task_vector(expert, unit, base, row, None)
                yield row.reshape(info.shape).to(self.device)

        return base.reshape(info.shape).to(self.device), taus()

    def copied(self, unit: Unit) -> Tensor:
        """Return a unit [n] of a tensor that is not merged: the base's; the experts' are only shown to `on_piece`."""
        piece, info = read(self.base, unit.name, unit.start, unit.stop), self.infos[unit.name]
        if self.on_piece is not None:
            self.on_piece("base", unit.name, unit.start, raw_bytes(piece), piece.itemsize)
        for name, state in self.experts.items():
            if unit.name not in state or name == self.same:
                continue
            values = read(state, unit.name, unit.start, unit.stop)
            check_copied(unit.name, info, name, piece, values)
            if self.on_piece is not None:
                self.on_piece(name, unit.name, unit.start, raw_bytes(values), values.itemsize)
        return piece

    def _task_vector(self, name: str, unit: Unit, base: Tensor, out: Tensor, on_piece: OnPiece | None) -> None:
        if self._is_zero(name, unit.name):
            out.zero_()
            return
        self._load(name, self.experts[name], unit, out, on_piece)
        if not self._is_difference(name, unit.name):
            out.sub_(base)

    def _is_difference(self, expert: str, name: str) -> bool:
        """Whether what an expert stores of a tensor is its task vector already."""
        state = self.experts[expert]
        return getattr(state, "is_task_vector", False) and name not in getattr(state, "absolute", ())

    def _is_zero(self, expert: str, name: str) -> bool:
        """Whether an expert's task vector is 0 in a tensor, and nothing has to be read."""
        return expert == self.same or (self._is_difference(expert, name) and name not in self.experts[expert])

    def _load(self, owner: str, state: State, unit: Unit, out: Tensor, on_piece: OnPiece | None) -> None:
        """Fill `out` with a unit of a state, checked; `on_piece` sees it in its storage type, block by block."""
        # A whole tensor in its storage type would be held beside its copy, and be out of the cache when it is digested.
        step = self.piece if _file_entry(state, unit.name) else max(len(out), 1)
        for begin in range(0, max(len(out), 1), step):
            start, stop = unit.start + begin, min(unit.start + begin + step, unit.stop)
            piece = out[begin : begin + step]
            self._read(owner, state, Unit(unit.name, start, stop, ()), piece, on_piece)
            if not all_finite(piece):
                raise not_finite(self.same or owner if owner == "base" else owner, unit.name)

    def _read(self, owner: str, state: State, unit: Unit, out: Tensor, on_piece: OnPiece | None) -> None:
        entry = _file_entry(state, unit.name)
        if entry is not None:
            stored = out
            if entry.info.dtype.torch != out.dtype:
                stored = self._rows(entry.info.dtype, unit.stop - unit.start)[0]
            entry.read_into(stored, unit.start)
        else:
            stored = read(state, unit.name, unit.start, unit.stop)
        if on_piece is not None:
            self._report(owner, unit, raw_bytes(stored), stored.itemsize, on_piece)
        elif self.on_read is not None:
            self.on_read(stored.nbytes)
        if stored is not out:
            out.copy_(stored)

    def _report(self, owner: str, unit: Unit, data: memoryview, itemsize: int, on_piece: OnPiece | None) -> None:
        if on_piece is not None:
            on_piece(owner, unit.name, unit.start, data, itemsize)
        if self.on_read is not None:
            self.on_read(len(data))

    def _refuse(self, unit: Unit) -> None:
        """Name who holds NaN or infinity; none does where finite values lie too far apart for a difference."""
        for owner, state in {self.same or "base": self.base, **self.experts}.items():
            if unit.name in state and not all_finite(read(state, unit.name, unit.start, unit.stop)):
                raise not_finite(owner, unit.name)

    def _rows(self, dtype: DType, count: int) -> Tensor:
        """Return the worker's own memory for a piece of base and experts, [1 + T, n]."""
        rows, spaces = len(self.experts) + 1, self._scratch.__dict__
        if dtype.name not in spaces:
            pinned = self.device != "cpu" and dtype == self.model.dtype  # a device reads it without a copy in between
            spaces[dtype.name] = torch.empty(rows * self.piece, dtype=dtype.torch, pin_memory=pinned)
        space: Tensor = spaces[dtype.name]
        return space[: rows * count].reshape(rows, count)

    def _empty(self, *shape: int) -> Tensor:
        # A device reads pinned memory without a copy in between.
        return torch.empty(shape, dtype=self.model.dtype.torch, pin_memory=self.device != "cpu")


def piece_of(model: Model) -> int:
    """Return how many elements of a tensor are read and merged at a time: whole leaves of the fingerprints.

    So many that Python's share is small, so few that base and experts stay in the processor's cache.
    """
    return BLOCK * max(1, PIECE // (BLOCK * model.dtype.itemsize * (len(model.experts) + 1)))


def _file_entry(state: State, name: str) -> FileEntry | None:
    entry = state.entries.get(name) if isinstance(state, LazyStateDict) else None
    return entry if isinstance(entry, FileEntry) else None


def read(state: State, name: str, start: int, stop: int) -> Tensor:
    """Return a piece [stop − start] of a flattened tensor in its storage type, maybe in the state dict's memory."""
    if isinstance(state, LazyStateDict):
        return state.read(name, start, stop)
    return state[name].detach().reshape(-1)[start:stop]
