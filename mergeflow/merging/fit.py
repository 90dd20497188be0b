"""Whether a configured method fits what it is to merge: number of experts, weights, given statistics of data."""

from collections.abc import Mapping, Sequence
from typing import Any

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging.catalog import MethodCall, methods


def weights_by_name(
    weights: Mapping[str, float] | Sequence[float] | None, experts: Mapping[str, Any], call: MethodCall
) -> dict[str, float]:
    """Return one weight per expert, checked.

    Args:
        weights: Factors by name, where a missing one is 1; or one per expert, in their order; None for 1 each.
        experts: The experts, of which only the names matter.
        call: The configured method: it may take no weights, or need a sum that is not 0.

    Raises:
        MergeflowError: Another number of weights than experts, an unknown name, or a method without weights.
    """
    if weights is None:
        return dict.fromkeys(experts, 1.0)
    if call.method.weights == "none" and any(weight != 1 for weight in _values(weights)):
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
    if getattr(call.arguments, "normalize", call.method.weights == "shares") and sum(found.values()) == 0:
        raise MergeflowError("the weights of an average sum to 0: they cannot be normalised.")
    return found


def _values(weights: Mapping[str, float] | Sequence[float]) -> Sequence[float]:
    return list(weights.values()) if isinstance(weights, Mapping) else weights


def check_inputs(call: MethodCall, experts: Mapping[str, Any], data: Mapping[str, Any] | None) -> None:
    """Check the number of experts, arguments that depend on it, and that needed data statistics are there.

    Args:
        call: The configured method.
        experts: The experts by name.
        data: Statistics of data, by kind and expert; None where there are none.

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
    for key, value in call.arguments.varied.items():
        for name in value if isinstance(value, Mapping) and "value" not in value else ():
            if name not in experts:
                raise unknown_name(f"expert of `{key}`", name, experts)
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
