"""What a sweep tries of one method: a grid of values, or ranges and choices for a search."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.evaluation.selection import at_grid_edge
from mergeflow.merging import configure, get
from mergeflow.search.grid import grid_of

Space = dict[str, Any] | None
"""Argument → list of values; or, in a search, a mapping with low and high (log, step) or choices."""

_RANGE = ("low", "high", "log", "step", "choices")
# A choice of a search within this share of its range from an end counts as standing at the edge.
_EDGE = 0.02
# Corners of a search's box that are checked before it starts; the other combinations are checked when they come.
_CORNERS = 256


def values_of(space: Space) -> dict[str, list[Any]]:
    """Return the grid as argument → list of values; a value that is not a list stands alone."""
    return {name: list(found) if isinstance(found, list) else [found] for name, found in (space or {}).items()}


def check_space(method: str, space: Space, searched: bool) -> Iterator[dict[str, Any]]:
    """Check what a sweep tries of one method and yield the combinations to validate: all of a grid, or a box's corners.

    Args:
        method: The method's name.
        space: Argument → values, or ranges and choices.
        searched: Whether a search with Optuna tries them, so that ranges are allowed.

    Raises:
        MergeflowError: unknown method or argument, an empty list, a range that is none, or a value out of range.
    """
    fields = get(method).args.model_fields
    for name in space or {}:
        if name not in fields:
            raise unknown_name(f"argument of {method}", str(name), fields)
    if not searched:
        for name, values in values_of(space).items():
            if not values:
                raise MergeflowError(f"methods.{method}.{name} is empty: name at least one value.")
            if any(isinstance(value, Mapping) and set(value) & set(_RANGE[:2]) for value in values):
                raise MergeflowError(f"methods.{method}.{name} is a range: ranges need `search: {{trials: N}}`.")
        yield from grid_of(method, values_of(space))
        return
    ends = {name: _ends(method, name, found) for name, found in (space or {}).items()}
    for _, chosen in zip(range(_CORNERS), product(*ends.values()), strict=False):
        args = dict(zip(ends, chosen, strict=True))
        configure(method, args)
        yield args


def _ends(method: str, name: str, found: Any) -> list[Any]:
    """Return the values of a dimension that must be valid: both ends of a range, or all choices."""
    place = f"methods.{method}.{name}"
    if isinstance(found, list):
        found = {"choices": found}
    if not isinstance(found, Mapping):
        return [found]
    for key in found:
        if key not in _RANGE:
            raise unknown_name(f"key of {place}", str(key), _RANGE)
    if "choices" in found:
        if len(found) > 1 or not isinstance(found["choices"], list) or not found["choices"]:
            raise MergeflowError(f"{place}: `choices` is a list of one value or more and stands alone.")
        return list(found["choices"])
    low, high = (_number(place, key, found.get(key)) for key in ("low", "high"))
    if not low < high:
        raise MergeflowError(f"{place}: low {low:g} must be below high {high:g}.")
    if found.get("log") not in (None, False, True):
        raise MergeflowError(f"{place}.log must be true or false, found {found['log']!r}.")
    if found.get("log") and (low <= 0 or found.get("step") is not None):
        raise MergeflowError(f"{place}: a range with `log` starts above 0 and has no `step`.")
    if found.get("step") is not None and not 0 < _number(place, "step", found["step"]) <= high - low:
        raise MergeflowError(f"{place}.step must be above 0 and at most high - low, found {found['step']!r}.")
    if is_whole(method, name):
        if any(value != int(value) for value in (low, high, float(found.get("step") or 1))):
            raise MergeflowError(f"{place} is a whole number: give whole low, high and step.")
        return [int(low), int(high)]
    return [low, high]


def _number(place: str, key: str, value: Any) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else None
    except (TypeError, ValueError):
        number = None
    if number is None or not abs(number) < float("inf"):
        raise MergeflowError(f"{place}.{key} must be a finite number, found {value!r}.")
    return number


def is_whole(method: str, name: str) -> bool:
    """Whether an argument is a whole number."""
    return get(method).args.model_fields[name].annotation is int


def at_edge(space: Space, args: Mapping[str, Any]) -> list[str]:
    """Return the arguments whose value stands at an end of what was tried: a better one may lie outside.

    Example:
        >>> at_edge({"scale": {"low": 0.0, "high": 2.0}, "keep": [0.1, 0.2, 0.3]}, {"scale": 1.99, "keep": 0.2})
        ['scale']
    """
    from math import log

    ranges = {name: found for name, found in (space or {}).items() if isinstance(found, Mapping) and "low" in found}
    edges = at_grid_edge(args, values_of({name: v for name, v in (space or {}).items() if name not in ranges}))
    for name, found in ranges.items():
        bend = log if found.get("log") else float
        low, high, value = (bend(float(number)) for number in (found["low"], found["high"], args[name]))
        if min(value - low, high - value) <= _EDGE * (high - low):
            edges.append(name)
    return edges
