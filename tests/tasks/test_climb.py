"""The climb over a grid: what it finds and what it asks."""

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.climb import climb
from tasks.project.parameters import candidates

GRID = {"keep": [0.1, 0.2, 0.4], "scale": [0.5, 1.0, 1.5, 2.0, 3.0]}
HEIGHTS = st.lists(st.integers(0, 4), min_size=15, max_size=15)


@settings(deadline=None)
@given(HEIGHTS, st.sampled_from(GRID["keep"]), st.sampled_from(GRID["scale"]))
def test_it_ends_where_no_neighbour_is_better_and_asks_nothing_twice(
    heights: list[int], keep: float, scale: float
) -> None:
    known = {tuple(args.values()): height for args, height in zip(candidates("ties", GRID), heights, strict=True)}
    asked: list[tuple[Any, ...]] = []

    def score(args: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(tuple(args.values()))
        return {"args": dict(args), "normalised": known[asked[-1]]}

    rows = climb(GRID, {"keep": keep, "scale": scale, "rounding": "ceil"}, score)
    assert len(asked) == len(set(asked)) == len(rows)
    assert asked[0] == (keep, scale)
    best = max(rows, key=lambda row: row["normalised"])["args"]
    for name, values in GRID.items():
        place = values.index(best[name])
        for other in values[max(0, place - 1) : place + 2]:
            neighbour = {**best, name: other}
            assert known[neighbour["keep"], neighbour["scale"]] <= known[best["keep"], best["scale"]]


def test_a_start_outside_the_grid_is_replaced() -> None:
    rows = climb(GRID, {"keep": 0.3}, lambda args: {"args": args, "normalised": 0.0})
    assert rows[0]["args"] == {"keep": 0.2, "scale": 1.5}
    assert len(rows) == 5
