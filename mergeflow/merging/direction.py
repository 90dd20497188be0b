"""A prepared merge: anchor and direction in memory, so that one preparation serves every scale."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from mergeflow.checkpoints.checks import check_compatible, infos_of
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging.catalog import MethodCall, methods
from mergeflow.merging.engine import Engine, Unit
from mergeflow.merging.linalg.cache import FactorCache
from mergeflow.merging.method import Stack
from mergeflow.merging.treatment import survey


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

    def at(self, scale: float, out: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the merged state dict anchor + scale · direction in the base's types.

        Args:
            scale: Any real number; 0 gives the anchor bit for bit.
            out: A result of an earlier call to write into, so that a sweep touches no new memory.
        """
        if out is not None:
            for name, anchor in self.anchor.items():
                settle_into(out[name], anchor, self.direction.get(name), scale)
            return out
        return {
            name: settle(anchor, self.direction.get(name), scale, self.dtypes[name])
            for name, anchor in self.anchor.items()
        }


def settle(anchor: Tensor, direction: Tensor | None, scale: float, dtype: torch.dtype) -> Tensor:
    """Return anchor + scale · direction as a new tensor of the given type.

    Two roundings, never a fused multiply-add: whether one is used depends on where a block ends.
    """
    if direction is None or scale == 0:
        return anchor.to(dtype, copy=True)
    return (direction * scale).add_(anchor.to(direction.dtype)).to(dtype)


def settle_into(out: Tensor, anchor: Tensor, direction: Tensor | None, scale: float) -> None:
    """Do as `settle`, into a tensor that exists."""
    if direction is None or scale == 0:
        out.copy_(anchor)
    elif out.dtype == direction.dtype:
        torch.mul(direction, scale, out=out).add_(anchor.to(direction.dtype))
    else:
        out.copy_(settle(anchor, direction, scale, out.dtype))


def prepare(
    call: MethodCall,
    base: Mapping[str, Tensor],
    experts: Mapping[str, Mapping[str, Tensor]],
    weights: Mapping[str, float] | Sequence[float] | None = None,
    *,
    cache: FactorCache | None = None,
    data: Mapping[str, Any] | None = None,
    workers: int | None = None,
    device: str = "cpu",
    config: Mapping[str, Any] | None = None,
) -> Direction:
    """Compute a method's anchor and direction once, to be used at any number of scales.

    Args:
        call: The configured method; its scale plays no part here.
        base: θ0, a state dict in memory or lazy.
        experts: State dicts by name; the order of names does not matter but for `slerp`.
        weights: Per-expert factors, by name or in the order of `experts`; all 1 when missing.
        cache: Shared by the calls of a sweep, so that a grid over (rank, scale) factors each matrix once.
        data: Statistics of data for methods that need them, by kind, then expert, then tensor.
        workers: Threads, by default one per core; the result does not depend on it.
        device: "cpu" or a CUDA device for the arithmetic.
        config: The model's config.json as a mapping (`model.config.to_dict()`), for a base in memory: spectral methods
            learn from it how fused weights are laid out. A base opened from a model folder brings its own.

    Returns:
        The direction, with new tensors that share no memory with the inputs (but for an anchor that is the base).

    Raises:
        MergeflowError: Experts that do not fit the base, NaN or infinity, weights that do not fit, `matrices` that fit
            no matrix.

    Example:
        >>> from mergeflow.merging.catalog import configure
        >>> base, expert = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
        >>> prepare(configure("task_arithmetic"), base, {"a": expert}).at(0.5)["w"]
        tensor([0.5000, 0.5000])
    """
    if not isinstance(call, MethodCall):
        raise MergeflowError(f"`prepare` takes a configured method, `configure(name, arguments)`, found {call!r:.60}.")
    check_inputs(call, experts, data)
    check_compatible(base, experts)
    named = weights_by_name(weights, experts, call)
    engine = Engine(call, base, experts, named, cache, data, workers, device=device, config=config)
    infos, model, args = infos_of(base), engine.model, call.arguments
    survey(f"method '{call.name}'", args.selection, args.splits, infos, model.tied, model.architecture)
    anchors = {name: base[name].detach() for name in infos}
    directions = {
        name: torch.empty(info.shape, dtype=engine.dtype)
        for name, info in infos.items()
        if info.dtype.is_floating_point
    }
    own: set[str] = set()
    lock = Lock()

    def keep(unit: Unit, stack: Stack | None, result: Any) -> None:
        if stack is None:
            return
        anchor, direction = result
        directions[unit.name].view(-1)[unit.start : unit.stop] = direction.reshape(-1).cpu()
        if anchor is stack.base:
            return
        with lock:
            if unit.name not in own:
                anchors[unit.name] = torch.empty(infos[unit.name].shape, dtype=engine.dtype)
                own.add(unit.name)
        anchors[unit.name].view(-1)[unit.start : unit.stop] = anchor.reshape(-1).cpu()

    engine.first_passes()
    engine.run(keep)
    return Direction(anchors, directions, {name: info.dtype for name, info in infos.items()})


def weights_by_name(
    weights: Mapping[str, float] | Sequence[float] | None, experts: Mapping[str, Any], call: MethodCall
) -> dict[str, float]:
    """Return one weight per expert, checked.

    Raises:
        MergeflowError: Another number of weights than experts, an unknown name, or a method without weights.
    """
    if weights is None:
        return dict.fromkeys(experts, 1.0)
    if not call.method.weighted and any(weight != 1 for weight in _values(weights)):
        raise MergeflowError(f"method '{call.name}' takes no weights per expert: remove `weights`.")
    if isinstance(weights, Mapping):
        unknown = sorted(set(weights) - set(experts))
        if unknown:
            raise MergeflowError(f"weights are given for unknown experts {unknown}. Known: {', '.join(experts)}.")
        found = {name: float(weights.get(name, 1.0)) for name in experts}
    else:
        if len(weights) != len(experts):
            raise MergeflowError(f"{len(weights)} weights for {len(experts)} experts: give one per expert.")
        found = dict(zip(experts, map(float, weights), strict=True))
    if not all(abs(weight) < float("inf") for weight in found.values()):
        raise MergeflowError(f"weights must be finite numbers, found {found}.")
    normalised = call.args.get("normalize", call.method.anchor == "–")
    if normalised and sum(found.values()) == 0:
        raise MergeflowError("the weights of an average sum to 0: they cannot be normalised.")
    return found


def _values(weights: Mapping[str, float] | Sequence[float]) -> Sequence[float]:
    return list(weights.values()) if isinstance(weights, Mapping) else weights


def check_inputs(call: MethodCall, experts: Mapping[str, Any], data: Mapping[str, Any] | None) -> None:
    """Check the number of experts, arguments that depend on it, and that needed data statistics are there.

    Raises:
        MergeflowError: Too few or too many experts, for the method or an argument; a statistic that is missing,
            unknown or of no expert.
    """
    if not isinstance(experts, Mapping):
        raise MergeflowError(f"experts are a mapping of names to state dicts, found a {type(experts).__name__}.")
    least, most = call.method.experts
    if not least <= len(experts) <= (most or len(experts)):
        wanted = f"{least}" if most == least else f"{least} or more" if most is None else f"{least} to {most}"
        raise MergeflowError(f"method '{call.name}' merges {wanted} experts, found {len(experts)}.")
    call.arguments.check_experts(len(experts))
    known = {datum.name for method in methods().values() for datum in method.given}
    for kind, by_expert in (data or {}).items():
        if kind not in known:
            raise unknown_name("statistic", kind, known)
        for name in by_expert:
            if name not in experts:
                raise unknown_name(f"expert of the statistic '{kind}'", name, experts)
    for kind in call.method.data:
        missing = sorted(set(experts) - set((data or {}).get(kind, {})))
        if missing:
            raise MergeflowError(f"method '{call.name}' needs the statistic '{kind}' of experts {missing}.")
