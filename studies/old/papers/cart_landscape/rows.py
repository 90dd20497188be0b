"""Study `cart_landscape`: its tidy rows, from which every finding and table can be computed."""

from collections.abc import Mapping
from typing import Any

from studies.old.papers.cart_landscape.seed import Rows
from studies.old.rows import Row, tidy


def tidy_rows(rows: Rows, paths: Mapping[str, Any], basins: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the study's rows; `part` tells them apart.

    `models`: the validation loss of every model on every task, where the model lies on the plane of the paths (`x`,
    `y`), how far off it and how far away from the average; `chosen` marks task arithmetic with the best λ. `test`: loss
    and accuracy in % of the models of the first table (`model`). `fits`: what two components found from the models
    `found_from` explain of the variance, and what `share` of the distance from the average they show of each kind.
    `basins`: where the models lie on the plane of a task's expert, CART and task arithmetic, first seed. `grid`: the
    losses that the pictures of the first seed draw, on the plane of the paths (`plane` is "paths") and on each task's.

    Args:
        rows: as of `measure`, one for each seed.
        paths: as of `draw_paths`.
        basins: as of `draw_basins`.
    """
    found = [one for row in rows for one in (*_models(row), *_test(row), *_fits(row))]
    seed = rows[0]["seed"]
    grids = [one for plane, drawn in {"paths": paths, **basins}.items() for one in _grid(plane, drawn, seed)]
    return tidy([*found, *_basins(basins, seed), *grids])


def _models(row: Row) -> list[Row]:
    return [
        {
            "part": "models",
            "seed": row["seed"],
            **{key: one[key] for key in ("kind", "scale", "rank", "off", "away")},
            **_place(one["place"]),
            "chosen": (one["kind"], one["scale"]) == ("task_arithmetic", row["addition"]),
            "expert": one["task"],
            "task": task,
            "loss": loss,
        }
        for one in row["models"]
        for task, loss in one["losses"].items()
    ]


def _test(row: Row) -> list[Row]:
    return [
        {
            "part": "test",
            "seed": row["seed"],
            "model": name,
            "task": task,
            "loss": loss,
            "accuracy": 100 * one["accuracy"][task],
        }
        for name, one in row["test"].items()
        for task, loss in one["losses"].items()
    ]


def _fits(row: Row) -> list[Row]:
    return [
        {
            "part": "fits",
            "seed": row["seed"],
            "found_from": title,
            "explained": fit["explained"],
            "kind": kind,
            "share": share,
        }
        for title, fit in row["fits"].items()
        for kind, share in fit["shares"].items()
    ]


def _basins(basins: Mapping[str, Any], seed: int) -> list[Row]:
    return [
        {"part": "basins", "seed": seed, "task": task, "kind": kind, **_place(place), "off": one["off"].get(kind)}
        for task, one in basins.items()
        for kind, place in one["places"].items()
    ]


def _grid(plane: str, drawn: Mapping[str, Any], seed: int) -> list[Row]:
    return [
        {"part": "grid", "seed": seed, "plane": plane, "x": x, "y": y, "task": task, "loss": loss}
        for task, losses in drawn["losses"].items()
        for y, line in zip(drawn["ys"], losses, strict=True)
        for x, loss in zip(drawn["xs"], line, strict=True)
    ]


def _place(place: tuple[float, float]) -> dict[str, float]:
    x, y = place
    return {"x": float(x), "y": float(y)}
