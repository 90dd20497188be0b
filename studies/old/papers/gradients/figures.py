"""Figure of the study `gradients`: shares and cosines over the epochs."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.intervals import curve
from tasks.plotting.palette import MUTED


def gradient_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw each epoch's share of the gradient norms and its cosine with the first, tasks and seeds averaged.

    Args:
        rows: with `run`, `kind`, `task`, `share` and `cosine`, the last two a value per epoch.
    """
    figure, axes = panels(2, 2, 3.7)
    titles = {"share": "Share of the gradient norms", "cosine": "Cosine with the first epoch's"}
    kinds = list(dict.fromkeys((row["run"], row["kind"]) for row in rows))
    for panel, (what, title) in zip(axes, titles.items(), strict=True):
        dress(panel, title, "epoch", what)
        for number, kind in enumerate(kinds):
            own = [row[what] for row in rows if (row["run"], row["kind"]) == kind]
            samples = {epoch: [fmean(values)] for epoch, values in enumerate(zip(*own, strict=True), start=1)}
            curve(panel, samples, ", ".join(dict.fromkeys(kind)) if what == "share" else "_hidden", number)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylim(bottom=0)
    axes[1].axhline(0, color=MUTED, linewidth=0.7)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
