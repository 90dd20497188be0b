"""Stage `figures`: the curves of the run, as SVG files and as tables that DVC, MLflow and the report all show."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mergeflow import layout
from tasks.plotting.curves import (
    accuracy_series,
    argument_curves,
    argument_series,
    cosine_series,
    scale_curves,
    scale_series,
    training_series,
    write_series,
)
from tasks.plotting.drawing import (
    FULL_WIDTH,
    HALF_WIDTH,
    NORMAL,
    SMALL,
    dress,
    legend,
    new_figure,
    panels,
    plain,
    series_style,
    to_svg,
)
from tasks.plotting.palette import GRID, INK, MUTED, SERIES
from tasks.plotting.rows import model_name, task_title
from tasks.project.stage import StageIO

Row = Mapping[str, Any]
_RADAR_METHODS = 5
_RADAR_NAME = 18  # characters; a name stands on each side


@dataclass(frozen=True)
class Results:
    """What the stages measured, as they wrote it.

    Attributes:
        sweeps: method to its candidates on validation, in the order of params.yaml.
        epochs: task to the rows of its expert's training.
    """

    sweeps: Mapping[str, list[Row]]
    selection: Row
    test: Row
    geometry: Row
    epochs: Mapping[str, list[Row]]

    @property
    def choices(self) -> Mapping[str, Row]:
        """What was chosen of each method; a method's place in it is its colour in every figure."""
        chosen: Mapping[str, Row] = self.selection["methods"]
        return chosen


def run(io: StageIO) -> None:
    """Write `outputs/results/figures/<figure>.svg`, and `outputs/results/series/<name>.json` with the numbers.

    A figure without data (a radar of two tasks) is left out.
    """
    folder = io.out(layout.FIGURES)
    folder.mkdir()
    results = _read(io)
    for done, (name, (title, draw)) in enumerate(FIGURES.items(), start=1):
        figure = draw(results)
        if figure is not None:
            (folder / f"{name}.svg").write_bytes(to_svg(figure, title))
        io.report("figures", done, len(FIGURES))
    _write_tables(results, io.out(layout.SERIES))


def _read(io: StageIO) -> Results:
    def load(path: str) -> Any:
        return json.loads(io.dep(path).read_text())

    selection = load(layout.SELECTION)
    return Results(
        {method: load(layout.sweep(method))["candidates"] for method in selection["methods"]},
        selection,
        load(layout.TEST),
        load(layout.GEOMETRY),
        {task: load(layout.expert_training(task))["epochs"] for task in selection["tasks"]},
    )


def _write_tables(results: Results, folder: Path) -> None:
    folder.mkdir()
    write_series(folder, "scales", scale_series(results.sweeps))
    write_series(folder, "arguments", argument_series(results.sweeps))
    write_series(folder, "accuracy", accuracy_series(results.test))
    write_series(folder, "training", training_series(results.epochs))
    write_series(folder, "cosines", cosine_series(results.geometry))


def cosines(results: Results) -> Figure | None:
    """Draw the cosine matrix of the task vectors: blue above zero, orange below, deeper with the magnitude."""
    tasks, matrix = results.geometry["tasks"], results.geometry["cosine"]
    count = len(tasks)
    if count < 2:
        return None
    side = max(HALF_WIDTH, 1.6 + 0.42 * count)
    figure = new_figure(side, side)
    axes = figure.subplots()
    dress(axes, "Cosines of the task vectors")
    axes.grid(False)
    deepest = max(0.1, *(abs(matrix[a][b]) for a in range(count) for b in range(count) if a != b))
    for a in range(count):
        for b in range(count):
            value = matrix[a][b]
            colour = GRID if a == b else SERIES[0] if value >= 0 else SERIES[1]
            # Transparency, not a colour map: cells blend with a light and with a dark page, and text stays readable.
            depth = 0.6 if a == b else 0.72 * abs(value) / deepest
            axes.fill([b - 0.48, b + 0.48, b + 0.48, b - 0.48], [a - 0.48] * 2 + [a + 0.48] * 2, colour, alpha=depth)
            text = "1" if a == b else f"{value:.2f}".replace("-", "−")
            axes.text(b, a, text, ha="center", va="center", fontsize=SMALL if count <= 10 else 6.5, color=INK)
    axes.set(xlim=(-0.5, count - 0.5), ylim=(count - 0.5, -0.5), aspect="equal")
    names = [plain(task) for task in tasks]
    axes.set_xticks(range(count), labels=names, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(count), labels=names)
    axes.tick_params(length=0, labelcolor=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def radar(results: Results) -> Figure | None:
    """Draw test accuracy per task around a circle: base, experts and the best methods."""
    tasks = results.test["tasks"]
    if len(tasks) < 3:
        return None
    figure = new_figure(HALF_WIDTH, HALF_WIDTH)
    axes = figure.subplots(subplot_kw={"projection": "polar"})
    dress(axes, "Test accuracy by task, %\n", grid="both")
    angles = [2 * math.pi * index / len(tasks) for index in range(len(tasks))]
    for row in _most_telling(results):
        heights = [100 * row["accuracy"][task] for task in tasks]
        style = {**_model_style(results, row["name"]), "marker": ""}
        axes.plot([*angles, angles[0]], [*heights, heights[0]], label=plain(model_name(row["name"])), **style)
        if row["name"] == results.test["winner"]:
            axes.fill(angles, heights, color=style["color"], alpha=0.13, linewidth=0)
    axes.set_theta_offset(math.pi / 2)  # type: ignore[attr-defined]
    axes.set_theta_direction(-1)  # type: ignore[attr-defined]
    axes.set_rlabel_position(180 / len(tasks))  # type: ignore[attr-defined]
    axes.set_ylim(0, 100)
    axes.set_yticks([25, 50, 75, 100], labels=["25", "50", "75", "100"])
    axes.set_xticks(angles, labels=[plain(task_title(results.test, task), _RADAR_NAME) for task in tasks])
    axes.tick_params(axis="x", labelcolor=INK, labelsize=NORMAL)
    for label, angle in zip(axes.get_xticklabels(), angles, strict=True):  # away from the circle, however long
        side = round(math.sin(angle), 3)
        label.set_horizontalalignment("left" if side > 0 else "right" if side < 0 else "center")
    legend(figure, HALF_WIDTH, loc="outside lower center")
    return figure


def accuracy(results: Results) -> Figure:
    """Draw test accuracy per task on a line from the base to the expert, a mark per method; the mean below."""
    tasks, rows = results.test["tasks"], results.test["rows"]
    lines = [*tasks, None]  # None: the mean
    figure = new_figure(FULL_WIDTH, 1.3 + 0.36 * len(lines))
    axes = figure.subplots()
    dress(axes, "Test accuracy by task", "accuracy, %", grid="x")
    places = [*range(len(tasks)), len(tasks) + 0.35]
    ends = [[_on(row, line) for row in rows if row["name"] not in results.choices] for line in lines]
    axes.hlines(places, [min(pair) for pair in ends], [max(pair) for pair in ends], color=GRID, linewidth=5)
    for row in rows:
        style = {**_model_style(results, row["name"]), "linestyle": "", "markersize": 8}
        axes.plot([_on(row, line) for line in lines], places, label=plain(model_name(row["name"])), **style)
    axes.axhline(len(tasks) - 0.32, color=GRID, linewidth=0.8)
    axes.set_yticks(places, labels=[plain(task_title(results.test, line) if line else "mean") for line in lines])
    axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=NORMAL)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    legend(figure, FULL_WIDTH, loc="outside upper right")
    return figure


def training(results: Results) -> Figure:
    figure, (losses, scores) = panels(2, 2, 3.3)
    is_one_loss = not results.test.get("metrics")  # a task of numbers has the squared error, in no unit
    dress(losses, "Training loss", "epoch", "cross-entropy, nats" if is_one_loss else "loss")
    dress(scores, "Validation accuracy", "epoch", "accuracy, %" if is_one_loss else "accuracy or the task's metric, %")
    for index, (task, rows) in enumerate(results.epochs.items()):
        style = {**series_style(index), "markersize": 4}
        epochs = range(1, len(rows) + 1)  # through all rounds of an iterative run, each of which counts from 1
        losses.plot(epochs, [row["loss"] for row in rows], label=plain(task_title(results.test, task)), **style)
        scores.plot(epochs, [100 * row["validation_accuracy"] for row in rows], **style)
    for panel in (losses, scores):
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    losses.set_ylim(bottom=0)
    legend(figure, 1, loc="outside right center")
    return figure


FIGURES: dict[str, tuple[str, Callable[[Results], Figure | None]]] = {
    "accuracy": ("Test accuracy by task", accuracy),
    "radar": ("Test accuracy by task, around a circle", radar),
    "cosines": ("Cosines of the task vectors", cosines),
    "scale_curves": (
        "Validation accuracy over the scale",
        lambda results: scale_curves(results.sweeps, results.choices),
    ),
    "argument_curves": (
        "Validation accuracy over the other arguments",
        lambda results: argument_curves(results.sweeps, results.choices),
    ),
    "training": ("Training of the experts", training),
}


def _most_telling(results: Results) -> list[Row]:
    rows = results.test["rows"]
    methods = [row for row in rows if row["name"] in results.choices]
    best = sorted(methods, key=lambda row: -row["normalised"])[:_RADAR_METHODS]
    return [row for row in rows if row not in methods or row in best]


def _model_style(results: Results, name: str) -> dict[str, Any]:
    if name in results.choices:
        return series_style(list(results.choices).index(name))
    colour, marker, line = (INK, ">", "--") if name == "individual" else (MUTED, "<", ":")
    return {**series_style(0), "color": colour, "marker": marker, "linestyle": line}


def _on(row: Row, task: str | None) -> float:
    return 100 * (row["mean"] if task is None else row["accuracy"][task])
