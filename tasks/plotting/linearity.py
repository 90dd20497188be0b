"""Draw features of combined weights against combined features: 1 − cos with its baseline by layer, coef as violins."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mergeflow.linearity.affine import Linearity
from mergeflow.linearity.layers import short_names
from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, legend, panels, plain, series_style
from tasks.plotting.palette import INK, MUTED, SERIES


def linearity_figure(measured: Mapping[str, Mapping[str, Linearity]]) -> Figure:
    """Draw mean 1 − cos with quartile bars beside the baseline's, and coef's distribution, by layer.

    Args:
        measured: Name of a series → layer → values of its samples; all with the same layers.
    """
    layers = list(next(iter(measured.values())))
    figure, (distance, coef) = panels(2, 2, 3.8)
    dress(distance, "Direction", "layer", "1 − cos")
    dress(coef, "Length", "layer", "coef")
    width = 0.8 / len(measured)
    for number, (name, values) in enumerate(measured.items()):
        places = np.arange(len(layers)) + (number - (len(measured) - 1) / 2) * width
        means = [float(values[layer].distance.mean()) for layer in layers]
        low, high = np.array([np.quantile(values[layer].distance, [0.25, 0.75]) for layer in layers]).T
        # With a few large values the mean lies outside the quartiles; a bar has no negative length.
        bars = np.maximum([np.array(means) - low, high - np.array(means)], 0)
        style = series_style(number) | {"linestyle": ""}
        distance.errorbar(places, means, yerr=bars, label=plain(name), capsize=2.5, elinewidth=1.0, **style)
        base = [float(values[layer].base.mean()) for layer in layers]
        hollow = style | {"markerfacecolor": "none", "markeredgecolor": style["color"], "markeredgewidth": 1.2}
        distance.plot(places, base, **hollow)
        drawn = coef.violinplot([values[layer].coef for layer in layers], places, widths=width, showmedians=True)
        for body in drawn["bodies"]:  # type: ignore[attr-defined]
            body.set_facecolor(SERIES[number % len(SERIES)])
        for part in ("cmedians", "cbars", "cmins", "cmaxes"):
            drawn[part].set(color=SERIES[number % len(SERIES)], linewidth=0.8)
    finish_layers(figure, distance, coef, layers)
    return figure


def finish_layers(figure: Figure, distance: Axes, coef: Axes, layers: Sequence[str]) -> None:
    """Name the layers on both panels, mark a coef of 1, and draw the legend."""
    coef.axhline(1, color=INK, linewidth=0.8, linestyle="--")
    names = short_names(layers)
    slant = 40 if sum(map(len, names)) > 40 else 0  # else they run into each other
    for panel in (distance, coef):
        panel.set_xticks(range(len(layers)), labels=names, fontsize=SMALL, rotation=slant)
    distance.plot([], [], "o", color=MUTED, markerfacecolor="none", label="hollow: the baseline")
    legend(figure, FULL_WIDTH, loc="outside lower center")
