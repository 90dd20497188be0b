"""Figures of the study `mergeability`: what was predicted beside what was lost, and the course over rounds."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from studies.old.papers.mergeability.results import LAST, PREDICTIONS, errors_over_rounds
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, HALF_WIDTH, dress, legend, panels, series_style
from tasks.plotting.intervals import curve, round_axis

SHOWN = (LAST, "cosine of task vectors", "distance", "sign conflict")


def figures(rows: Sequence[Row], runs: Mapping[str, str], iterative: Mapping[int, str]) -> dict[str, Figure]:
    """Return the study's figures.

    Args:
        rows: a row for each run, seed and pair.
        runs: run → label, those with points.
        iterative: N → run.
    """
    drawn = {"predictions": predictions_figure(rows, runs)}
    return drawn | ({"rounds": rounds_figure(errors_over_rounds(rows, iterative))} if iterative else {})


def predictions_figure(rows: Sequence[Row], runs: Mapping[str, str]) -> Figure:
    """Draw the loss of merging over each prediction, a point for each pair and seed, a colour for each way of training.

    Args:
        rows: a row for each run, seed and pair.
        runs: run → label.
    """
    figure, axes = panels(len(SHOWN), 2, 3.0, sharey=True)
    for index, (panel, name) in enumerate(zip(axes, SHOWN, strict=True)):
        label = f"{name}, negated" if name.startswith("cosine") else name
        dress(panel, "", label, "loss of merging, points" if index % 2 == 0 else "")
        for number, (run, told) in enumerate(runs.items()):
            own = [row for row in rows if row["run"] == run]
            style = series_style(number) | {"linestyle": "", "markersize": 3.5, "markeredgewidth": 0.3}
            told = told if index == 0 else "_hidden"
            panel.plot([PREDICTIONS[name](row) for row in own], [row["loss"] for row in own], label=told, **style)
    axes[0].set_xscale("log")
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def rounds_figure(errors: Mapping[int, Sequence[float]]) -> Figure:
    """Draw the mean CTL error of the last experts over the number of rounds.

    Args:
        errors: N → one value for each seed.
    """
    figure, (panel,) = panels(1, 1, 3.0)
    dress(panel, "Last experts of merge-and-tune", "rounds N", LAST)
    curve(panel, errors, "mean of all pairs", 0)
    round_axis(panel, list(errors))
    legend(panel, HALF_WIDTH, loc="best")
    return figure
