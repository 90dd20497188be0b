"""Search along one argument: the best of many values of `scale` without trying them all."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mergeflow.search.candidates import Scored, Strategy


def line(
    argument: str, values: Sequence[float], start: float, fixed: Mapping[str, Any] | None = None, slack: float = 0.01
) -> Strategy:
    """Ask for the values of one argument from `start` on, both ways, until the objective has fallen by `slack`.

    The best of them is the best of all values wherever the objective has no dip deeper than `slack`; accuracy over the
    scale of a merge has one hump, and costs a quarter of the grid this way.

    Args:
        argument: Its name.
        values: Ascending, at least one.
        start: Where to begin; the nearest value is taken.
        fixed: The other arguments.
        slack: At least 0, in units of the objective.

    Example:
        >>> walk = line("scale", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 0.2, slack=0.05)
        >>> asked, args = [], next(walk)
        >>> for _ in range(3):
        ...     asked.append(args["scale"])
        ...     args = walk.send(-abs(args["scale"] - 0.3))
        >>> asked, args
        ([0.2, 0.3, 0.4], {'scale': 0.1})
    """
    assert list(values) == sorted(values)
    first = min(range(len(values)), key=lambda i: abs(values[i] - start))
    found = {first: (yield {**(fixed or {}), argument: values[first]})}
    for step in (1, -1):
        index = first + step
        while 0 <= index < len(values):
            found[index] = yield {**(fixed or {}), argument: values[index]}
            if found[index] < max(found.values()) - slack:
                break
            index += step


def best_on_line(found: Iterable[Scored], argument: str) -> Scored:
    """Return the best candidate of a line; of equals the one with the smallest value."""
    return max(found, key=lambda one: (one.value, -one.varied[argument]))
