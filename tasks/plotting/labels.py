"""Labels that are written beside their points, where they cover nothing."""

from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib.axes import Axes

from tasks.plotting.drawing import SMALL, plain
from tasks.plotting.palette import INK, MUTED, SURFACE

Point = tuple[float, float]
_PATCH = {"boxstyle": "square,pad=0.1", "facecolor": SURFACE, "edgecolor": "none", "alpha": 0.6}
_SIDES = [np.array((np.cos(a), np.sin(a))) for a in np.radians(range(0, 360, 30))]
_REACHES = (8.0, 18.0, 30.0, 45.0, 62.0)  # points


def place_labels(panel: Axes, labels: Mapping[str, Point], clear: Iterable[Point] = ()) -> None:
    """Write labels beside their points, each where it covers no other label and no point; far ones get a line."""
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
