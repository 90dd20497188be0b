"""Figures of the study `projection`: models on two principal components, and the cosines of the whole space."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from scipy.cluster.hierarchy import leaves_list, linkage
from scipy.spatial.distance import squareform

from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, new_figure, panels, plain, series_style
from tasks.plotting.labels import place_labels
from tasks.plotting.palette import GRID, INK, LIGHT, SERIES, SURFACE

Point = tuple[float, float]
_COSINES = LinearSegmentedColormap.from_list("cosine", [SURFACE, "#b9d9ec", LIGHT["series-1"]])


@dataclass(frozen=True)
class Plane:
    """Models on two principal components.

    Attributes:
        title: what it was fitted to.
        places: name → (x, y).
        off: of models that it was not fitted to, name → distance off the plane.
        explained: share of the fitted models' variance along each component.
    """

    title: str
    places: Mapping[str, Point]
    off: Mapping[str, float]
    explained: Sequence[float]


def plane_figure(row: Mapping[str, Any], planes: Sequence[Plane]) -> Figure:
    """Draw one seed's models on several planes.

    Args:
        row: the names of the `experts`, `merges`, `paths` (run → rounds in order) and of the `joint` model.
        planes: at least one; merges that are not on a plane are left out.
    """
    figure, axes = panels(len(planes), 1, 4.2)
    figure.set_size_inches(FULL_WIDTH, 4.2 * len(axes))
    for panel, plane in zip(axes, planes, strict=True):
        first, second = (f"component {i + 1} ({100 * share:.0f} %)" for i, share in enumerate(plane.explained))
        dress(panel, f"Fit: {plane.title}", first, second, grid="both")
        _models(panel, row, plane)
    figure.draw_without_rendering()  # labels are placed on panels of their final size
    for panel, plane in zip(axes, planes, strict=True):
        place_labels(panel, _labels(row, plane), plane.places.values())
    return figure


def _models(panel: Axes, row: Mapping[str, Any], plane: Plane) -> None:
    def scatter(names: Sequence[str], **style: Any) -> None:
        xs, ys = zip(*(plane.places[name] for name in names), strict=True)
        panel.plot(xs, ys, **{"linestyle": "", "markeredgecolor": SURFACE, "markeredgewidth": 0.7, **style})

    scatter(row["experts"], color=GRID, marker="o", markersize=6)
    for number, names in enumerate(row["paths"].values(), start=1):
        scatter(["base", *names], **series_style(number) | {"markersize": 3.5, "linewidth": 1.0})
        scatter(names[-1:], **series_style(number) | {"markersize": 9, "marker": "*"})
    blue = series_style(0) | {"linestyle": ""}
    for name in _shown(row, plane):
        hollow = {"markerfacecolor": SURFACE, "markeredgecolor": SERIES[0]} if name in plane.off else {}
        scatter([name], **blue | hollow)
    scatter([row["joint"]], color=SERIES[3], marker="D", markersize=7)
    scatter(["base"], color=INK, marker="o", markersize=8)
    panel.margins(0.1)


def _shown(row: Mapping[str, Any], plane: Plane) -> list[str]:
    return [name for name in row["merges"] if name in plane.places]


def _labels(row: Mapping[str, Any], plane: Plane) -> dict[str, Point]:
    places = plane.places
    found = {"θ0": places["base"], "joint training": places[row["joint"]]}
    found |= {f"{run}, end": places[names[-1]] for run, names in row["paths"].items()}
    for name in _shown(row, plane):
        found[f"{name} ({plane.off[name]:.1f} off)" if name in plane.off else name] = places[name]
    middle = np.mean([places[name] for name in row["experts"]], axis=0)
    nearest = min(row["experts"], key=lambda name: float(np.hypot(*np.subtract(places[name], middle))))
    return {**found, "experts": places[nearest]}


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
    dress(panel, "Cosine of θ − θ0, whole space", grid="both")
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
