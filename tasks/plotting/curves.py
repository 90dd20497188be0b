"""Validation accuracy over the arguments that were tried: the scale, and every other number."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.plotting.drawing import (
    SMALL,
    dress,
    legend,
    number_ticks,
    panels,
    plain,
    ring,
    series_style,
    spans_decades,
)
from tasks.plotting.palette import MUTED

Row = Mapping[str, Any]
Sweeps = Mapping[str, list[Row]]
_SHOWN_LINES = 8
_NORMALISED = "normalised accuracy, %"


def scale_curves(sweeps: Sweeps, choices: Mapping[str, Row]) -> Figure | None:
    """Draw normalised validation accuracy over `scale`: a panel per method, a line per value of its other arguments."""
    shown = {method: rows for method, rows in sweeps.items() if len(_values(rows, "scale")) > 1}
    if not shown:
        return None
    figure, axes = panels(len(shown), 3, 3.5, sharey=True)
    for index, (panel, (method, rows)) in enumerate(zip(axes, shown.items(), strict=True)):
        dress(panel, method, "scale λ", _NORMALISED if index % 3 == 0 else "")
        title, lines = _lines(rows)
        for number, (label, points) in enumerate(lines.items()):
            style = series_style(number if len(lines) > 1 else list(choices).index(method))
            panel.plot(*_curve(points, "scale"), label=plain(label), **style)
        values = _values(rows, "scale")
        number_ticks(panel, values, spans_decades(values))
        panel.margins(y=0.16)
        _mark_choice(panel, choices[method], "scale")
        _draw_constants(panel, sweeps)
        if len(lines) > 1:
            legend(panel, 3.1, plain(title), loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return figure


def argument_curves(sweeps: Sweeps, choices: Mapping[str, Row]) -> Figure | None:
    """Draw normalised validation accuracy over each other numeric argument (CART's rank), at the best of the rest."""
    shown = swept_arguments(sweeps)
    if not shown:
        return None
    figure, axes = panels(len(shown), 2 if len(shown) != 3 else 3, 3.2)
    for panel, (method, argument) in zip(axes, shown, strict=True):
        rows = sweeps[method]
        values, best = _values(rows, argument), best_by_value(rows, argument)
        dress(panel, f"{method}: {argument}", argument, _NORMALISED)
        panel.plot(*_curve(best, argument), **series_style(list(choices).index(method)))
        number_ticks(panel, values, spans_decades(values))
        panel.margins(x=0.1, y=0.22)
        _note_scales(panel, best, argument)
        _mark_choice(panel, choices[method], argument)
    return figure


def swept_arguments(sweeps: Sweeps) -> list[tuple[str, str]]:
    """Return (method, argument) wherever two numbers were tried for an argument other than `scale`."""
    return [
        (method, argument)
        for method, rows in sweeps.items()
        for argument in rows[0]["args"]
        if argument != "scale" and len(_values(rows, argument)) > 1
    ]


def best_by_value(rows: list[Row], argument: str) -> list[Row]:
    """Return the best candidate for each number that was tried for an argument, in the numbers' order."""
    values = _values(rows, argument)
    return [max((r for r in rows if r["args"][argument] == v), key=lambda r: r["normalised"]) for v in values]


def is_number(value: Any) -> bool:
    """Whether an argument's value can be put on an axis."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(rows: list[Row], argument: str) -> list[float]:
    """Return the distinct numbers that were tried for an argument, in order."""
    values = {row["args"].get(argument) for row in rows}
    return sorted(value for value in values if is_number(value))


def _lines(rows: list[Row]) -> tuple[str, dict[str, list[Row]]]:
    """Group candidates by everything but `scale`; of many groups return the best ones, under the arguments' names."""
    names = [name for name in rows[0]["args"] if name != "scale"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        values = [row["args"][name] for name in names]
        label = ", ".join(f"{value:g}" if is_number(value) else str(value) for value in values)
        groups.setdefault(label, []).append(row)
    ranked = sorted(groups, key=lambda label: -max(row["normalised"] for row in groups[label]))[:_SHOWN_LINES]
    title = ", ".join(names) + (f" (best {_SHOWN_LINES} of {len(groups)})" if len(groups) > _SHOWN_LINES else "")
    return title, {label: points for label, points in groups.items() if label in ranked}


def _curve(rows: list[Row], argument: str) -> tuple[list[float], list[float]]:
    points = sorted((row["args"][argument], 100 * row["normalised"]) for row in rows)
    return [x for x, _ in points], [y for _, y in points]


def _mark_choice(panel: Axes, chosen: Row, argument: str) -> None:
    height = 100 * chosen["validation"]["normalised"]
    ring(panel, chosen["args"][argument], height, f"chosen: {height:.1f} %")


def _draw_constants(panel: Axes, sweeps: Mapping[str, list[Row]]) -> None:
    """Draw the methods that have one candidate as levels to compare with."""
    for method, rows in sweeps.items():
        if len(rows) == 1:
            height = 100 * rows[0]["normalised"]
            panel.axhline(height, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
            panel.annotate(
                plain(method),
                (1, height),
                xycoords=("axes fraction", "data"),
                xytext=(-3, 3),
                textcoords="offset points",
                ha="right",
                fontsize=SMALL,
                color=MUTED,
            )


def _note_scales(panel: Axes, rows: list[Row], argument: str) -> None:
    """Say under each point which scale was best there."""
    for row in rows:
        if "scale" in row["args"]:
            panel.annotate(
                f"λ {row['args']['scale']:g}",
                (row["args"][argument], 0.03),
                xycoords=("data", "axes fraction"),
                ha="center",
                fontsize=SMALL,
                color=MUTED,
            )
