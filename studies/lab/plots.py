"""Tables and figures of tidy rows, declared by their columns."""

from collections.abc import Callable, Mapping, Sequence
from textwrap import fill
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from mergeflow.evaluation.averages import mean_interval
from studies.lab.claims import with_interval
from studies.lab.rows import samples
from tasks.plotting.drawing import (
    FULL_WIDTH,
    SMALL,
    dress,
    legend,
    new_figure,
    number_ticks,
    panels,
    plain,
    series_style,
)
from tasks.plotting.palette import INK, MUTED, SURFACE
from tasks.plotting.panels import curve, round_axis

Names = str | Sequence[str]
PLUS_MINUS = "± in tables: half a 95 % interval over seeds; that of a claim says where it is over test examples too."
_DARK = LinearSegmentedColormap.from_list("low is dark", ["#3f97cc", "#b9d9ec", SURFACE])
DASHES: Any = ((0, (4, 3)), "-.", (0, (1, 2)), (0, (8, 2)), (0, (8, 2, 1, 2, 1, 2)), (0, (2, 6)))  # of levels


def table(
    rows: pd.DataFrame,
    index: Names,
    columns: Names | None = None,
    value: str = "accuracy",
    digits: int = 1,
    cell: Callable[[list[float]], str] | None = None,
) -> pd.DataFrame:
    """Return mean ± half the 95 % interval over seeds for each value of `index` (and of `columns`), as text.

    Args:
        index: the column or columns that become lines, in order of appearance.
        columns: those that become columns; none gives the one column `value`.
        cell: from one value for each seed to the text of a cell, where it is not mean and interval.
    """
    lines, heads = _names(index), _names(columns)
    seeds = rows.groupby([*lines, *heads, "seed"], sort=False, dropna=False)[value].mean()
    show = cell or (lambda values: with_interval(values, digits))
    texts = seeds.groupby(level=[*lines, *heads], sort=False, dropna=False).agg(lambda values: show(list(values)))
    if not heads:
        return texts.to_frame(value)
    order = [tuple(key) if len(heads) > 1 else key[0] for key in rows[heads].drop_duplicates().itertuples(index=False)]
    wide = texts.unstack(heads if len(heads) > 1 else heads[0])
    return wide.reindex(columns=[name for name in order if name in wide.columns]).fillna("")


def side_by_side(
    rows: pd.DataFrame,
    index: Names,
    headings: Mapping[str, str] | Sequence[str],
    digits: int | Mapping[str, int] = 1,
) -> pd.DataFrame:
    """Return `table` of several columns of the rows beside each other.

    Args:
        headings: the columns, or from a column to what stands above it.
    """
    names = headings if isinstance(headings, Mapping) else dict(zip(headings, headings, strict=True))
    places = digits if isinstance(digits, Mapping) else dict.fromkeys(names, digits)
    parts = [table(rows, index, value=name, digits=places.get(name, 1)) for name in names]
    return pd.concat(parts, axis=1).set_axis(list(names.values()), axis=1)


def listed(values: Sequence[float]) -> str:
    """Return the values of all seeds, for a cell of `table`.

    Example:
        >>> listed([0.2, 0.25])
        '0.2, 0.25'
    """
    return ", ".join(f"{value:g}" for value in values)


def curves(
    rows: pd.DataFrame,
    x: str,
    by: str | None = None,
    value: str = "accuracy",
    panel: str | None = None,
    *,
    labels: Mapping[Any, str] | None = None,
    x_label: str = "",
    y_label: str = "",
    title: str = "",
    levels: Callable[[Any], Mapping[str, float]] | None = None,
    scale: Literal["linear", "log", "rounds", "root"] = "linear",
    ticks: Sequence[float] | None = None,
    log_y: bool = False,
    columns: int = 4,
    height: float | None = None,
) -> Figure:
    """Draw means over seeds with their 95 % intervals: a line for each value of `by`, a panel for each of `panel`.

    Args:
        rows: tidy; within a seed `value` is averaged over everything else.
        by: the column whose values become lines.
        panel: the column whose values become panels.
        labels: from values of `by` and `panel` to what the legend and titles say.
        levels: from a panel's value to what is compared with: what the legend calls it, and its height.
        scale: of x; that of rounds is logarithmic, with marks where something was measured, and "root" is for shares.
        height: of a panel, in inches.
    """
    parts = list(rows.groupby(panel, sort=False)) if panel else [(title, rows)]
    figure, axes = panels(len(parts), columns, height or (3.7 if len(parts) <= 2 else 2.6), sharey=True)
    lines = list(rows[by].drop_duplicates()) if by else [value]
    names = labels or {}
    for place, (axis, (part, frame)) in enumerate(zip(axes, parts, strict=True)):
        below, left = place >= len(parts) - columns, place % columns == 0
        dress(axis, plain(str(names.get(part, part))), x_label or x if below else "", y_label if left else "")
        for number, line in enumerate(lines):
            over = frame[frame[by] == line] if by else frame
            if len(over):
                curve(axis, by_seed(over, x, value), names.get(line, in_words(line)), number)
        for (label, line_height), dashes in zip((levels(part) if levels else {}).items(), DASHES, strict=False):
            axis.axhline(line_height, color=MUTED, linestyle=dashes, linewidth=1.1, label=label)
        _scale(axis, scale, sorted(frame[x].dropna().unique()), ticks)
        if log_y:
            log_y_axis(axis)
    if by or levels:
        legend(figure, figure.get_figwidth() - 0.4, loc="outside lower center")
    return figure


def dots(
    rows: pd.DataFrame,
    places: str | Mapping[str, Mapping[str, Any]],
    by: str | Mapping[str, Mapping[str, Any]],
    value: str = "accuracy",
    panel: str | None = None,
    *,
    title: str = "",
    y_label: str = "",
    labels: Mapping[Any, str] | None = None,
    level: Callable[[pd.DataFrame], float] | None = None,
    wrap: int = 18,
    columns: int = 2,
    height: float = 3.4,
    sharey: bool = False,
) -> Figure:
    """Draw means over seeds with their 95 % intervals as marks side by side, above each of some places.

    Args:
        rows: tidy; within a seed `value` is averaged over everything else.
        places: from the text below the axis to which rows stand there, as of `select`; or a column of such texts.
        by: from the legend's text to which rows have this mark, or a column of such texts; where a place has none,
            nothing is drawn.
        panel: the column whose values become panels.
        level: of a panel's rows, a dashed line to compare with.
        wrap: letters of a line below the axis.
    """
    parts = list(rows.groupby(panel, sort=False)) if panel else [(title, rows)]
    marks_of = {str(name).replace("_", " "): {by: name} for name in rows[by].unique()} if isinstance(by, str) else by
    figure, axes = panels(len(parts), columns, height, sharey=sharey)
    if not panel:
        figure.set_size_inches(FULL_WIDTH, height)
    for index, (axis, (part, frame)) in enumerate(zip(axes, parts, strict=True)):
        dress(axis, (labels or {}).get(part, str(part)), "", y_label if index % columns == 0 else "")
        groups = {str(at): {places: at} for at in frame[places].unique()} if isinstance(places, str) else places
        for number, (line, where) in enumerate(marks_of.items()):
            aside = (number - (len(by) - 1) / 2) * 0.7 / len(by)
            places_of = {
                at + aside: samples(frame, value, **chosen, **where) for at, chosen in enumerate(groups.values())
            }
            marks = {place: list(values) for place, values in places_of.items() if len(values)}
            if marks:
                curve(axis, marks, line, number, linestyle="")
        if level:
            axis.axhline(level(frame), color=MUTED, linestyle=DASHES[0], linewidth=1.1)
        axis.set_xticks(range(len(groups)), labels=[fill(label, wrap) for label in groups])
    legend(figure, figure.get_figwidth() - 0.4, loc="outside lower center")
    return figure


def ranked_dots(values: Mapping[str, Mapping[str, Sequence[float]]], title: str, x_label: str) -> Figure:
    """Draw a line of dots for each model, the first on top: means over seeds with their 95 % intervals.

    Args:
        values: from the model to the legend's text to one value for each seed.
    """
    figure = new_figure(0.75 * FULL_WIDTH, 1.4 + 0.26 * len(values))
    axis = figure.subplots()
    dress(axis, title, x_label, grid="x")
    lines = list(dict.fromkeys(line for lines_of in values.values() for line in lines_of))
    for number, line in enumerate(lines):
        spans = {-place: mean_interval(list(rows[line])) for place, rows in enumerate(values.values()) if line in rows}
        bars = [half if np.isfinite(half) else 0.0 for _, half in spans.values()]
        style = {**series_style(number), "linestyle": "", "capsize": 2.5}
        axis.errorbar([centre for centre, _ in spans.values()], list(spans), xerr=bars, label=line, **style)
    axis.set_yticks([-place for place in range(len(values))], labels=[plain(name) for name in values])
    if len(lines) > 1:
        legend(figure, figure.get_figwidth() - 0.4, loc="outside lower center")
    return figure


def scatter(
    rows: pd.DataFrame,
    x: Mapping[str, str],
    y: str,
    by: str,
    *,
    y_label: str,
    labels: Mapping[Any, str] | None = None,
    grid: str = "both",
    columns: int = 2,
    height: float = 3.0,
) -> Figure:
    """Draw a point for each row: a panel for each column of `x`, a colour for each value of `by`.

    Args:
        x: from the column to what its axis is called.
        by: the column whose values are colours.
        labels: from values of `by` to what the legend says.
    """
    figure, axes = panels(len(x), columns, height, sharey=True)
    for index, (axis, (column, label)) in enumerate(zip(axes, x.items(), strict=True)):
        dress(axis, "", label, y_label if index % columns == 0 else "", grid)
        for number, (name, group) in enumerate(rows.groupby(by, sort=False)):
            text = (labels or {}).get(name, str(name))
            style = {**series_style(number), "linestyle": "", "markersize": 3.5, "markeredgewidth": 0.3, "alpha": 0.7}
            axis.plot(group[column], group[y], label=text, **style)
    legend(figure, figure.get_figwidth() - 0.4, loc="outside lower center")
    return figure


def contours(panel: Axes, plane: pd.DataFrame, levels: Sequence[float], form: str, every: int = 1) -> None:
    """Fill a panel with the contours of a value on a plane, its lines numbered, dark where it is low.

    Args:
        plane: the values, by y and x.
        form: of the numbers, as `%d`.
        every: so many lines have one number.
    """
    xs, ys, values = plane.columns.to_numpy(), plane.index.to_numpy(), plane.to_numpy()
    panel.contourf(xs, ys, values, levels=levels, cmap=_DARK, norm=BoundaryNorm(levels, _DARK.N))
    shown = levels[1:-1]
    lines = panel.contour(xs, ys, values, levels=shown, colors=MUTED, linewidths=0.6)
    panel.clabel(lines, levels=shown[::every], fmt=form, fontsize=SMALL - 1, colors=INK)
    panel.set(aspect="equal", xlim=(xs[0], xs[-1]), ylim=(ys[0], ys[-1]))
    panel.grid(False)


def by_seed(rows: pd.DataFrame, x: str, value: str = "accuracy") -> dict[Any, list[float]]:
    """Return x → one value for each seed, the mean over everything else; what a `curve` draws."""
    means = rows.groupby([x, "seed"])[value].mean()
    return {place: list(values) for place, values in means.groupby(level=0)}


def root_axis(axes: Axes, ticks: Sequence[float]) -> None:
    """Make x the square root of a share, 0 … 1: small shares, where curves bend, get half of the room."""
    axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
    axes.set_xticks([], minor=True)
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.set_xlim(0, 1.02)


def _scale(axis: Axes, scale: str, measured: Sequence[float], ticks: Sequence[float] | None) -> None:
    if scale == "rounds":
        round_axis(axis, [int(n) for n in measured])
    elif scale == "root":
        root_axis(axis, ticks or measured)
    elif ticks or scale == "log":
        number_ticks(axis, ticks or measured, logarithmic=scale == "log")
    elif all(float(value).is_integer() for value in measured):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def in_words(name: Any) -> str:
    """Write a value that has no label for the legend.

    Example:
        >>> in_words("task_arithmetic"), in_words("mirrored, D_i")
        ('task arithmetic', 'mirrored, D_i')
    """
    return str(name).replace("_", " ") if str(name).isidentifier() else str(name)


def log_y_axis(axis: Axes) -> None:
    """Make y logarithmic, with a number at 1, 2 and 5 of each decade where there are few."""
    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < 1000 * low:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def _names(names: Names | None) -> list[str]:
    return [names] if isinstance(names, str) else list(names or ())
