"""How every figure of the project looks and is written: plain axes, direct labels, the same bytes for the same data.

Figures are drawn in worker threads, so nothing here touches pyplot or changes a global setting but the two that
matplotlib's SVG writer reads from nowhere else; those are set under a lock while a figure is written.
"""

import io
import threading
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from tasks.plotting.palette import GRID, INK, MARKERS, MUTED, SERIES, SURFACE

FULL_WIDTH, HALF_WIDTH = 10.6, 5.2  # inches; text keeps its size on the page, whichever width a figure has
SMALL, NORMAL, LARGE = 8.5, 9.5, 11.0  # points
_LONGEST = 32  # characters of a label
_WRITER: Any = {"svg.fonttype": "none", "svg.hashsalt": "mergeflow"}
_WRITING = threading.Lock()


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of `width` × `height` inches."""
    # The pads leave room for a reader's font that is wider than the one measured here.
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    return Figure(figsize=(width, height), facecolor=SURFACE, layout=layout)


def panels(count: int, columns: int, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure of panels in rows.

    Args:
        height: of each panel, in inches; the figure is `FULL_WIDTH` wide, of one column `HALF_WIDTH`.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    width = FULL_WIDTH if columns > 1 else HALF_WIDTH
    figure = new_figure(width, height * rows)
    grid = figure.subplots(rows, columns, squeeze=False, **shared)
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.set_axis_off()
    return figure, axes[:count]


def dress(axes: Axes, title: str, x: str = "", y: str = "", grid: str = "y") -> None:
    """Give the axes their title, labels and quiet lines.

    Args:
        grid: the axis that has grid lines: "x", "y" or "both".
    """
    axes.set_facecolor("none")
    axes.set_title(plain(title), loc="left", fontsize=LARGE, fontweight="bold", color=INK)
    axes.set_xlabel(plain(x), fontsize=NORMAL, color=MUTED)
    axes.set_ylabel(plain(y), fontsize=NORMAL, color=MUTED)
    axes.tick_params(colors=GRID, labelcolor=MUTED, labelsize=SMALL, length=3)
    axes.set_axisbelow(True)
    axes.grid(axis=grid, color=GRID, linewidth=0.7)  # type: ignore[arg-type]
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)


def series_style(index: int) -> dict[str, Any]:
    """Return colour, marker and line of series number `index`; the shape tells it apart where the colour does not."""
    return {
        "color": SERIES[index % len(SERIES)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": ("-", "--", ":", "-.")[index // len(SERIES) % 4],
        "markeredgecolor": SURFACE,
        "markeredgewidth": 0.7,
        "markersize": 5.5,
        "linewidth": 1.7,
    }


def ring(axes: Axes, x: float, y: float, label: str) -> None:
    axes.plot([x], [y], color=INK, marker="o", markersize=12, markerfacecolor="none", markeredgewidth=1.6)
    low, high = sorted(axes.transData.inverted().transform(axes.transAxes.transform([(0, 0), (1, 1)]))[:, 0])
    scale = axes.xaxis.get_transform()
    share = (scale.transform([x])[0] - scale.transform([low])[0]) / (
        scale.transform([high])[0] - scale.transform([low])[0]
    )
    side = "left" if share < 0.25 else "right" if share > 0.75 else "center"
    axes.annotate(
        plain(label),
        (x, y),
        xytext=({"left": -6, "center": 0, "right": 6}[side], 11),
        textcoords="offset points",
        ha=side,
        fontsize=SMALL,
        fontweight="bold",
        color=INK,
    )


def legend(target: Axes | Figure, room: float, title: str | None = None, **where: Any) -> None:
    """Add a legend in the figure's quiet style; what several panels have in common stands in it once.

    Args:
        room: its width in inches; it has as many columns as go into it.
    """
    axes = target.axes if isinstance(target, Figure) else [target]
    drawn = [pair for panel in axes for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    entries = {label: handle for handle, label in reversed(drawn)}  # the first panel's
    labels = list(dict.fromkeys(label for _, label in drawn))
    widths = [0.55 + 0.075 * len(label) for label in labels]
    columns = len(labels) if sum(widths) <= room else max(int(room / max(widths)), 1)
    where |= {"ncols": columns, "fontsize": SMALL, "title_fontsize": SMALL, "frameon": False, "labelcolor": INK}
    target.legend([entries[label] for label in labels], labels, title=title, **where).get_title().set_color(MUTED)


def number_ticks(axes: Axes, values: Sequence[float], logarithmic: bool) -> None:
    """Put the x ticks at the values that were tried, thinned where they would touch."""
    axes.set_xscale("log" if logarithmic else "linear")
    axes.set_xticks([], minor=True)
    shown = values if len(values) <= 7 else [*values[:-1][:: -(-len(values) // 6)], values[-1]]
    axes.set_xticks(shown, labels=[f"{value:g}" for value in shown])


def spans_decades(values: Sequence[float]) -> bool:
    """Say whether the values are better seen on a logarithmic axis."""
    return min(values) > 0 and max(values) / min(values) >= 8


def plain(text: str, longest: int = _LONGEST) -> str:
    """Return the text with nothing that matplotlib would read as mathematics, and shortened in the middle if long.

    Example:
        >>> plain("$x$")
        '\\\\$x\\\\$'
        >>> plain("a_name_that_leaves_no_room_for_the_curves_themselves")
        'a_name_that_leav…rves_themselves'
    """
    if len(text) > longest:
        text = f"{text[: longest // 2]}…{text[-(longest // 2 - 1) :]}"
    return text.replace("$", r"\$")


def to_svg(figure: Figure, title: str) -> bytes:
    """Return the figure as SVG: text as text, no date, identifiers from the content alone."""
    buffer = io.BytesIO()
    with _WRITING, matplotlib.rc_context(_WRITER):
        figure.savefig(buffer, format="svg", metadata={"Title": title, "Date": None, "Creator": "mergeflow"})
    return buffer.getvalue()
