"""Figures of the study `language_arithmetic`, from its rows alone."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from mergeflow.evaluation.averages import mean_interval
from studies.old.papers.analogy.results import draw_targets
from studies.old.papers.language_arithmetic.results import BEST, TREATING, analogies, domains, means
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, dress, new_figure, plain, series_style


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw each target by the ways that compete, and the mean over domains of every model.

    Args:
        rows: of all seeds.
    """
    targets = draw_targets(analogies(rows), "log-likelihood per token, nats", height=3.4, wrap=12, sharey=False)
    return {"targets": targets, "domains": _domains(domains(rows))}


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
