"""Figures of the study `adviser`, from its rows alone."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from studies.old.papers.adviser.results import PREDICTIONS
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style
from tasks.plotting.palette import INK


def figures(sets: Sequence[Row], edits: Sequence[Row]) -> dict[str, Figure]:
    """Return the study's figures, name → figure."""
    return {"scales": scales_figure(sets), "costs": costs_figure(edits)}


def scales_figure(sets: Sequence[Row]) -> Figure:
    """Draw the best λ of the grid over the middle of each predicted range, a point for each set."""
    figure, axes = panels(2, 2, 3.6, sharey=True)
    for panel, (way, name) in zip(axes, {"theory": "The theory", "lengths": "Lengths"}.items(), strict=True):
        dress(panel, name, "middle of the predicted range", "best λ of the grid" if panel is axes[0] else "", "both")
        for number, steps in enumerate(sorted({row["steps"] for row in sets})):
            own = [row for row in sets if row["steps"] == steps and row[f"low_{way}"] is not None]
            middles = [(row[f"low_{way}"] * row[f"high_{way}"]) ** 0.5 for row in own]
            style = {**series_style(number), "linestyle": "", "markersize": 3, "alpha": 0.5}
            label = f"{steps} steps" if panel is axes[0] else "_again"
            panel.plot(middles, [row["scale_grid"] for row in own], label=label, **style)
        panel.axline((0, 0), slope=1, color=INK, linewidth=0.8)
        panel.set(xlim=(0, 3), ylim=(0, 2.1))
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def costs_figure(edits: Sequence[Row]) -> Figure:
    """Draw what task 1 loses when task 2 is taken away, over each prediction."""
    figure, axes = panels(len(PREDICTIONS), 2, 3.0, sharey=True)
    for index, (panel, (key, name)) in enumerate(zip(axes, PREDICTIONS.items(), strict=True)):
        dress(panel, "", name, "points lost on task 1" if index % 2 == 0 else "", "both")
        for number, steps in enumerate(sorted({row["steps"] for row in edits})):
            own = [row for row in edits if row["steps"] == steps]
            style = {**series_style(number), "linestyle": "", "markersize": 3, "alpha": 0.5}
            label = f"{steps} steps" if index == 0 else "_again"
            panel.plot([row[key] for row in own], [row["loss"] for row in own], label=label, **style)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
