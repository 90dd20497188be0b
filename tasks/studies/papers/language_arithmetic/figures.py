"""Figures of the study `language_arithmetic`, from its rows alone."""

from collections.abc import Sequence
from statistics import fmean
from textwrap import fill

import numpy as np
from matplotlib.figure import Figure

from mergeflow.evaluation.averages import mean_interval
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, new_figure, panels, plain, series_style
from tasks.plotting.intervals import curve
from tasks.studies.papers.analogy.results import ANALOGY, NEAREST, SUM, TRAINED, scores
from tasks.studies.papers.language_arithmetic.measuring import BASE
from tasks.studies.papers.language_arithmetic.results import BEST, TREATING, analogies, domains, means
from tasks.studies.pieces import Row

_BESIDE = 0.13  # between the marks of a target


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw each target by the ways that compete, and the mean over domains of every model.

    Args:
        rows: of all seeds.
    """
    return {"targets": _targets(analogies(rows)), "domains": _domains(domains(rows))}


def _targets(rows: Sequence[Row]) -> Figure:
    names = list(dict.fromkeys(row["attributes"] for row in rows))
    figure, axes = panels(len(names), 2, 3.4)
    for panel, name in zip(axes, names, strict=True):
        targets = list(dict.fromkeys(row["target"] for row in rows if row["attributes"] == name))
        dress(panel, name, "", "log-likelihood per token, nats" if panel is axes[0] else "")
        for number, way in enumerate((BASE, NEAREST, SUM, ANALOGY, TRAINED)):
            label = way if panel is axes[0] else "_again"
            found = {
                place + _BESIDE * (number - 2): scores(rows, name, way, target) for place, target in enumerate(targets)
            }
            curve(panel, found, label, number, linestyle="")
        panel.set_xticks(range(len(targets)), labels=[fill(target, 12) for target in targets])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _domains(rows: Sequence[Row]) -> Figure:
    models = [model for model in dict.fromkeys(row["model"] for row in rows) if model not in (BEST, TREATING)]
    models.sort(key=lambda model: fmean(means(rows, model)))
    figure = new_figure(0.75 * FULL_WIDTH, 1.2 + 0.24 * len(models))
    panel = figure.subplots()
    dress(panel, "Mean over three domains", "log-likelihood per token, nats", grid="x")
    centres, halves = zip(*(mean_interval(means(rows, model)) for model in models), strict=True)
    bars = [half if np.isfinite(half) else 0.0 for half in halves]
    panel.errorbar(centres, range(len(models)), xerr=bars, capsize=2.5, **{**series_style(0), "linestyle": ""})
    panel.set_yticks(range(len(models)), labels=[plain(model.replace("_", " ")) for model in models])
    return figure
