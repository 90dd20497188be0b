"""Figures of the study `one_epoch`: tasks as bars, and accuracy over the epochs."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tasks.plotting.drawing import FULL_WIDTH, dress, legend, new_figure, panels
from tasks.plotting.intervals import Samples, curve
from tasks.plotting.palette import SERIES


def task_figure(bars: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw a group of bars per task (the paper's Figure 2).

    Args:
        bars: model → task → one value per seed, in %.
    """
    figure = new_figure(FULL_WIDTH, 3.6)
    axes = figure.subplots()
    dress(axes, "Experts and their merge", y="test accuracy, %")
    tasks, width = list(next(iter(bars.values()))), 0.8 / len(bars)
    for number, (label, over) in enumerate(bars.items()):
        places = [place + (number - (len(bars) - 1) / 2) * width for place in range(len(tasks))]
        hatch = "" if number % 2 == 0 else "///"
        axes.bar(
            places,
            [fmean(over[task]) for task in tasks],
            width * 0.92,
            label=label,
            color=SERIES[number // 2],
            alpha=0.95 if number % 2 == 0 else 0.6,
            hatch=hatch,
            edgecolor="white",
        )
    axes.set_xticks(range(len(tasks)), labels=tasks)
    axes.set_ylim(0, 105)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def curve_figure(over: Mapping[str, Samples], short: Mapping[str, Sequence[float]]) -> Figure:
    """Draw mean accuracy of experts and merge over the epochs of one run, and of a run of one epoch beside them.

    Args:
        over: model → epoch → one value per seed, in %.
        short: model → one value per seed, of the one-epoch run.
    """
    figure, axes = panels(len(over), 2, 3.4)
    for number, (panel, (model, samples)) in enumerate(zip(axes, over.items(), strict=True)):
        dress(panel, {"experts": "Proficiency: experts", "merged": "Mergeability: their merge"}[model], "epoch")
        curve(panel, samples, "within one schedule" if not number else "_within", 0)
        label = "one epoch, own schedule" if not number else "_own"
        curve(panel, {1: short[model]}, label, 1, linestyle="", markersize=9)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[0].set_ylabel("mean test accuracy, %")
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
