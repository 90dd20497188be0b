"""The figures' numbers as tidy tables, one record a point, for `dvc plots`, MLflow and your own figures."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tasks.plotting.curves import best_by_value, is_number, swept_arguments

Row = Mapping[str, Any]


def write_series(folder: Path, name: str, rows: Iterable[Row]) -> None:
    """Write `<folder>/<name>.json`, one record a line; without rows an empty list, which DVC takes."""
    lines = ",".join(f"\n{json.dumps(row)}" for row in rows)
    (folder / f"{name}.json").write_text(f"[{lines}\n]\n" if lines else "[]\n")


def scale_series(sweeps: Mapping[str, list[Row]]) -> list[Row]:
    """Return normalised validation accuracy over `scale`, a record per candidate that has one.

    Example:
        >>> row = {"args": {"keep": 0.2, "scale": 1.0}, "normalised": 0.9, "mean": 0.8}
        >>> scale_series({"ties": [row]})
        [{'method': 'ties', 'others': 'keep 0.2', 'scale': 1.0, 'normalised': 0.9, 'mean': 0.8}]
    """
    return [
        {
            "method": method,
            "others": ", ".join(f"{name} {value}" for name, value in row["args"].items() if name != "scale"),
            "scale": row["args"]["scale"],
            "normalised": row["normalised"],
            "mean": row["mean"],
        }
        for method, rows in sweeps.items()
        for row in rows
        if is_number(row["args"].get("scale"))
    ]


def argument_series(sweeps: Mapping[str, list[Row]]) -> list[Row]:
    """Return normalised validation accuracy over each other numeric argument (CART's rank), at the best of the rest."""
    return [
        {
            "method": method,
            "argument": argument,
            "value": row["args"][argument],
            "normalised": row["normalised"],
            "scale": row["args"].get("scale"),
        }
        for method, argument in swept_arguments(sweeps)
        for row in best_by_value(sweeps[method], argument)
    ]


def accuracy_series(test: Row) -> list[Row]:
    """Return test accuracy per model and task, and each model's mean."""
    return [
        {"model": row["name"], "task": task, "accuracy": accuracy}
        for row in test["rows"]
        for task, accuracy in [*row["accuracy"].items(), ("mean", row["mean"])]
    ]


def training_series(epochs: Mapping[str, list[Row]]) -> list[Row]:
    """Return each expert's training loss and validation accuracy by epoch, through all rounds of an iterative run.

    Example:
        >>> row = {"epoch": 1, "steps": 3, "loss": 2.5, "validation_accuracy": 0.5}
        >>> [point["epoch"] for point in training_series({"digits": [row, row]})]
        [1, 2]
    """
    columns = ("steps", "loss", "validation_accuracy")
    return [
        {"task": task, "epoch": number, **{key: row[key] for key in columns}}
        for task, rows in epochs.items()
        for number, row in enumerate(rows, start=1)
    ]


def cosine_series(geometry: Row) -> list[Row]:
    """Return the cosine of every pair of task vectors, both ways round.

    Example:
        >>> cosine_series({"tasks": ["a", "b"], "cosine": [[1.0, 0.5], [0.5, 1.0]]})[1]
        {'task': 'a', 'other': 'b', 'cosine': 0.5}
    """
    tasks = geometry["tasks"]
    return [
        {"task": task, "other": other, "cosine": cosine}
        for task, line in zip(tasks, geometry["cosine"], strict=True)
        for other, cosine in zip(tasks, line, strict=True)
    ]
