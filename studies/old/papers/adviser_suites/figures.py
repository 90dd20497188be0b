"""Figures of the studies of the adviser on suites, from their rows alone."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from studies.old.papers.adviser.results import PREDICTIONS
from studies.old.papers.adviser_suites.measuring import RANGES
from studies.old.papers.adviser_suites.results import NAMES
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style
from tasks.plotting.palette import INK

_SHOWN = 1.6  # of the grid's λ


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Return the study's figures, name → figure.

    Args:
        rows: of all parts.
    """
    sets, edits = ([row for row in rows if row["part"] == part] for part in ("set", "edit"))
    return {"scales": scales_figure(sets), **({"costs": costs_figure(edits)} if edits else {})}


def scales_figure(sets: Sequence[Row]) -> Figure:
    """Draw the best λ of the grid over the middle of each predicted range, a point for each set.

    Args:
        sets: rows of added tasks.
    """
    figure, axes = panels(2, 2, 3.6, sharey=True)
    for panel, way in zip(axes, RANGES, strict=True):
        first = panel is axes[0]
        dress(
            panel,
            NAMES[way].capitalize(),
            "middle of the predicted range",
            "best λ of the grid" if first else "",
            "both",
        )
        for number, size in enumerate(sorted({row["size"] for row in sets})):
            own = [row for row in sets if row["size"] == size and row[f"low_{way}"] is not None]
            middles = [(row[f"low_{way}"] * row[f"high_{way}"]) ** 0.5 for row in own]
            _points(panel, middles, [row["scale_grid"] for row in own], number, f"{size} tasks" if first else "_again")
        panel.axline((0, 0), slope=1, color=INK, linewidth=0.8)
        panel.set(xlim=(0, 2 * _SHOWN), ylim=(0, _SHOWN))
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def costs_figure(edits: Sequence[Row]) -> Figure:
    """Draw what a task loses when another is unlearned, over each prediction, a colour for each run.

    Args:
        edits: rows of unlearning.
    """
    figure, axes = panels(len(PREDICTIONS), 2, 3.0, sharey=True)
    for index, (panel, (key, name)) in enumerate(zip(axes, PREDICTIONS.items(), strict=True)):
        dress(panel, "", name, "points lost" if index % 2 == 0 else "", "both")
        for number, run in enumerate(sorted({row["run"] for row in edits})):
            own = [row for row in edits if row["run"] == run]
            _points(panel, [r[key] for r in own], [r["loss"] for r in own], number, run if index == 0 else "_again")
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _points(panel: Axes, x: list[float], y: list[float], number: int, label: str) -> None:
    style = {**series_style(number), "linestyle": "", "markersize": 3, "alpha": 0.5}
    panel.plot(x, y, label=label, **style)
