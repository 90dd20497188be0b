"""Figures of the study `many_tasks`: a radar for each number of tasks, and normalised accuracy over that number."""

import math
from collections.abc import Mapping

from matplotlib.figure import Figure

from tasks.plotting.drawing import FULL_WIDTH, NORMAL, SMALL, dress, legend, new_figure, plain, series_style
from tasks.plotting.intervals import Samples, curve
from tasks.plotting.palette import INK


def radar_figure(counts: Mapping[int, Mapping[str, Mapping[str, float]]]) -> Figure:
    """Draw normalised accuracy per task around a circle, a panel for each number of tasks.

    Args:
        counts: number of tasks → model → task → normalised accuracy in %; the circles begin at 40.
    """
    figure = new_figure(FULL_WIDTH, 4.6)
    axes = figure.subplots(1, len(counts), subplot_kw={"projection": "polar"}, squeeze=False)[0]
    for panel, (count, models) in zip(axes, counts.items(), strict=True):
        dress(panel, f"{count} tasks\n", grid="both")
        tasks = list(next(iter(models.values())))
        angles = [2 * math.pi * index / len(tasks) for index in range(len(tasks))]
        for number, (name, values) in enumerate(models.items()):
            heights = [values[task] for task in tasks]
            style = {**series_style(number), "marker": ""}
            panel.plot([*angles, angles[0]], [*heights, heights[0]], label=plain(name), **style)
        panel.set_theta_offset(math.pi / 2)
        panel.set_theta_direction(-1)
        panel.set_rlabel_position(180 / len(tasks))
        panel.set_ylim(40, 103)  # what matters lies above zero-shot
        panel.set_yticks([50, 75, 100], labels=["50", "75", "100"])
        panel.set_xticks(angles, labels=[plain(task) for task in tasks])
        panel.tick_params(axis="x", labelcolor=INK, labelsize=NORMAL if len(tasks) < 10 else SMALL - 1)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=SMALL, frameon=False)
    return figure


def loss_figure(curves: Mapping[str, Samples]) -> Figure:
    """Draw normalised accuracy over the number of tasks, a line per model with its interval over seeds."""
    figure = new_figure(0.75 * FULL_WIDTH, 5.6)
    panel = figure.subplots()
    dress(panel, "Accuracy and number of tasks", "tasks", "normalised test accuracy, %", grid="both")
    for number, (name, samples) in enumerate(curves.items()):
        curve(panel, samples, name, number)
    panel.set_xticks(sorted(set().union(*curves.values())))
    legend(figure, 7.0, loc="outside lower center")
    return figure
