"""Search by climbing: start from a known good choice and look only around it."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mergeflow.search.candidates import Args, Strategy
from mergeflow.search.grid import Grid


def climb(grid: Grid, start: Mapping[str, Any]) -> Strategy:
    """Ask for the neighbours of the best candidate, one argument after the other, until none of them is better.

    Args:
        grid: Argument → its values, in order; they bound the climb.
        start: Argument → value; a value that is not in the grid is replaced by the middle one, and arguments that the
            grid does not name play no part.

    Example:
        >>> hill = climb({"keep": [0.1, 0.2], "scale": [0.5, 1.0, 1.5, 2.0]}, {"keep": 0.1, "scale": 1.0})
        >>> asked, args = [], next(hill)
        >>> for _ in range(4):
        ...     asked.append(tuple(args.values()))
        ...     args = hill.send(-abs(args["scale"] - 1.4) - args["keep"])
        >>> asked, args
        ([(0.1, 1.0), (0.1, 0.5), (0.1, 1.5), (0.1, 2.0)], {'keep': 0.2, 'scale': 1.5})
    """
    known: dict[tuple[Any, ...], float] = {}
    names = sorted(grid, key=lambda name: name != "scale")  # candidates of other scales cost least
    best = {name: start[name] if start.get(name) in grid[name] else _middle(grid[name]) for name in grid}
    height = yield from _ask(best, known)
    moved = True
    while moved:
        moved = False
        for name in names:
            while True:
                around = []
                for args in _neighbours(grid, best, name):
                    around.append(((yield from _ask(args, known)), args))
                higher, args = max(around, key=lambda one: one[0], default=(height, best))
                if not higher > height:  # a tie ends the climb
                    break
                best, height, moved = args, higher, True


def _ask(args: Args, known: dict[tuple[Any, ...], float]) -> Generator[Args, float, float]:
    """Ask for a candidate, unless it was asked for before; return its objective."""
    key = tuple(args.values())
    if key not in known:
        known[key] = yield dict(args)
    return known[key]


def _neighbours(grid: Grid, args: Args, name: str) -> list[Args]:
    values = grid[name]
    place = list(values).index(args[name])
    return [{**args, name: values[other]} for other in (place - 1, place + 1) if 0 <= other < len(values)]


def _middle(values: Sequence[Any]) -> Any:
    return values[len(values) // 2]
