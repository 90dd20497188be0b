"""Figure of the study `glue`: the mean figure of every model, with its heads fixed and fitted to it."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from mergeflow.evaluation.averages import mean_interval
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, new_figure, plain, series_style


def heads_figure(fixed: Mapping[str, Sequence[float]], probed: Mapping[str, Sequence[float]]) -> Figure:
    """Draw a line of dots for each model: the mean over tasks with its interval over seeds.

    Args:
        fixed: model → mean figure in %, one value per seed, with the heads of the experts.
        probed: the same with heads fitted to the model, for some of them.
    """
    figure = new_figure(0.75 * FULL_WIDTH, 1.4 + 0.3 * len(fixed))
    panel = figure.subplots()
    dress(panel, "Mean over eight tasks", "test figure, %", grid="x")
    places = {name: -place for place, name in enumerate(fixed)}
    for number, (label, values) in enumerate({"heads fixed": fixed, "heads probed": probed}.items()):
        centres, halves = zip(*(mean_interval(own) for own in values.values()), strict=True) if values else ((), ())
        style = {**series_style(number), "linestyle": ""}
        bars = [half if np.isfinite(half) else 0.0 for half in halves]
        panel.errorbar(centres, [places[name] for name in values], xerr=bars, label=label, capsize=2.5, **style)
    panel.set_yticks(list(places.values()), labels=[plain(name) for name in places])
    legend(figure, 7.0, loc="outside lower center")
    return figure
