"""Search a grid: every combination of a method's values, in an order in which candidates share their directions."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from mergeflow.merging import configure
from mergeflow.search.candidates import Args, Strategy

Grid = Mapping[str, Sequence[Any]]


def grid(method: str, values: Grid) -> Strategy:
    """Ask for every candidate of a grid, whatever the scores are.

    Args:
        method: A name of the catalog.
        values: Argument → the values to try.
    """
    for args in grid_of(method, values):
        _ = yield args


def grid_of(method: str, values: Grid) -> list[Args]:
    """Return every combination of a method's values, with `scale` changing fastest, so that directions are shared.

    Two combinations that mean the same call (1 and 1.0) are one candidate.

    Raises:
        MergeflowError: A combination that the method does not take.

    Example:
        >>> grid_of("ties", {"scale": [1.0, 2.0], "keep": [0.1]})
        [{'keep': 0.1, 'scale': 1.0}, {'keep': 0.1, 'scale': 2.0}]
    """
    names = sorted(values, key=lambda name: name == "scale")
    combinations = [dict(zip(names, chosen, strict=True)) for chosen in product(*(values[name] for name in names))]
    distinct: dict[str, Args] = {}
    for args in combinations:
        distinct.setdefault(repr(configure(method, args).args), args)
    return list(distinct.values())
