"""A sweep that starts from a known good choice and looks only around it."""

from collections.abc import Callable, Mapping
from typing import Any

from mergeflow import layout
from tasks.project.stage import StageIO
from tasks.sweep import Row, open_scorer, write_rows

Grid = Mapping[str, list[Any]]


def sweep_near(io: StageIO, start: Mapping[str, Any]) -> None:
    """Write `outputs/sweeps/<method>.json` with the candidates that a climb from `start` has scored.

    Args:
        io: the sweep stage's view of a scratch project; its grid bounds the climb.
        start: the arguments to start from; arguments that the grid does not name play no part.
    """
    with io.holds:
        grid = io.section(f"sweep.{io.item}")
        rows = climb(grid, start, open_scorer(io))
        write_rows(io, io.root / layout.sweep(io.item), rows)


def climb(grid: Grid, start: Mapping[str, Any], score: Callable[[Mapping[str, Any]], Row]) -> list[Row]:
    """Climb the grid, one argument after the other, until no neighbour is better; return every scored candidate.

    Args:
        grid: argument to its values, in order.
        start: argument to value; a value that is not in the grid is replaced by the middle one.
        score: arguments to a row with `normalised`, the objective; never asked twice for the same.

    Example:
        >>> grid = {"keep": [0.1, 0.2], "scale": [0.5, 1.0, 1.5, 2.0]}
        >>> hill = lambda args: {"args": args, "normalised": -abs(args["scale"] - 1.4) - args["keep"]}
        >>> [tuple(row["args"].values()) for row in climb(grid, {"keep": 0.1, "scale": 1.0}, hill)]
        [(0.1, 1.0), (0.1, 0.5), (0.1, 1.5), (0.1, 2.0), (0.2, 1.5)]
    """
    rows: dict[tuple[Any, ...], Row] = {}

    def at(args: Mapping[str, Any]) -> Row:
        key = tuple(args[name] for name in grid)
        if key not in rows:
            rows[key] = score(dict(args))
        return rows[key]

    names = sorted(grid, key=lambda name: name != "scale")  # candidates of other scales cost least
    best = at({name: start[name] if start.get(name) in grid[name] else _middle(grid[name]) for name in grid})
    moved = True
    while moved:
        moved = False
        for name in names:
            better = max([best, *map(at, _neighbours(grid, best["args"], name))], key=_objective)
            while better is not best:  # the first of equals: a tie ends the climb
                best, moved = better, True
                better = max([best, *map(at, _neighbours(grid, best["args"], name))], key=_objective)
    return list(rows.values())


def _neighbours(grid: Grid, args: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    values = grid[name]
    place = values.index(args[name])
    return [{**args, name: values[other]} for other in (place - 1, place + 1) if 0 <= other < len(values)]


def _objective(row: Row) -> float:
    return float(row["normalised"])


def _middle(values: list[Any]) -> Any:
    return values[len(values) // 2]
