"""Reading what a merge works on: pieces of the base's tensors with the task vectors of all experts, checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from threading import local
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.adapted import LoraEntry
from mergeflow.checkpoints.checks import all_finite, infos_of, not_finite
from mergeflow.checkpoints.dtype import FLOAT32, FLOAT64
from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import FileEntry, LazyStateDict, tied_names
from mergeflow.errors import MergeflowError
from mergeflow.late import torch
from mergeflow.merging.architectures.architecture import architecture_of
from mergeflow.merging.architectures.depth import depth
from mergeflow.merging.linalg.cache import FactorCache
from mergeflow.merging.stack import Model, Stack
from mergeflow.merging.values import at

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]
OnPiece = Callable[[str, str, int, "Tensor"], None]
"""Takes a piece that was read: owner, tensor, first element, flat values as stored."""


@dataclass(frozen=True)
class Unit:
    """A piece of work: a whole tensor, or one block of a tensor whose elements are treated alone."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]


def model_of(
    base: State,
    experts: Mapping[str, State],
    weights: Mapping[str, float] | None = None,
    data: Mapping[str, Any] | None = None,
    cache: FactorCache | None = None,
    config: Mapping[str, Any] | None = None,
    kept: Collection[str] = (),
    varied: Mapping[str, Any] | None = None,
    beside: int = 0,
) -> Model:
    """Return what methods may know about the whole model, from shapes and types alone.

    Args:
        base: The base's state dict, in memory or lazy.
        experts: The experts' state dicts by name, in the order of the recipe.
        weights: Weights by expert; missing ones are 1.
        data: Statistics of data that some methods need, by kind, then expert.
        cache: Kept factorisations.
        config: The base's config.json, for a base in memory.
        kept: Names of tensors that stay the base's.
        varied: Weights that vary over the model, by expert.
        beside: As of `Model`.
    """
    infos, given = infos_of(base), weights or {}
    found = [info.dtype for state in (base, *experts.values()) for info in infos_of(state).values()]
    return Model(
        experts=tuple(sorted(experts)),
        listed=tuple(experts),
        weights=tuple(float(given.get(name, 1.0)) for name in sorted(experts)),
        shapes={
            name: info.shape
            for name, info in sorted(infos.items())
            if info.dtype.is_floating_point and name not in kept
        },
        dtype=FLOAT64 if FLOAT64 in found else FLOAT32,
        data=data or {},
        tied=common_ties(base, experts),
        cache=cache,
        varied=varied or {},
        architecture=architecture_of(base, config),
        beside=beside,
    )


@dataclass
class Stacks:
    """Base and experts, to be read piece by piece from any thread.

    Attributes:
        base: The base's state dict, in memory or lazy.
        experts: The experts' state dicts by name.
        model: What is known of them.
        device: Where arithmetic happens.
        on_piece: Sees every piece that is read for a result (not those read for first passes).
        on_read: Told the number of bytes after each read, first passes included.
        same: The expert that is the base itself: its task vector is 0 and it is not read again.
        infos: Shape and type of the base's tensors.
    """

    base: State
    experts: Mapping[str, State]
    model: Model
    device: str = "cpu"
    on_piece: OnPiece | None = None
    on_read: Callable[[int], None] | None = None
    same: str | None = None
    infos: dict[str, TensorInfo] = field(init=False)
    _scratch: local = field(default_factory=local)
    _depths: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.infos = infos_of(self.base)

    def stack(self, unit: Unit, on_piece: OnPiece | None = None) -> Stack:
        """Read one unit of base and experts and form the task vectors; buffers are reused by each worker."""
        base, taus = self._buffers(unit.stop - unit.start)
        self._load("base", self.base, unit, base, on_piece)
        for row, name in zip(taus, self.model.experts, strict=True):
            self._task_vector(name, unit, base, row, on_piece)
        return Stack(
            self.model.tied.get(unit.name, unit.name),
            base.reshape(unit.shape).to(self.device),
            taus.reshape(len(taus), *unit.shape).to(self.device),
            unit.start,
            self.model_at(unit.name),
            partial(self.factors, unit.name),
        )

    def factors(self, name: str) -> list[tuple[Tensor, Tensor] | None] | None:
        """Return A and B, scaled, of each adapter's change [out, in]; None where some expert has no factors."""
        found: list[tuple[Tensor, Tensor] | None] = []
        for expert in self.model.experts:
            state = self.experts[expert]
            if getattr(state, "is_task_vector", False) and name not in state:
                found.append(None)
                continue
            entry = state.entries[name] if isinstance(state, LazyStateDict) else None
            if not isinstance(entry, LoraEntry):
                return None
            down, up = entry.factors()
            pair = (down.double(), up.double() * entry.factor)
            # Conv1D is stored as [in, out] and told so by its architecture; an embedding by its adapter alone.
            turned = entry.transposed != self.model.architecture.form(name, self.infos[name].shape, False).transposed
            pair = (pair[1].T, pair[0].T) if turned else pair
            found.append((pair[0].to(self.device), pair[1].to(self.device)))
        return found

    def read_ahead(self, unit: Unit) -> None:
        """Announce that a unit of base and experts will be read soon."""
        for state in (self.base, *self.experts.values()):
            if isinstance(state, LazyStateDict):
                state.read_ahead(unit.name, unit.start, unit.stop)

    def depth(self, name: str) -> float:
        """Return where a tensor's block stands, from 0 (and before the blocks) to 1 (and behind them)."""
        own = self.model.tied.get(name, name)
        if own not in self._depths:
            self._depths[own] = depth(own, self.model.shapes)
        return self._depths[own]

    def model_at(self, name: str) -> Model:
        """Return what is known of the model, with the weights that experts have in one tensor."""
        varied, model = self.model.varied, self.model
        if not varied:
            return model
        own = model.tied.get(name, name)
        here = [at(varied[expert], own, self.depth(name)) if expert in varied else None for expert in model.experts]
        pairs = zip(here, model.weights, strict=True)
        return replace(model, weights=tuple(constant if one is None else one for one, constant in pairs))

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
        """Return a unit [n] of a tensor that is not merged: the base's; the experts' are only shown to `on_piece`.

        Raises:
            MergeflowError: A table of integers of an expert is not the base's: codes of weights, not counters.
        """
        piece = read(self.base, unit.name, unit.start, unit.stop)
        codes = not piece.is_floating_point() and len(self.infos[unit.name].shape) > 1
        if self.on_piece is not None:
            self.on_piece("base", unit.name, unit.start, piece)
        for name, state in self.experts.items():
            if unit.name not in state or name == self.same:
                continue
            own = read(state, unit.name, unit.start, unit.stop)
            if codes and not torch.equal(own, piece):
                raise MergeflowError(
                    f"tensor '{unit.name}' {list(self.infos[unit.name].shape)} holds integers that differ between the "
                    f"base and '{name}': codes of quantised weights cannot be merged, and keeping the base's would "
                    "lose the expert. Merge the weights they were made from."
                )
            if self.on_piece is not None:
                self.on_piece(name, unit.name, unit.start, own)
        return piece

    def _task_vector(self, name: str, unit: Unit, base: Tensor, out: Tensor, on_piece: OnPiece | None) -> None:
        """Fill `out` with a unit of one expert's task vector."""
        state = self.experts[name]
        difference = getattr(state, "is_task_vector", False) and unit.name not in getattr(state, "absolute", ())
        if name == self.same or (difference and unit.name not in state):
            out.zero_()
            return
        self._load(name, state, unit, out, on_piece)
        if not difference:
            out.sub_(base)

    def _load(self, owner: str, state: State, unit: Unit, out: Tensor, on_piece: OnPiece | None) -> None:
        """Fill `out` with a unit of a state, checked; `on_piece` sees it in its storage type, block by block."""
        # A whole tensor in its storage type would be held beside its copy, and be out of the cache when it is digested.
        apart = isinstance(state, LazyStateDict) and isinstance(state.entries[unit.name], FileEntry)
        step = BLOCK if apart else max(len(out), 1)
        for begin in range(0, max(len(out), 1), step):
            start, stop = unit.start + begin, min(unit.start + begin + step, unit.stop)
            self._load_piece(owner, state, Unit(unit.name, start, stop, ()), out[begin : begin + step], on_piece)

    def _load_piece(self, owner: str, state: State, unit: Unit, out: Tensor, on_piece: OnPiece | None) -> None:
        if isinstance(state, LazyStateDict) and state.infos[unit.name].dtype.torch == out.dtype:
            state.read_into(unit.name, out, unit.start)
            stored = out
        else:
            stored = read(state, unit.name, unit.start, unit.stop)
            out.copy_(stored)
        # The sum is finite for finite values of any sane size, and far cheaper than looking at each.
        if not bool(out.sum().isfinite()) and not all_finite(out):
            raise not_finite(owner, unit.name)
        if on_piece is not None:
            on_piece(owner, unit.name, unit.start, stored)
        if self.on_read is not None:
            self.on_read(stored.nbytes)

    def _buffers(self, count: int) -> tuple[Tensor, Tensor]:
        experts = len(self.experts)
        if count > BLOCK:
            return self._empty(count), self._empty(experts, count)
        if not hasattr(self._scratch, "space"):
            self._scratch.space = self._empty((experts + 1) * BLOCK)
        space: Tensor = self._scratch.space[: (experts + 1) * count]
        return space[:count], space[count:].reshape(experts, count)

    def _empty(self, *shape: int) -> Tensor:
        # A device reads pinned memory without a copy in between.
        return torch.empty(shape, dtype=self.model.dtype.torch, pin_memory=self.device != "cpu")


def read(state: State, name: str, start: int, stop: int) -> Tensor:
    """Return a piece of a flattened tensor in its storage type.

    Args:
        state: In memory or lazy.
        name: The tensor.
        start: The first element, from 0.
        stop: One behind the last element.

    Returns:
        [stop − start]; it may share memory with the state dict.
    """
    if isinstance(state, LazyStateDict):
        return state.read(name, start, stop)
    return state[name].detach().reshape(-1)[start:stop]


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
