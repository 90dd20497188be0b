"""Figures of the study `equivalence`: the gap over the step size, its coefficient over α, and the bounds on C."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, legend, panels, plain, series_style
from tasks.plotting.palette import MUTED

_LEFT = {
    "gap": "gap ‖θ_TA − θ_MT‖",
    "after_derived": "less the derived −αη²C′",
    "after_halved": "less half of it (proof's ½)",
    "after_printed": "less the printed +η²C",
}
_SMALL: Any = {"fontsize": SMALL, "color": MUTED}


def gap_figure(rows: Sequence[Row], slopes: Sequence[Row]) -> Figure:
    """Draw, per model, what is left of the gap after each term, over η on logarithmic axes.

    Args:
        rows: of `gap_rows`, one seed per model.
        slopes: of `slope_row`, one per model.
    """
    figure, axes = panels(len(slopes), 3, 3.6)
    for panel, fit in zip(axes, slopes, strict=True):
        model = fit["model"]
        dress(panel, f"{model}, k = {fit['epochs']}", "step size η", "2-norm" if panel is axes[0] else "", grid="both")
        own = [row for row in rows if row["model"] == model]
        for number, (name, label) in enumerate(_LEFT.items()):
            points = [(row["step"], row[name]) for row in own]
            panel.plot(*zip(*points, strict=True), label=label, **series_style(number))
            note = f"slope {fit[name]:.2f}"
            panel.text(0.97, 0.24 - 0.07 * number, note, **_note_style(panel, number))
        panel.set(xscale="log", yscale="log")
        panel.margins(x=0.12)
        kinked = [row["step"] for row in own if row["switched"]]
        if kinked:
            panel.axvspan(min(kinked) / 1.7, max(kinked) * 1.7, color=MUTED, alpha=0.12, linewidth=0)
            panel.set_xlim(own[0]["step"] / 2, max(kinked) * 1.7)
            panel.text(0.03, 0.95, "grey: a ReLU switches side", transform=panel.transAxes, va="top", **_SMALL)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=SMALL, frameon=False)
    return figure


def coefficient_figure(rows: Sequence[Row]) -> Figure:
    """Draw the coefficient of C over α: measured points on three claimed lines."""
    figure, (panel,) = panels(1, 1, 4.6)
    dress(panel, "Coefficient of η²C in the gap", "scale α", "coefficient", grid="both")
    models = list(dict.fromkeys(row["model"] for row in rows))
    claims = {"derived": "derived −α", "halved": "proof's Taylor step −α/2", "printed": "printed +1"}
    for number, (name, label) in enumerate(claims.items()):
        points = sorted({(row["scale"], row[name]) for row in rows})
        style = series_style(number) | {"marker": ""}
        panel.plot(*zip(*points, strict=True), label=label, **style)
    for number, model in enumerate(models):
        points = [(row["scale"], row["measured"]) for row in rows if row["model"] == model]
        style = series_style(3 + number) | {"linestyle": "", "markersize": 8 - 1.5 * number}
        panel.plot(*zip(*points, strict=True), label=f"measured, {plain(model)}", **style)
    legend(figure, 4.6, loc="outside lower center")
    return figure


def bounds_figure(factors: Sequence[Row], networks: Sequence[Row]) -> Figure:
    """Draw the task factors over α, and ‖C‖ over the size of the weights beside its bounds, per net.

    Args:
        factors: of `factor_rows`.
        networks: of `network_row`, depth > 1.
    """
    nets = list(dict.fromkeys(row["model"] for row in networks))
    figure, axes = panels(1 + len(nets), 3, 3.6)
    dress(axes[0], "Task factor", "scale α", "‖C‖ / (T · pairs · H · G)", grid="both")
    lines = {"statement": "statement", "proof": "proof / appendix", "derived": "derived"}
    first = [row for row in factors if row["model"] == factors[0]["model"]]
    for number, (name, label) in enumerate(lines.items()):
        _curve(axes[0], first, "scale", name, label, series_style(number))
    for number, model in enumerate(dict.fromkeys(row["model"] for row in factors)):
        own = [row for row in factors if row["model"] == model]
        style = series_style(3 + number) | {"linestyle": ""}
        _curve(axes[0], own, "scale", "measured", f"measured, {plain(model)}", style)
    for panel, model in zip(axes[1:], nets, strict=True):
        own = [row for row in networks if row["model"] == model and row["gain"] > 0]
        dress(panel, f"‖C‖ of the {model}", "factor on the initial weights", "2-norm", grid="both")
        for number, name in enumerate(("statement", "appendix", "derived")):
            _curve(panel, own, "gain", name, "", series_style(number))
        _curve(panel, own, "gain", "norm", "", series_style(3 + nets.index(model)))
        panel.set(xscale="log", yscale="log")
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _curve(panel: Axes, rows: Iterable[Row], x: str, y: str, label: str, style: Mapping[str, Any]) -> None:
    points = sorted((row[x], row[y]) for row in rows)
    panel.plot(*zip(*points, strict=True), label=label or "_unlabelled", **style)


def _note_style(panel: Axes, number: int) -> dict[str, Any]:
    """Return where and how a fitted slope is written: in its line's colour, in the panel's lower right corner."""
    colour = series_style(number)["color"]
    return {"transform": panel.transAxes, "ha": "right", "fontsize": SMALL, "color": colour}
