"""Figures of error landscapes: contours of each task's error on a plane of the weights, one row per N."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap
from matplotlib.figure import Figure

from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, new_figure
from tasks.plotting.labels import place_labels
from tasks.plotting.palette import INK, MUTED, SURFACE

LEVELS = (0, 5, 10, 20, 30, 40, 50, 60, 80, 100)  # error in %
_COLOURS = LinearSegmentedColormap.from_list("error", ["#3f97cc", "#b9d9ec", SURFACE])
_LABELS = {"base": "θ0", "mean": "mean"}


def landscape_figure(rows: Sequence[Row]) -> Figure:
    """Draw one row of panels per plane: each task's error, and the mean of both.

    Args:
        rows: per plane `rounds`, `pair`, `xs`, `ys`, `errors` (task → [len(ys), len(xs)], in 0..1), `places`
            (base, the tasks' experts and mean → (x, y)) and `angle` in degrees.
    """
    heights = [3.1 * max((row["ys"][-1] - row["ys"][0]) / (row["xs"][-1] - row["xs"][0]), 0.35) for row in rows]
    figure = new_figure(FULL_WIDTH, sum(heights) + 0.9 * len(rows))
    grid = figure.subplots(len(rows), 3, squeeze=False, height_ratios=heights)
    for axes, row in zip(grid, rows, strict=True):
        errors = {task: 100 * np.array(row["errors"][task]) for task in row["pair"]}
        errors["mean of both"] = (errors[row["pair"][0]] + errors[row["pair"][1]]) / 2
        for panel, (name, values) in zip(axes, errors.items(), strict=True):
            first = panel is axes[0]
            dress(
                panel,
                f"N = {row['rounds']}, {row['angle']:.2g}°: {name}",
                "x along u",
                "y along v" if first else "",
                grid="both",
            )
            contours(panel, np.array(row["xs"]), np.array(row["ys"]), values)
            _models(panel, row)
    figure.draw_without_rendering()  # labels are placed on panels of their final size
    for axes, row in zip(grid, rows, strict=True):
        labels = {_LABELS.get(name, f"θ {name}"): place for name, place in row["places"].items()}
        ends = [np.array(row["places"][task]) for task in row["pair"]]
        arrows = [(float(x), float(y)) for end in ends for x, y in np.linspace(0, 1, 40)[:, None] * end]
        for panel in axes:
            place_labels(panel, labels, arrows)
    return figure


def contours(panel: Axes, xs: np.ndarray, ys: np.ndarray, values: np.ndarray) -> None:
    """Fill a panel with the contours of an error in %, its lines labelled, low errors dark.

    Args:
        panel: where the contours are drawn.
        xs, ys: the grid's coordinates, [n] and [m].
        values: errors in %, [m, n].
    """
    panel.contourf(xs, ys, values, levels=LEVELS, cmap=_COLOURS, norm=BoundaryNorm(LEVELS, _COLOURS.N))
    lines = panel.contour(xs, ys, values, levels=LEVELS[1:], colors=MUTED, linewidths=0.6)
    panel.clabel(lines, fmt="%d %%", fontsize=SMALL - 1, colors=INK)
    panel.set_aspect("equal")
    panel.grid(False)


def _models(panel: Axes, row: Row) -> None:
    """Draw the task vectors as arrows, the arc between them, and the models as points."""
    places = row["places"]
    first, second = row["pair"]
    for task in (first, second):
        panel.annotate(
            "",
            places[task],
            places["base"],
            arrowprops={"arrowstyle": "-|>", "color": MUTED, "linewidth": 1.6, "shrinkA": 0, "shrinkB": 3},
        )
    for place in places.values():
        panel.plot(*place, "o", color=INK, markersize=5.5, markeredgecolor=SURFACE, markeredgewidth=0.9)
    radius = 0.28 * float(np.hypot(*places[first]))
    turn = np.radians(np.linspace(0, row["angle"], 30))
    panel.plot(radius * np.cos(turn), radius * np.sin(turn), color=INK, linewidth=1.0)
