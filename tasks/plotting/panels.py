"""What the studies' panels share: heat maps, means over seeds with intervals, labels that cover nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.patheffects import withStroke

from mergeflow.evaluation.averages import mean_interval
from tasks.plotting.drawing import NORMAL, SMALL, plain, series_style
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
    """Put the scale of colours next to the panels that share it."""
    bar = drawn.figure.colorbar(drawn, ax=list(axes))
    bar.set_label(label, fontsize=NORMAL, color=MUTED)
    bar.ax.tick_params(labelsize=SMALL, labelcolor=MUTED)


def numbered(axes: Axes, names: Sequence[str], values: Sequence[Sequence[float]], low: float, high: float) -> None:
    """Draw a square matrix with its first row on top and the number in each cell.

    Args:
        values: [len(names)][len(names)].
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


Samples = Mapping[Any, Sequence[float]]  # x → one value per seed


def curve(axes: Axes, samples: Samples, label: str, number: int, **style: Any) -> None:
    """Draw the mean of each x's samples as series `number`, with an error bar where an x has two or more."""
    xs = sorted(samples)
    centres, halves = zip(*(mean_interval(samples[x]) for x in xs), strict=True)
    bars = [half if np.isfinite(half) else 0.0 for half in halves]
    drawn = series_style(number) | style
    axes.errorbar(xs, centres, yerr=bars, label=plain(label), capsize=2.5, elinewidth=1.0, **drawn)


def round_axis(axes: Axes, rounds: Sequence[int]) -> None:
    """Make x a logarithmic axis of numbers of rounds, marked where something was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks([], minor=True)
    shown = [number for number in rounds if number + 4 not in rounds or number < 16]  # 16 and 20 would touch
    axes.set_xticks(shown, labels=[str(number) for number in shown])


Point = tuple[float, float]
_PATCH = {"boxstyle": "square,pad=0.1", "facecolor": SURFACE, "edgecolor": "none", "alpha": 0.6}
_SIDES = [np.array((np.cos(a), np.sin(a))) for a in np.radians(range(0, 360, 30))]
_REACHES = (8.0, 18.0, 30.0, 45.0, 62.0)  # points


def place_labels(panel: Axes, labels: Mapping[str, Point], clear: Iterable[Point] = ()) -> None:
    """Write labels next to their points, each where it covers no other label and no point; far ones get a line."""
    to_points = panel.transData.transform
    scale = 72 / panel.figure.dpi
    anchors = {text: np.array(to_points(place)) * scale for text, place in labels.items()}
    inside = np.array(panel.get_window_extent().extents) * scale
    obstacles = [np.array(to_points(place)) * scale for place in clear]
    taken = [np.concatenate((place - 4, place + 4)) for place in (*anchors.values(), *obstacles)]
    for text, anchor in anchors.items():
        size = np.array((0.56 * SMALL * len(text), 1.15 * SMALL))
        shifts = [side * (reach + size / 2) for reach in _REACHES for side in _SIDES]
        boxes = [np.concatenate((anchor + shift - size / 2, anchor + shift + size / 2)) for shift in shifts]
        outside = [float(np.prod(size)) - _covered(box, inside) for box in boxes]
        hidden = [sum(_covered(box, other) for other in taken) for box in boxes]
        best = int(np.argmin(np.add(hidden, outside) + 0.02 * np.arange(len(boxes))))  # the nearest of the free places
        taken.append(boxes[best])
        panel.annotate(
            plain(text),
            labels[text],
            xytext=tuple(shifts[best]),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=SMALL,
            color=INK,
            bbox=_PATCH,
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )


def _covered(box: np.ndarray, other: np.ndarray) -> float:
    """Return the area that two boxes share, in square points."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    return float(max(width, 0.0) * max(height, 0.0))
