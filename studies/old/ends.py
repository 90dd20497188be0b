"""Whether what was chosen stands at an end of what was tried, so that a better value may lie beyond."""

from collections.abc import Iterable, Mapping
from typing import Any


def at_end(value: float, tried: Iterable[float]) -> bool:
    """Say whether the smallest or the largest of two values or more was taken.

    Example:
        >>> at_end(0.1, [0.1, 0.2]), at_end(0.2, [0.1, 0.2, 0.3]), at_end(0.1, [0.1])
        (True, False, False)
    """
    values = set(tried)
    return len(values) > 1 and value in (min(values), max(values))


def ends_of(chosen: Mapping[str, Any], tried: Mapping[str, Iterable[float]]) -> list[str]:
    """Return the arguments of which the smallest or the largest value was taken.

    Args:
        chosen: argument → the value that was taken.
        tried: argument → the values that were tried.

    Example:
        >>> ends_of({"keep": 0.1, "scale": 0.2}, {"keep": [0.1, 0.2], "scale": [0.1, 0.2, 0.3]})
        ['keep']
    """
    return [name for name, values in tried.items() if at_end(chosen[name], values)]
