"""Figures of the study `projection`: models on two principal components, and the cosines of the whole space."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, new_figure, panels, plain, series_style
from tasks.plotting.palette import GRID, INK, LIGHT, MUTED, SURFACE

Point = tuple[float, float]
_HALO = [patheffects.withStroke(linewidth=2.0, foreground=SURFACE)]
_SIDES = [np.array((np.cos(a), np.sin(a))) for a in np.radians(range(0, 360, 30))]
_COSINES = LinearSegmentedColormap.from_list("cosine", [SURFACE, "#b9d9ec", LIGHT["series-1"]])


def plane_figure(row: Mapping[str, Any]) -> Figure:
    """Draw one seed's models on each of its planes.

    Args:
        row: `planes` (title → `coordinates` by name, `explained`, `off`), and the names of the `experts`, `merges`,
            `paths` (run → rounds in order) and `joint`.
    """
    figure, axes = panels(len(row["planes"]), 1, 5.6)
    figure.set_size_inches(FULL_WIDTH, 5.6 * len(axes))
    for panel, (title, plane) in zip(axes, row["planes"].items(), strict=True):
        first, second = (f"component {i + 1} ({100 * share:.0f} %)" for i, share in enumerate(plane["explained"]))
        dress(panel, f"Fitted to {title}" if title == "all models" else f"Fitted {title}", first, second, grid="both")
        _models(panel, row, plane)
    figure.draw_without_rendering()  # so that the panels have their size
    for panel, plane in zip(axes, row["planes"].values(), strict=True):
        place_labels(panel, _labels(row, plane))
    return figure


def _models(panel: Axes, row: Mapping[str, Any], plane: Mapping[str, Any]) -> None:
    places = plane["coordinates"]

    def scatter(names: Sequence[str], **style: Any) -> None:
        xs, ys = zip(*(places[name] for name in names), strict=True)
        panel.plot(xs, ys, **{"linestyle": "", "markeredgecolor": SURFACE, "markeredgewidth": 0.7, **style})

    scatter(row["experts"], color=GRID, marker="o", markersize=6)
    for number, names in enumerate(row["paths"].values()):
        scatter(["base", *names], **{**series_style(1 + number), "markersize": 3.5})
        scatter(names[-1:], **{**series_style(1 + number), "markersize": 9, "marker": "*"})
    scatter([name for name in row["merges"] if name not in plane["off"]], **{**series_style(0), "linestyle": ""})
    if plane["off"]:
        scatter(
            list(plane["off"]),
            **{**series_style(0), "linestyle": "", "markerfacecolor": SURFACE, "markeredgecolor": LIGHT["series-1"]},
        )
    scatter([row["joint"]], color=LIGHT["series-4"], marker="D", markersize=7)
    scatter(["base"], color=INK, marker="o", markersize=8)
    panel.set_aspect("equal", adjustable="datalim")
    panel.margins(0.08)


def _labels(row: Mapping[str, Any], plane: Mapping[str, Any]) -> dict[str, Point]:
    places = plane["coordinates"]
    found: dict[str, Point] = {"θ0": places["base"], "joint training": places[row["joint"]]}
    found |= {f"{run}, end": places[names[-1]] for run, names in row["paths"].items()}
    found |= {
        f"{name} ({plane['off'][name]:.1f} off)" if name in plane["off"] else name: places[name]
        for name in row["merges"]
    }
    middle = np.mean([places[name] for name in row["experts"]], axis=0)
    nearest = min(row["experts"], key=lambda name: float(np.hypot(*np.subtract(places[name], middle))))
    return {**found, "experts": places[nearest]}


def place_labels(panel: Axes, labels: Mapping[str, Point]) -> None:
    """Write labels beside their points, each where it covers no other label and no point; far ones get a line.

    The panel must have its final limits and size.
    """
    to_points = panel.transData.transform
    scale = 72 / panel.figure.dpi
    anchors = {text: np.array(to_points(place)) * scale for text, place in labels.items()}
    taken = [np.concatenate((anchor - 4, anchor + 4)) for anchor in anchors.values()]
    for text, anchor in anchors.items():
        size = np.array((0.56 * SMALL * len(text), 1.15 * SMALL))
        shifts = [side * (reach + size / 2) for reach in (8.0, 18.0, 30.0, 45.0, 62.0) for side in _SIDES]
        boxes = [np.concatenate((anchor + shift - size / 2, anchor + shift + size / 2)) for shift in shifts]
        cost = [sum(_covered(box, other) for other in taken) + 0.02 * index for index, box in enumerate(boxes)]
        best = int(np.argmin(cost))
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
            path_effects=_HALO,
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )


def _covered(box: np.ndarray, other: np.ndarray) -> float:
    """Return the area that two boxes share, in square points."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    return float(max(width, 0.0) * max(height, 0.0))


def cosine_figure(cosines: np.ndarray, names: Sequence[str]) -> Figure:
    """Draw a matrix of cosines as a map with its numbers, models that point the same way beside each other.

    Args:
        cosines: [n, n], symmetric.
        names: of the n models.
    """
    away = squareform((1 - (cosines + cosines.T) / 2).clip(min=0) * (1 - np.eye(len(names))), checks=False)
    order = leaves_list(linkage(away, "average", optimal_ordering=True))
    shown = cosines[np.ix_(order, order)]
    figure = new_figure(FULL_WIDTH, 0.4 * len(names) + 1.6)
    panel = figure.subplots()
    dress(panel, "Cosine of θ − θ0, whole space, mean over seeds", grid="both")
    panel.imshow(shown, cmap=_COSINES, vmin=0, vmax=1, aspect="auto")
    panel.grid(False)
    labels = [plain(names[index]) for index in order]
    panel.set_xticks(range(len(names)), labels=labels, rotation=45, ha="right")
    panel.set_yticks(range(len(names)), labels=labels)
    for row, values in enumerate(shown):
        for column, value in enumerate(values):
            colour = SURFACE if value > 0.75 else INK
            text = f"{value:.2f}".replace("0.", ".").replace("1.00", "1")
            panel.text(column, row, text, ha="center", va="center", fontsize=SMALL - 1.5, color=colour)
    return figure
