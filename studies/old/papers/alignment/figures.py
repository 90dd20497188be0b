"""Figures of the study `alignment`: the cosines of task vectors and of increments, over N and over rounds."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, legend, new_figure, panels
from tasks.plotting.palette import INK, MUTED, SERIES

Boxes = Mapping[int, Sequence[float]]


def final_figure(tau: Boxes, delta: Boxes) -> Figure:
    """Draw the pairwise cosines of the last round as boxes over N (the paper's Figure 5).

    Args:
        tau, delta: N → all pairs of all seeds.
    """
    figure, (panel,) = panels(1, 1, 3.7)
    dress(panel, "After the last round", "rounds N", "cosine")
    places = list(range(len(tau)))
    _boxes(panel, places, list(tau.values()), 0, "task vectors τ")
    _boxes(panel, places, list(delta.values()), 1, "increments δ")
    panel.set_xticks(places, labels=[str(number) for number in tau])
    panel.set_ylim(-0.2, 1.05)
    legend(figure, 5, loc="outside lower center")
    return figure


def rounds_figure(runs: Mapping[str, tuple[Boxes, Boxes]]) -> Figure:
    """Draw the pairwise cosines over the steps, a panel per run (the paper's Figure 11).

    Args:
        runs: title → (τ, δ), each steps at the end of a round → all pairs of all seeds.
    """
    figure, axes = panels(len(runs), 2, 3.1, sharey=True)
    for index, (panel, (title, (tau, delta))) in enumerate(zip(axes, runs.items(), strict=True)):
        dress(panel, title, "steps per task", "cosine" if index % 2 == 0 else "")
        places = list(range(len(tau)))
        _boxes(panel, places, list(tau.values()), 0, "" if index else "task vectors τ")
        _boxes(panel, places, list(delta.values()), 1, "" if index else "increments δ")
        shown = [place for place in places if len(places) <= 8 or place % 3 == 0 or place == places[-1]]
        panel.set_xticks(shown, labels=[str(list(tau)[place]) for place in shown])
    axes[0].set_ylim(-0.2, 1.05)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def matrix_figure(tasks: Sequence[str], matrices: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Draw cosine matrices beside each other (the paper's Figure 10), mean over seeds."""
    figure = new_figure(FULL_WIDTH, 4.4)
    axes = figure.subplots(1, len(matrices), squeeze=False)[0]
    for index, (panel, (title, matrix)) in enumerate(zip(axes, matrices.items(), strict=True)):
        dress(panel, title, grid="x")
        panel.grid(visible=False)
        panel.imshow(matrix, cmap="Blues", vmin=0, vmax=1)
        panel.set_xticks(range(len(tasks)), labels=list(tasks), rotation=40, ha="right")
        panel.set_yticks(range(len(tasks)), labels=list(tasks) if index == 0 else [])
        for row, line in enumerate(matrix):
            for column, value in enumerate(line):
                colour = "white" if value > 0.6 else INK
                panel.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=SMALL - 1, color=colour)
    return figure


def _boxes(panel: Axes, places: Sequence[int], samples: Sequence[Sequence[float]], number: int, label: str) -> None:
    """Draw series `number` of two as boxes; whiskers reach the extremes."""
    shift = 0.2 if number else -0.2
    panel.bxp(
        [_box(values) for values in samples],
        positions=[place + shift for place in places],
        widths=0.32,
        showfliers=False,
        patch_artist=True,
        boxprops={"facecolor": SERIES[number], "edgecolor": SERIES[number], "alpha": 0.75},
        medianprops={"color": INK, "linewidth": 1.2},
        whiskerprops={"color": MUTED},
        capprops={"color": MUTED},
    )
    panel.bar([0], [0], color=SERIES[number], alpha=0.75, label=label or "_hidden")


def _box(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return {"whislo": at(0), "q1": at(0.25), "med": at(0.5), "q3": at(0.75), "whishi": at(1)}
