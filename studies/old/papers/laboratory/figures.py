"""Figures of the study `laboratory`, from its rows alone."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from studies.old.papers.laboratory.options import Options
from studies.old.papers.laboratory.rows import CASE_C, critical, whole
from studies.old.rows import Row, by_seed, picked
from studies.theory.coefficients import predicted_outputs
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, number_ticks, panels, series_style
from tasks.plotting.heat import colour_bar, heat_map, over
from tasks.plotting.palette import INK

_SHOWN = (-3.0, 3.0)


def figures(rows: Sequence[Row], options: Options) -> dict[str, Figure]:
    """Return the study's figures, name → figure."""
    return {
        "phases": phase_figure(rows, options.solved),
        "curves": curve_figure(rows),
        "convergence": convergence_figure(rows),
        "targets": target_figure(rows, options.c, options.solved),
        "pruning": pruning_figure(rows),
    }


def phase_figure(rows: Sequence[Row], solved: float) -> Figure:
    """Draw hinge loss and accuracy of both tasks over α and λ, with predicted and measured boundaries.

    Args:
        rows: of all experiments.
        solved: the hinge loss up to which a task counts as solved.
    """
    figure, axes = panels(4, 2, 3.4, sharex=True, sharey=True)
    own = [row for row in whole(rows) if _SHOWN[0] <= row["scale"] <= _SHOWN[1]]
    alphas, scales = (sorted({row[key] for row in own}) for key in ("alpha", "scale"))
    names = {"hinge": "hinge loss, cut at 1", "accuracy": "accuracy, %"}
    for row, (key, label) in enumerate(names.items()):
        for number, panel in enumerate(axes[2 * row : 2 * row + 2], 1):
            dress(panel, f"Task {number}: {label}", "α" if row else "", "λ" if number == 1 else "")
            cells = [[_mean(own, f"{key}_{number}", alpha=alpha, scale=scale) for alpha in alphas] for scale in scales]
            seen = np.minimum(cells, 1) if key == "hinge" else 100 * np.array(cells)
            drawn = heat_map(panel, alphas, scales, seen, vmin=0, vmax=1 if key == "hinge" else 100)
            panel.set_ylim(*_SHOWN)
            _boundaries(panel, alphas)
            if number == 2:
                addable = [alpha for alpha in alphas if alpha >= 0]
                least = [_smallest(own, alpha, solved) for alpha in addable]
                over(panel, addable, least, "smallest λ that solves task 2", marker="o", linestyle="")
        colour_bar(axes[2 * row : 2 * row + 2], drawn, label)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _boundaries(panel: Axes, alphas: Sequence[float]) -> None:
    """Draw where Theorems 1 and 2 see the ends of addition, of unlearning, and of unlearning in case C."""
    line = np.linspace(min(alphas), max(alphas), 200)
    positive, negative = line[line >= 0], line[line < -1e-9]
    over(panel, positive, 1 - positive, "λ = 1 − α")
    over(panel, negative, -1 / negative**2, "λ = −1/α²", linestyle="--")
    over(panel, positive, CASE_C * (1 - positive) / 2, f"λ = c/2, c = {CASE_C:g} (1 − α)", linestyle=":")


def _smallest(rows: Sequence[Row], alpha: float, solved: float) -> float:
    own = picked(rows, alpha=alpha)
    return fmean(by_seed(own, lambda found: critical(sorted(found, key=lambda row: row["scale"]), solved)))


def curve_figure(rows: Sequence[Row]) -> Figure:
    """Draw y f over λ on both tasks, measured and predicted, for a contradictory, an irrelevant and an aligned pair."""
    alphas = sorted({row["alpha"] for row in whole(rows)})
    chosen = [min(alphas, key=lambda alpha, near=near: abs(alpha - near)) for near in (-0.5, 0.0, 0.5)]  # type: ignore[misc]
    figure, axes = panels(3, 3, 3.4, sharey=True)
    for panel, alpha in zip(axes, chosen, strict=True):
        own = picked(whole(rows), alpha=alpha)
        scales = sorted({row["scale"] for row in own if row["scale"] >= -8})
        dress(panel, f"α = {alpha:g}", "λ", "mean y f" if panel is axes[0] else "", grid="both")
        told = [predicted_outputs(alpha, scale) for scale in scales]
        for number, predicted in enumerate(zip(*told, strict=True), 1):
            style = series_style(number - 1)
            measured = [_mean(own, f"margin_{number}", scale=scale) for scale in scales]
            label = f"task {number}" if panel is axes[0] else "_again"
            panel.plot(scales, measured, label=f"{label}, measured", **style)
            plain = {**style, "marker": "", "linestyle": ":"}
            panel.plot(scales, predicted, label=f"{label}, predicted", **plain)
        panel.axhline(1, color=INK, linewidth=0.6)
        panel.set_ylim(-3, 4)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def convergence_figure(rows: Sequence[Row]) -> Figure:
    """Draw the steps until the task is solved over η, δ_*, c and B, on logarithmic axes."""
    named = {"step": "step size η", "relevant": "share δ_*", "bits": "labels c", "batch": "batch B"}
    figure, axes = panels(len(named), 4, 3.0)
    slopes = {"step": -1, "relevant": -2, "bits": 2}
    for panel, (varied, label) in zip(axes, named.items(), strict=True):
        own = picked(rows, part="convergence", varied=varied)
        at = sorted({row["at"] for row in own})
        means = [_mean(own, "steps", at=one) for one in at]
        told = f"{label}, slope {slopes[varied]}" if varied in slopes else label
        dress(panel, told, "", "steps until solved" if panel is axes[0] else "", grid="both")
        panel.plot(at, means, label="measured", **series_style(0))
        if varied in slopes:
            style = {**series_style(1), "marker": "", "linestyle": ":"}
            line = [means[0] * (one / at[0]) ** slopes[varied] for one in at]
            panel.plot(at, line, label="slope of the theory", **style)
        panel.set(xscale="log", yscale="log")
        number_ticks(panel, at, logarithmic=True)
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_locator(NullLocator())
        low, high = panel.get_ylim()
        if high < 2 * low:  # an axis of tenths of a step would show noise
            panel.set_ylim(low / 2, 2 * high)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def target_figure(rows: Sequence[Row], c: float, solved: float) -> Figure:
    """Draw every drawn λ by its two sums, and whether the task was solved, with the corner that Equation 7 asks for.

    Args:
        rows: of the experiment on tasks that nobody trained.
        c: the constant of Equation 7.
        solved: the hinge loss at which a task counts as solved.
    """
    figure, (panel,) = panels(1, 1, 4.6)
    dress(panel, "Tasks that nobody trained", "Σ λγ", "Σ λγ²", grid="both")
    own = picked(rows, part="target", kind="drawn")
    for number, (label, wanted) in enumerate((("solved", True), ("not solved", False))):
        points = [(row["first_sum"], row["second_sum"]) for row in own if (row["hinge_1"] <= solved) is wanted]
        style = {**series_style(number), "linestyle": "", "markersize": 3, "alpha": 0.6}
        panel.plot(*zip(*points, strict=True), label=label, **style)
    _corner(panel, 1 + c)
    legend(figure, 4.6, loc="outside lower center")
    return figure


def _corner(panel: Axes, at: float) -> None:
    right, top = panel.get_xlim()[1], panel.get_ylim()[1]
    panel.plot([at, at, right], [top, at, at], color=INK, linewidth=1, label="the corner of Equation 7")


def pruning_figure(rows: Sequence[Row]) -> Figure:
    """Draw the loss of task 1 in the sum of two irrelevant tasks over the share of rows of ΔV that are kept."""
    figure, (panel,) = panels(1, 1, 3.6)
    dress(panel, "Rows of ΔV kept", "share of rows", "hinge loss on task 1", grid="both")
    own: list[Any] = picked(rows, part="phase", alpha=0.0, scale=1.0)
    for number, (word, label) in enumerate((("rows", "the largest"), ("smallest", "the smallest (control)"))):
        kept = sorted({float(row["kind"].split()[1]) for row in own if row["kind"].startswith(word)})
        losses = [_mean(own, "hinge_1", kind=f"{word} {keep:g}") for keep in kept]
        panel.plot(kept, losses, label=label, **series_style(number))
    legend(figure, 4.6, loc="outside lower center")
    return figure


def _mean(rows: Sequence[Row], key: str, **wanted: Any) -> float:
    return fmean(row[key] for row in picked(rows, **wanted))
