"""The tidy rows of the study `projection`: its models, every distance between two, DARE's drops, distances of seeds."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from studies.old.papers.projection.results import Space
from studies.old.rows import Row, tidy


def tidy_rows(rows: Sequence[Row], across: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return what was measured, told by `part`.

    Args:
        rows: one for each seed, as of `measure`.
        across: model → distance of every pair of seeds.

    Returns:
        `model`: its kind (base, expert, merge, random merge, round, joint), scale, length, and where it was scored its
        accuracy in % and loss. `pair`: the distance of two models of a seed, the cosine of their moves from the base,
        and of two merges that the paper names the barrier between them, in nat. `drop`: DARE's distance from task
        arithmetic. `seeds`: the distance of a model of two seeds.
    """
    spaces = [Space(row) for row in rows]
    two = list(combinations([row["seed"] for row in rows], 2))
    seeds = [
        {"part": "seeds", "model": name, "first_seed": one, "second_seed": other, "distance": distance}
        for name, own in across.items()
        for (one, other), distance in zip(two, own, strict=True)
    ]
    drops = [{"part": "drop", "seed": row["seed"], "model": "dare", **one} for row in rows for one in row["drops"]]
    models = [model for space in spaces for model in _models(space)]
    pairs = [pair for space in spaces for pair in _pairs(space)]
    return tidy([*models, *pairs, *drops, *seeds])


def _models(space: Space) -> list[dict[str, Any]]:
    row = space.row
    return [
        {
            "part": "model",
            "seed": row["seed"],
            "model": name,
            "kind": _kind(row, name),
            "scale": row["scales"].get(name),
            "length": space.length(name),
            "cosine_with_task_arithmetic": space.cosine(name, "task_arithmetic") if name != "base" else None,
            "to_nearest_merge": space.gap(name, row["merges"]),
            "loss": row["loss"].get(_scored(row, name)),
            "accuracy": row["accuracy"].get(_scored(row, name)),
        }
        for name in row["names"]
    ]


def _kind(row: Row, name: str) -> str:
    if name in row["merges"]:
        return "random merge" if name in row["random"] else "merge"
    if name in row["experts"]:
        return "expert"
    return name if name == "base" else "joint" if name == row["joint"] else "round"


def _pairs(space: Space) -> list[dict[str, Any]]:
    barriers = {frozenset(pair.split(" – ")): height for pair, height in space.row["barriers"].items()}
    return [
        {
            "part": "pair",
            "seed": space.row["seed"],
            "model": one,
            "other": other,
            "distance": space.distance(one, other),
            "cosine": space.cosine(one, other) if one != "base" else None,
            "barrier": barriers.get(frozenset((one, other))),
        }
        for one, other in combinations(space.row["names"], 2)
    ]


def _scored(row: Row, name: str) -> str:
    """Return by which name a model's accuracy is known: the last point of a path has the path's."""
    return next((run for run, names in row["paths"].items() if names[-1] == name), name)
