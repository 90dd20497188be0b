"""The tidy rows of the study `landscape`: its planes, the models on them, and every point of their grids."""

from collections.abc import Sequence
from typing import Any

from studies.old.rows import Row, tidy

SHAPE = ("angle", "length", "turn", "distance", "overlap", "floor", "off")


def tidy_rows(planes: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows of all planes, told by `part`; accuracies are in %.

    Args:
        planes: as of `measure`, with their geometry.

    Returns:
        `plane`: its geometry, with `floor` as a fraction. `model`: test accuracy on both tasks of a named model, and
        where it lies; the merge of all tasks lies off the plane. `grid`: validation accuracy on both tasks at a point.
    """
    return tidy(row for plane in planes for row in _rows_of(plane))


def _rows_of(plane: Row) -> list[dict[str, Any]]:
    def known(part: str) -> dict[str, Any]:
        return {"part": part, **{name: plane[name] for name in ("seed", "rounds")}, "pair": " – ".join(plane["pair"])}

    models = [
        {
            **known("model"),
            "model": name,
            "task": task,
            **dict(zip("xy", plane["places"].get(name, (None, None)), strict=True)),
            "accuracy": 100 * (1 - error),
        }
        for name, errors in plane["test"].items()
        for task, error in errors.items()
    ]
    points = [
        {**known("grid"), "task": task, "x": x, "y": y, "accuracy": 100 * (1 - error)}
        for task, errors in plane["errors"].items()
        for y, line in zip(plane["ys"], errors, strict=True)
        for x, error in zip(plane["xs"], line, strict=True)
    ]
    return [{**known("plane"), **{name: plane[name] for name in SHAPE}}, *models, *points]
