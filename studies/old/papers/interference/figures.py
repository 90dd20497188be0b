"""Figures of the study `interference`: I(k), R(k) and L_k over layers and kinds of matrix, and the theorem's bound."""

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.lab.plots import root_axis
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style
from tasks.plotting.palette import INK, MUTED, SERIES

ORIGINS = ("centred", "original")
_LAYERS = {
    "whole": "I(k), a pair of tasks",
    "spectral": "I(k) as printed",
    "loss": "task interference L_k",
}
_BOUNDS = {"printed": "bound as printed", "derived": "bound with derived k₃", "pairwise": "pairwise bound"}


def layers_figure(rows: Sequence[Row]) -> Figure:
    """Draw I(k), I(k) as printed and L_k: a point per layer, a line for their median (the paper's Figures 2 and 8).

    Args:
        rows: per seed `layers` with `ratios`, and for `centred` and `original` the measures over the ratios.
    """
    figure, axes = panels(3, 3, 3.9)
    for index, (panel, (measure, title)) in enumerate(zip(axes, _LAYERS.items(), strict=True)):
        dress(panel, title, "rank ratio k / r", "")
        for number, origin in enumerate(ORIGINS):
            layers = _mean_layers(rows, origin, measure)
            label = f"{origin} task vectors" if not index else f"_{origin}"
            _cloud(panel, rows[0]["layers"][0]["ratios"], layers, label, number)
        root_axis(panel, (0, 0.08, 0.32, 1))
        panel.set_ylim(bottom=0)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _mean_layers(rows: Sequence[Row], origin: str, measure: str, kind: str | None = None) -> list[list[float]]:
    """Return for every layer (of a kind) the mean over seeds at each ratio."""
    curves = [
        [layer[origin][measure] for layer in row["layers"] if kind in (None, layer["kind"])] for row in rows
    ]  # seed, layer, ratio
    return [[fmean(values) for values in zip(*seeds, strict=True)] for seeds in zip(*curves, strict=True)]


def _cloud(panel: Axes, ratios: Sequence[float], layers: Sequence[Sequence[float]], label: str, number: int) -> None:
    middle = [median(values) for values in zip(*layers, strict=True)]
    for layer in layers:
        beside = [ratio * (0.97, 1.03)[number] for ratio in ratios]
        panel.plot(beside, layer, color=SERIES[number], linestyle="", marker="o", markersize=2.5, alpha=0.35)
    panel.plot(ratios, middle, label=label, **series_style(number))


def kinds_figure(rows: Sequence[Row]) -> Figure:
    """Draw I(k) and R(k) together, a panel per kind of matrix, mean over layers and seeds (the paper's Figure 3).

    Args:
        rows: as of `layers_figure`; I(k) is shown as a share of that of the original task vectors at full rank.
    """
    kinds = list(dict.fromkeys(layer["kind"] for layer in rows[0]["layers"]))
    figure, axes = panels(len(kinds), 4, 2.7, sharey=True)
    ratios = rows[0]["layers"][0]["ratios"]
    for index, (panel, kind) in enumerate(zip(axes, kinds, strict=True)):
        last = index >= len(kinds) - 4
        dress(panel, kind, "k / r" if last else "", "share" if index % 4 == 0 else "")
        curves = {origin: _mean(rows, origin, "whole", kind) for origin in ORIGINS}
        full = curves["original"][-1] or 1.0
        for number, (origin, values) in enumerate(curves.items()):
            style = series_style(number) | {"markersize": 4}
            shares = [value / full for value in values]
            panel.plot(ratios, shares, label=_once(f"I(k) {origin} / I(r) original", index), **style)
        error = _mean(rows, "centred", "error", kind)
        panel.plot(ratios, error, label=_once("R(k) / R(0), centred", index), color=INK, linestyle="--", linewidth=1.5)
        root_axis(panel, (0, 0.08, 0.32, 1))
        panel.set_ylim(bottom=0)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _mean(rows: Sequence[Row], origin: str, measure: str, kind: str) -> list[float]:
    return [fmean(values) for values in zip(*_mean_layers(rows, origin, measure, kind), strict=True)]


def _once(label: str, index: int) -> str:
    return f"_{label}" if index else label


def bound_figure(rows: Mapping[str, Sequence[Row]]) -> Figure:
    """Draw L and its bounds over I, without noise and with it, and L / (n I²) over s_max / α.

    Args:
        rows: `overlap` and `condition` of the study.
    """
    figure, axes = panels(3, 3, 3.9)
    for panel, noise in zip(axes, (0.0, 0.01), strict=False):
        own = [row for row in rows["overlap"] if row["noise"] == noise and row["tasks"] == 4]
        dress(panel, f"T = 4, η = {noise:g}", "I", "L" if noise == 0 else "", grid="both")
        xs = [row["interference"] for row in own]
        panel.plot(xs, [row["L"] for row in own], label="measured" if noise == 0 else "_L", **series_style(0))
        for number, (name, label) in enumerate(_BOUNDS.items(), start=1):
            shown = label if noise == 0 else f"_{name}"
            panel.plot(xs, [row[name] for row in own], label=shown, **series_style(number))
        panel.set_xscale("log")
        panel.set_yscale("log")
    _condition(axes[2], rows["condition"])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _condition(panel: Axes, rows: Sequence[Row]) -> None:
    dress(panel, "tasks share the weakest", "s_max / α", "L / (n I²)", grid="both")
    conditions = sorted({row["condition"] for row in rows})
    for number, name in enumerate(("L", *_BOUNDS)):
        largest = [
            max(
                row[name] / (row["samples"] * row["interference"] ** 2) for row in rows if row["condition"] == condition
            )
            for condition in conditions
        ]
        panel.plot(conditions, largest, label=f"_{name}", **series_style(number))
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(conditions, labels=[f"{condition:g}" for condition in conditions])
    panel.axhline(1, color=MUTED, linewidth=0)
