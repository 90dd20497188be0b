"""Figures of the study `cart_landscape`: contours of losses on planes of the weights, and the paths through them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, legend, panels
from tasks.plotting.intervals import Samples, curve
from tasks.plotting.palette import INK, MUTED, SERIES, SURFACE

Point = tuple[float, float]
_COLOURS = LinearSegmentedColormap.from_list("loss", ["#3f97cc", "#b9d9ec", SURFACE])
_MARKS: dict[str, dict[str, Any]] = {
    "base": {"marker": "^", "label": "θ0"},
    "average": {"marker": "o", "label": "θ_avg"},
    "expert": {"marker": "*", "markersize": 13, "label": "θ_t"},
    "cart": {"marker": "*", "markersize": 13, "color": SERIES[0], "label": "CART, 8 %, λ = 1"},
    "task_arithmetic": {"marker": "s", "label": "task arithmetic"},
}


@dataclass(frozen=True)
class Trace:
    """A path on a plane.

    Attributes:
        label: in the legend.
        places: in order.
        number: which of the series' colours.
        main: drawn solid, with arrows and crosses; others are dashed.
    """

    label: str
    places: Sequence[Point]
    number: int
    main: bool


def path_figure(
    drawn: Mapping[str, Any], places: Mapping[str, Point], over_rank: Sequence[Trace], over_scale: Sequence[Trace]
) -> Figure:
    """Draw the multi-task loss with the paths over k and over λ (the paper's Figure 11).

    Args:
        drawn: `xs`, `ys`, and `losses`, task → [len(ys), len(xs)].
        places: model → (x, y).
        over_rank: left.
        over_scale: right.
    """
    figure, axes = panels(2, 2, 4.6)
    values = np.sum([np.array(one) for one in drawn["losses"].values()], axis=0)
    for panel, title, traces in zip(axes, ("over k", "over λ"), (over_rank, over_scale), strict=True):
        dress(panel, f"Multi-task loss, paths {title}", "first component", "second component", grid="both")
        _contours(panel, drawn, values)
        for trace in traces:
            _trace(panel, trace)
        _marks(panel, places, panel is axes[0])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def task_figure(drawn: Mapping[str, Any], places: Mapping[str, Point], traces: Sequence[Trace]) -> Figure:
    """Draw every task's loss on the same plane with CART's paths over k (the paper's Figure 5).

    Args:
        drawn: the grid and each task's losses on it, as of `draw_paths`.
        places: points of named models.
        traces: paths of merges over k.
    """
    figure, axes = panels(len(drawn["losses"]), 4, 2.75)
    for panel, (task, values) in zip(axes, drawn["losses"].items(), strict=True):
        dress(panel, task, grid="both")
        _contours(panel, drawn, np.array(values))
        for trace in traces:
            _trace(panel, trace, panel is axes[0], crosses=False)
        _marks(panel, {name: places[name] for name in ("average", "cart")}, panel is axes[0])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def basin_figure(basins: Mapping[str, Any]) -> Figure:
    """Draw every task's loss on the plane of its expert, CART and task arithmetic (the paper's Figure 12).

    Args:
        basins: task → `xs`, `ys`, `losses`, `places` of these three and of others, which are not drawn.
    """
    figure, axes = panels(len(basins), 4, 2.75)
    for panel, (task, drawn) in zip(axes, basins.items(), strict=True):
        dress(panel, task, grid="both")
        _contours(panel, drawn, np.array(drawn["losses"][task]))
        _marks(panel, {name: drawn["places"][name] for name in ("expert", "cart", "task_arithmetic")}, panel is axes[0])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def curve_figure(over_rank: Mapping[str, Samples], over_scale: Mapping[str, Samples]) -> Figure:
    """Draw the multi-task loss of the models themselves along the paths.

    Args:
        over_rank: path → k / full → one value per seed.
        over_scale: path → λ → one value per seed.
    """
    figure, (left, right) = panels(2, 2, 3.9, sharey=True)
    dress(left, "Loss at the models, over k", "rank kept, share of full", "multi-task loss Σ L_t")
    dress(right, "… over λ", "λ")
    for number, (name, samples) in enumerate(over_rank.items()):
        curve(left, samples, name, number)
    for number, (name, samples) in enumerate(over_scale.items(), start=len(over_rank)):
        curve(right, samples, name, number)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    left.set_xscale("symlog", linthresh=0.01)
    left.set_xlim(-0.002, 1.2)
    ranks = [0, 0.01, 0.04, 0.16, 1]
    left.set_xticks(ranks, labels=[f"{rank:g}" for rank in ranks])
    left.set_xticks([], minor=True)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _contours(panel: Axes, drawn: Mapping[str, Any], values: np.ndarray) -> None:
    """Fill a panel with the contours of a loss, dense where it is low, which is dark."""
    xs, ys = np.array(drawn["xs"]), np.array(drawn["ys"])
    low = float(values.min())
    high = max(float(values.max()), low + 1e-6)
    levels = low + (high - low) * np.linspace(0, 1, 14) ** 2
    shown = np.maximum(values - low, 0) + 1e-3 * (high - low)
    panel.contourf(xs, ys, shown, levels=levels - low + 1e-3 * (high - low), cmap=_COLOURS, norm=LogNorm(clip=True))
    lines = panel.contour(xs, ys, values, levels=levels[1:-1], colors=MUTED, linewidths=0.6)
    panel.clabel(lines, levels=levels[2:-1:3], fmt="%.3g", fontsize=SMALL - 1.5, colors=INK)
    panel.set_aspect("equal")
    panel.set_xlim(xs[0], xs[-1])
    panel.set_ylim(ys[0], ys[-1])
    panel.grid(False)


def _trace(panel: Axes, trace: Trace, told: bool = True, crosses: bool = True) -> None:
    places = np.array(trace.places)
    colour = SERIES[trace.number]
    style: dict[str, Any] = {
        "color": colour,
        "linewidth": 1.6 if trace.main else 1.0,
        "label": trace.label if told else None,
    }
    panel.plot(*places.T, linestyle="-" if trace.main else "--", **style)
    if not trace.main:
        return
    if crosses:
        panel.plot(*places.T, "x", color=colour, markersize=4.5)
    steps = np.diff(places, axis=0)
    longest = np.argsort(-np.hypot(*steps.T))[:3]
    for start, step in zip(places[longest], steps[longest], strict=True):
        arrow = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.2}
        panel.annotate("", start + 0.6 * step, start + 0.4 * step, arrowprops=arrow)


def _marks(panel: Axes, places: Mapping[str, Point], told: bool) -> None:
    for name, (x, y) in places.items():
        style = {"color": INK, "markersize": 7, "markeredgecolor": SURFACE, "markeredgewidth": 0.9, **_MARKS[name]}
        panel.plot([x], [y], linestyle="", zorder=5, **{**style, "label": style["label"] if told else None})
