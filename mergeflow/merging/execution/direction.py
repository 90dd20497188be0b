"""A prepared merge: anchor and direction in memory, so that one preparation serves every scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from mergeflow.checkpoints.align_names import bound
from mergeflow.checkpoints.checks import all_finite, check_compatible, infos_of
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.late import torch
from mergeflow.merging.catalog import MethodCall, check_inputs, configure, weights_by_name
from mergeflow.merging.execution.device import has_room
from mergeflow.merging.execution.engine import Engine
from mergeflow.merging.execution.reader import Stacks, Unit, model_of
from mergeflow.merging.linalg.spectra import FactorCache
from mergeflow.merging.matrices import survey
from mergeflow.merging.method import RUNNING, Model, Stack
from mergeflow.merging.values import check_depth

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Direction:
    """A merge before its scale is chosen: the result is anchor + scale · direction.

    Attributes:
        anchor: Tensors of the anchor: the base's own (unchanged, in their type) where it is θ0, else in the type of
            arithmetic; integer tensors are the base's.
        direction: Tensors of the direction, float32 (float64 where an input is); none for integer tensors.
        dtypes: The base's type per tensor.
    """

    anchor: dict[str, Tensor]
    direction: dict[str, Tensor]
    dtypes: dict[str, torch.dtype]

    def to(self, device: str | torch.device) -> Direction:
        """Return the merge with anchor and direction on a device, where `at` then computes the same bits."""
        moved = [{name: value.to(device) for name, value in part.items()} for part in (self.anchor, self.direction)]
        return Direction(moved[0], moved[1], self.dtypes)

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for part in (self.anchor, self.direction) for value in part.values())

    def at(self, scale: float, out: dict[str, Tensor] | None = None, *, checked: bool = True) -> dict[str, Tensor]:
        """Return the merged state dict anchor + scale · direction in the base's types.

        Args:
            scale: Any real number; 0 gives the anchor bit for bit.
            out: A result of an earlier call to write into, so that a sweep touches no new memory.
            checked: Whether a result that overflows its type, or has negative variances, is refused; a sweep goes on
                and gives it the score that it has.
        """
        made = {}
        for name, anchor in self.anchor.items():
            direction = self.direction.get(name)
            made[name] = settle(anchor, direction, scale, self.dtypes[name], None if out is None else out[name])
            if checked and direction is not None and scale != 0:
                _check_result(name, made[name], anchor, direction)
        return made


def settle(
    anchor: Tensor, direction: Tensor | None, scale: float, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Return anchor + scale · direction in the given type.

    Two roundings, never a fused multiply-add: whether one is used depends on where a block ends.

    Args:
        anchor: [n] or any other shape.
        direction: Of the anchor's shape, in the type of arithmetic; None for a tensor that is not merged.
        scale: Any real number; 0 gives the anchor bit for bit.
        out: Where the result goes, of that shape and type; a new tensor by default.
    """
    if direction is None or scale == 0:
        return anchor.to(dtype, copy=True) if out is None else out.copy_(anchor)
    if out is not None and dtype == direction.dtype:
        return torch.mul(direction, scale, out=out).add_(anchor.to(direction.dtype))
    result = (direction * scale).add_(anchor.to(direction.dtype)).to(dtype)
    return result if out is None else out.copy_(result)


def settled(name: str, parts: tuple[Tensor, Tensor], scale: float, dtype: torch.dtype) -> Tensor:
    """Return a piece of a result on the CPU, flat [n] and checked, of anchor and direction of one shape."""
    anchor, direction = parts
    piece = settle(anchor.reshape(-1), direction.reshape(-1), scale, dtype).cpu()
    _check_result(name, piece, anchor, direction)
    return piece


def cast(name: str, piece: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a piece [...] that is not merged in the result's type, which it may not overflow."""
    made = piece.to(dtype)
    if made.dtype != piece.dtype and not all_finite(made):
        _check_range(name, made, piece)
    return made


def _check_range(name: str, piece: Tensor, source: Tensor) -> None:
    """Check that a piece [...] is finite where its source is; infinities of the source belong there, as bounds do."""
    if bool((~piece.isfinite() & source.isfinite().to(piece.device)).any()):
        raise MergeflowError(
            f"tensor '{name}' of the result overflows {piece.dtype}: choose a wider dtype or a smaller scale."
        )


def _check_result(name: str, piece: Tensor, anchor: Tensor, direction: Tensor) -> None:
    if not all_finite(piece):
        if bool(direction.isnan().any()):
            raise MergeflowError(
                f"tensor '{name}' of the result is NaN: where weights vary, their sum may be 0 in no tensor."
            )
        _check_range(name, piece, anchor.reshape(piece.shape))
    if name.endswith(RUNNING[1]) and bool((piece < 0).any()):
        raise MergeflowError(
            f"tensor '{name}' of the result holds negative variances, and the model would give NaN: statistics of "
            f"BatchNorm do not add up as weights do. Keep the base's (`ignore: ['*{RUNNING[0]}', '*{RUNNING[1]}']`) "
            "and compute them again from data, or use a mean (average) or a smaller scale."
        )


def prepare(
    call: MethodCall | str,
    base: Mapping[str, Tensor] | nn.Module,
    experts: Mapping[str, Mapping[str, Tensor] | nn.Module],
    weights: Mapping[str, float] | Sequence[float] | None = None,
    *,
    cache: FactorCache | None = None,
    data: Mapping[str, Any] | None = None,
    workers: int | None = None,
    device: str = "cpu",
    config: Mapping[str, Any] | None = None,
    **args: Any,
) -> Direction:
    """Compute a method's anchor and direction once, to be used at any number of scales.

    θ = anchor + scale · direction, with the anchor θ0 for most methods and a direction made of τ_t = θ_t − θ0

    Args:
        call: The configured method, or a method's name; its scale is ignored.
        base: θ0, a state dict in memory or lazy, or a module; arithmetic is float32, float64 where an input is.
        experts: State dicts or modules with the base's names and shapes, by name; their order matters for `slerp` only.
        weights: Per-expert factors, by name or in the order of `experts`; all 1 when missing.
        cache: Shared by the calls of a sweep, so that a grid over (rank, scale) factors each matrix once.
        data: Statistics of data for methods that need them, by kind, then expert, then tensor.
        workers: Threads, by default one per core; the result does not depend on it.
        device: "cpu" or a CUDA device for the arithmetic.
        config: The model's config.json as a mapping (`model.config.to_dict()`), for a base in memory: spectral methods
            learn from it how fused weights are laid out. A base opened from a model folder brings its own, and so does
            a module of transformers.

    Returns:
        The direction, with new tensors that share no memory with the inputs (but for an anchor that is the base).

    Example:
        >>> from mergeflow.merging.catalog import configure
        >>> base, expert = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> prepare(configure("task_arithmetic"), base, {"a": expert}).at(0.5)["w"]
        tensor([0.5000, 0.5000])
        >>> prepare("ties", torch.nn.Linear(1, 2), {"a": torch.nn.Linear(1, 2)}, keep=0.5).at(0.3)["bias"].shape
        torch.Size([2])
    """
    call = configured(call, args)
    if config is None:
        config = _config(base)
    check_inputs(call, experts, data)
    origin = _state(base)
    states = {
        name: bound(origin, state) if isinstance(state, LazyStateDict) else _state(state)
        for name, state in experts.items()
    }
    model = _checked(call, origin, states, weights, data, cache, config)
    infos = infos_of(origin)
    engine = Engine(call, Stacks(origin, states, model, device), workers)
    anchors = {name: origin[name].detach() for name in infos}
    directions = {
        name: torch.zeros(info.shape, dtype=model.dtype.torch)
        for name, info in infos.items()
        if info.dtype.is_floating_point
    }
    copied: set[str] = set()
    lock = Lock()

    def keep(unit: Unit, stack: Stack | None, result: Any) -> None:
        if stack is None:
            return
        anchor, direction = result
        directions[unit.name].view(-1)[unit.start : unit.stop] = direction.reshape(-1).cpu()
        if anchor is stack.base:
            return
        with lock:
            if unit.name not in copied:
                anchors[unit.name] = anchors[unit.name].to(model.dtype.torch, copy=True).contiguous()
                copied.add(unit.name)
        anchors[unit.name].view(-1)[unit.start : unit.stop] = anchor.reshape(-1).cpu()

    engine.first_passes()
    engine.run(keep)
    return Direction(anchors, directions, {name: info.dtype.torch for name, info in infos.items()})


def _checked(
    call: MethodCall,
    base: Mapping[str, Tensor],
    states: Mapping[str, Mapping[str, Tensor]],
    weights: Mapping[str, float] | Sequence[float] | None,
    data: Mapping[str, Any] | None,
    cache: FactorCache | None,
    config: Mapping[str, Any] | None,
) -> Model:
    """Return the model of a merge after all checks that need no weight."""
    check_compatible(base, states)
    typed = call.arguments
    model = model_of(base, states, weights_by_name(weights, states, call), data, cache, config)
    check_depth(typed.varied, model.shapes)
    survey(f"method '{call.name}'", typed.selection, typed.splits, infos_of(base), model.tied, model.architecture)
    return model


def configured(call: MethodCall | str, args: Mapping[str, Any]) -> MethodCall:
    """Return a method's name with its arguments as the configured method; a configured one as it is."""
    if isinstance(call, str):
        return configure(call, args)
    if not isinstance(call, MethodCall):
        raise MergeflowError(f"`prepare` takes a method's name, or `configure(name, arguments)`, found {call!r:.60}.")
    if args:
        raise MergeflowError(
            f"arguments {sorted(args)} are given in addition to a configured method: give them to `configure`."
        )
    return call


def _state(model: Mapping[str, Tensor] | nn.Module) -> Mapping[str, Tensor]:
    if not isinstance(model, torch.nn.Module):
        return model
    # Copies: an anchor may be the base itself, and the next `load_state_dict` of a merge would change it.
    return {name: value.clone() for name, value in model.state_dict().items()}


def _config(model: Any) -> dict[str, Any] | None:
    config: Any = getattr(model, "config", None) if isinstance(model, torch.nn.Module) else None
    return config.to_dict() if hasattr(config, "to_dict") else None


State: TypeAlias = "Mapping[str, Tensor]"


class CandidateMerger:
    """Merges candidates in memory, of states in memory or lazy.

    Candidates that differ in `scale` alone share one direction when they come after each other; candidates of any
    arguments share factorisations.

    Args:
        statistics: Of data, for methods that need them: kind → expert → tensor.
    """

    def __init__(
        self,
        base: State,
        experts: Mapping[str, State],
        *,
        statistics: Mapping[str, Any] | None = None,
        device: str = "cpu",
    ) -> None:
        self.base, self.experts = base, experts
        self.cache = FactorCache()
        self.prepared = 0
        self._statistics, self._device = statistics, device
        self._call: MethodCall | None = None
        self._direction: Direction | None = None

    def renew_cache(self, rank_ratio: float) -> None:
        """Forget all factorisations and keep those to come up to a share of the rank."""
        self.cache = FactorCache(rank_ratio)

    def check(self, call: MethodCall) -> None:
        """Check that a candidate can be merged, without reading a weight."""
        check_inputs(call, self.experts, self._statistics)
        states = {
            name: bound(self.base, state) if isinstance(state, LazyStateDict) else state
            for name, state in self.experts.items()
        }
        _checked(call, self.base, states, None, self._statistics, None, None)

    def merge(self, call: MethodCall) -> dict[str, Tensor]:
        """Return the merged state dict of a candidate, on the processor."""
        return {name: value.cpu() for name, value in self.merge_for(call, torch.device("cpu")).items()}

    def merge_for(self, call: MethodCall, device: torch.device) -> dict[str, Tensor]:
        """Return the merged state dict of a candidate that a model on a device is given.

        A CUDA device is given anchor and direction at the second of candidates that differ in `scale` alone, so that no
        weights are copied there for each of them; the bits are the processor's. By then the model has judged the first,
        and torch holds what its forward passes take: where what is left is too small, merges stay on the processor.
        """
        if self._direction is None or self._call != call.without_scale():
            self._direction = None  # free the old one before the new one is made
            self._direction = prepare(
                call, self.base, self.experts, cache=self.cache, data=self._statistics, device=self._device
            )
            self._call = call.without_scale()
            self.prepared += 1
        elif has_room(device, self._direction.nbytes):
            self._direction = self._direction.to(device)
        return self._direction.at(call.scale, checked=False)
