"""Selection on validation: which candidate of a method, and which method."""

from collections.abc import Mapping, Sequence
from typing import Any

from mergeflow.documents import Candidate
from mergeflow.errors import MergeflowError


def best_candidate(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the highest `normalised` validation accuracy; the first of equals.

    Args:
        candidates: the rows of a sweep, in its order.

    Raises:
        MergeflowError: there is no candidate.
    """
    if not candidates:
        raise MergeflowError("nothing to select: the sweep has no candidates.")
    return max(candidates, key=lambda row: row["normalised"])


def at_grid_edge(args: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the arguments whose chosen value is the smallest or largest of at least three numbers tried.

    A choice at the edge says that a better value may lie outside the grid.

    Example:
        >>> at_grid_edge({"scale": 3.0, "keep": 0.2}, {"scale": [1.0, 2.0, 3.0], "keep": [0.2]})
        ['scale']
    """
    edges = []
    for name, values in grid.items():
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) >= 3 and args[name] in (min(numbers), max(numbers)):
            edges.append(name)
    return edges
