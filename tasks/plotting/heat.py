"""Heat maps with lines over them that can be seen on dark and on light cells; shared by the studies' figures."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.patheffects import withStroke

from tasks.plotting.drawing import NORMAL, SMALL
from tasks.plotting.palette import INK, MUTED, SURFACE

Points = Sequence[float] | np.ndarray
OUTLINED: Any = [withStroke(linewidth=3.0, foreground=INK)]


def heat_map(axes: Axes, xs: Sequence[float], ys: Sequence[float], values: Any, **limits: Any) -> QuadMesh:
    """Draw a value for each pair of x and y, dark where it is small.

    Args:
        xs, ys: rising; a cell reaches halfway to the next one.
        values: [len(ys)][len(xs)].
    """
    axes.grid(False)
    seamless: Any = {"shading": "nearest", "edgecolor": "face", "linewidth": 0.4}
    drawn: QuadMesh = axes.pcolormesh(xs, ys, np.asarray(values), cmap="cividis", **seamless, **limits)
    drawn.set_rasterized(False)
    return drawn


def over(axes: Axes, xs: Points, ys: Points, label: str, **style: Any) -> None:
    """Draw a line or marks over a heat map, white with a dark edge."""
    limits = axes.get_xlim(), axes.get_ylim()
    axes.plot(xs, ys, label=label, path_effects=OUTLINED, **{"color": SURFACE, "linewidth": 1.5, **style})
    axes.set(xlim=limits[0], ylim=limits[1])


def colour_bar(axes: Sequence[Axes], drawn: QuadMesh, label: str) -> None:
    """Put the scale of colours beside the panels that share it."""
    bar = drawn.figure.colorbar(drawn, ax=list(axes))
    bar.set_label(label, fontsize=NORMAL, color=MUTED)
    bar.ax.tick_params(labelsize=SMALL, labelcolor=MUTED)


def numbered(axes: Axes, names: Sequence[str], values: Sequence[Sequence[float]], low: float, high: float) -> None:
    """Draw a square matrix with its first row on top and the number in each cell.

    Args:
        values: [len(names)][len(names)].
        low, high: of the colours; numbers have two digits behind the point where they go to 1.
    """
    at = range(len(names))
    heat_map(axes, at, at, values, vmin=low, vmax=high)
    axes.set_xticks(at, labels=names)
    axes.set_yticks(at, labels=names)
    axes.invert_yaxis()
    for row in at:
        for column in at:
            value = values[row][column]
            ink = INK if value > (low + high) / 2 else SURFACE
            text = f"{value:.2f}" if high == 1 else f"{value:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=SMALL, color=ink)
