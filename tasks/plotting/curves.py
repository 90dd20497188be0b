"""Validation accuracy over the arguments that were tried, drawn and as tidy tables, one record a point."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.plotting.drawing import (
    SMALL,
    dress,
    legend,
    number_ticks,
    panels,
    plain,
    ring,
    series_style,
    spans_decades,
)
from tasks.plotting.palette import MUTED

Row = Mapping[str, Any]
Sweeps = Mapping[str, list[Row]]
_SHOWN_LINES = 8
_NORMALISED = "normalised accuracy, %"


def scale_curves(sweeps: Sweeps, choices: Mapping[str, Row]) -> Figure | None:
    """Draw normalised validation accuracy over `scale`: a panel per method, a line per value of its other arguments."""
    shown = {method: rows for method, rows in sweeps.items() if len(_values(rows, "scale")) > 1}
    if not shown:
        return None
    figure, axes = panels(len(shown), 3, 3.5, sharey=True)
    for index, (panel, (method, rows)) in enumerate(zip(axes, shown.items(), strict=True)):
        dress(panel, method, "scale λ", _NORMALISED if index % 3 == 0 else "")
        title, lines = _lines(rows)
        for number, (label, points) in enumerate(lines.items()):
            style = series_style(number if len(lines) > 1 else list(choices).index(method))
            panel.plot(*_curve(points, "scale"), label=plain(label), **style)
        values = _values(rows, "scale")
        number_ticks(panel, values, spans_decades(values))
        panel.margins(y=0.16)
        _mark_choice(panel, choices[method], "scale")
        _draw_constants(panel, sweeps)
        if len(lines) > 1:
            legend(panel, 3.1, plain(title), loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


def argument_curves(sweeps: Sweeps, choices: Mapping[str, Row]) -> Figure | None:
    """Draw normalised validation accuracy over each other numeric argument (CART's rank), at the best of the rest."""
    shown = swept_arguments(sweeps)
    if not shown:
        return None
    figure, axes = panels(len(shown), 2 if len(shown) != 3 else 3, 3.2)
    for panel, (method, argument) in zip(axes, shown, strict=True):
        rows = sweeps[method]
        values, best = _values(rows, argument), best_by_value(rows, argument)
        dress(panel, f"{method}: {argument}", argument, _NORMALISED)
        panel.plot(*_curve(best, argument), **series_style(list(choices).index(method)))
        number_ticks(panel, values, spans_decades(values))
        panel.margins(x=0.1, y=0.22)
        _note_scales(panel, best, argument)
        _mark_choice(panel, choices[method], argument)
    return figure


def swept_arguments(sweeps: Sweeps) -> list[tuple[str, str]]:
    """Return (method, argument) wherever two numbers were tried for an argument other than `scale`."""
    return [
        (method, argument)
        for method, rows in sweeps.items()
        for argument in rows[0]["args"]
        if argument != "scale" and len(_values(rows, argument)) > 1
    ]


def best_by_value(rows: list[Row], argument: str) -> list[Row]:
    """Return the best candidate for each number that was tried for an argument, in the numbers' order."""
    values = _values(rows, argument)
    return [max((r for r in rows if r["args"][argument] == v), key=lambda r: r["normalised"]) for v in values]


def is_number(value: Any) -> bool:
    """Whether an argument's value can be put on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(rows: list[Row], argument: str) -> list[float]:
    values = {row["args"].get(argument) for row in rows}
    return sorted(value for value in values if is_number(value))


def _lines(rows: list[Row]) -> tuple[str, dict[str, list[Row]]]:
    """Group candidates by everything but `scale`; of many groups return the best ones, under the arguments' names."""
    names = [name for name in rows[0]["args"] if name != "scale"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        values = [row["args"][name] for name in names]
        label = ", ".join(f"{value:g}" if is_number(value) else str(value) for value in values)
        groups.setdefault(label, []).append(row)
    ranked = sorted(groups, key=lambda label: -max(row["normalised"] for row in groups[label]))[:_SHOWN_LINES]
    title = ", ".join(names) + (f" (best {_SHOWN_LINES} of {len(groups)})" if len(groups) > _SHOWN_LINES else "")
    return title, {label: points for label, points in groups.items() if label in ranked}


def _curve(rows: list[Row], argument: str) -> tuple[list[float], list[float]]:
    points = sorted((row["args"][argument], 100 * row["normalised"]) for row in rows)
    return [x for x, _ in points], [y for _, y in points]


def _mark_choice(panel: Axes, chosen: Row, argument: str) -> None:
    height = 100 * chosen["validation"]["normalised"]
    ring(panel, chosen["args"][argument], height, f"chosen: {height:.1f} %")


def _draw_constants(panel: Axes, sweeps: Mapping[str, list[Row]]) -> None:
    """Draw the methods that have one candidate as levels to compare with."""
    for method, rows in sweeps.items():
        if len(rows) == 1:
            height = 100 * rows[0]["normalised"]
            panel.axhline(height, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
            panel.annotate(
                plain(method),
                (1, height),
                xycoords=("axes fraction", "data"),
                xytext=(-3, 3),
                textcoords="offset points",
                ha="right",
                fontsize=SMALL,
                color=MUTED,
            )


def _note_scales(panel: Axes, rows: list[Row], argument: str) -> None:
    """Say under each point which scale was best there."""
    for row in rows:
        if "scale" in row["args"]:
            panel.annotate(
                f"λ {row['args']['scale']:g}",
                (row["args"][argument], 0.03),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize=SMALL,
                color=MUTED,
            )


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
