"""Figures of the study `rank_curve`: accuracy over the rank ratio, centred and original."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mergeflow.evaluation.averages import mean, mean_interval
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, plain, series_style
from tasks.plotting.palette import MUTED

Samples = Mapping[float, Sequence[float]]
_RULES = {"once": "λ chosen once", "per rank": "λ chosen per rank"}
_TICKS = (0, 0.04, 0.08, 0.16, 0.32, 0.64, 1)


def mean_figure(rows: Sequence[Row]) -> Figure:
    """Draw mean test accuracy over the ratio with the 95 % band over seeds, a panel per rule (the paper's Figure 1).

    Args:
        rows: per seed `curves` (kind → rule → points of `ratio` and `test`), `average`, `experts`.
    """
    figure, axes = panels(2, 2, 3.9, sharey=True)
    for index, (panel, (rule, title)) in enumerate(zip(axes, _RULES.items(), strict=True)):
        dress(panel, f"{rows[0]['tasks']} tasks, {title}", "rank ratio k / r", "" if index else "mean test accuracy, %")
        for number, kind in enumerate(("centred", "original")):
            samples: dict[float, list[float]] = {}
            for row in rows:
                for point in row["curves"][kind][rule]:
                    samples.setdefault(point["ratio"], []).append(100 * mean(point["test"]))
            band(panel, samples, f"{kind} task vectors" if not index else f"_{kind}", number)
        levels = {
            "average": [100 * mean(row["average"]) for row in rows],
            "task arithmetic": [100 * mean(row["curves"]["original"]["once"][-1]["test"]) for row in rows],
            "experts": [100 * mean(row["experts"]) for row in rows],
        }
        _levels(panel, levels, hidden=bool(index))
        ratio_axis(panel)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def task_figure(rows: Sequence[Row]) -> Figure:
    """Draw every task's test accuracy over the ratio, λ chosen once (the paper's Figure 6)."""
    tasks = list(rows[0]["experts"])
    figure, axes = panels(len(tasks), 4, 2.5)
    for index, (panel, task) in enumerate(zip(axes, tasks, strict=True)):
        last = index >= len(tasks) - 4
        dress(panel, plain(task), "k / r" if last else "", "accuracy, %" if index % 4 == 0 else "")
        for number, kind in enumerate(("centred", "original")):
            samples: dict[float, list[float]] = {}
            for row in rows:
                for point in row["curves"][kind]["once"]:
                    samples.setdefault(point["ratio"], []).append(100 * point["test"][task])
            means = {ratio: [sum(values) / len(values)] for ratio, values in samples.items()}
            band(panel, means, f"{kind} task vectors" if not index else f"_{kind}", number, markersize=3.5)
        levels = {
            "average": [100 * row["average"][task] for row in rows],
            "expert": [100 * row["experts"][task] for row in rows],
        }
        _levels(panel, levels, hidden=bool(index))
        ratio_axis(panel, (0, 0.08, 0.32, 1))
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def band(panel: Axes, samples: Samples, label: str, number: int, **style: Any) -> None:
    """Draw the mean over x as series `number`, with its 95 % interval as a band where an x has two samples or more.

    Args:
        panel: where it is drawn.
        samples: the values at each x.
        label: of the series.
        number: of the series, which decides its colour.
        style: changes of the line.
    """
    xs = sorted(samples)
    centres, halves = zip(*(mean_interval(samples[x]) for x in xs), strict=True)
    drawn = series_style(number) | style
    panel.plot(xs, centres, label=plain(label), **drawn)
    middle, reach = np.array(centres), np.array(halves)
    if np.isfinite(reach).all():
        panel.fill_between(xs, middle - reach, middle + reach, color=drawn["color"], alpha=0.15, linewidth=0)


def ratio_axis(panel: Axes, ticks: Sequence[float] = _TICKS) -> None:
    """Make x the square root of the ratio: small ratios, where the curves bend, get half of the room."""
    panel.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    panel.set_xticks([], minor=True)
    panel.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    panel.set_xlim(0, 1.02)


def _levels(panel: Axes, levels: Mapping[str, Sequence[float]], hidden: bool) -> None:
    """Draw the means of some models as horizontal lines."""
    for (name, values), line in zip(levels.items(), ((0, (4, 3)), (0, (1, 2)), "-."), strict=False):
        label = f"_{name}" if hidden else name
        panel.axhline(sum(values) / len(values), color=MUTED, linestyle=line, linewidth=1.1, label=label)
