"""Figures of the study `mima`: accuracy, gap and tasks over the number of rounds N."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, plain
from tasks.plotting.intervals import Samples, curve, round_axis
from tasks.plotting.palette import MUTED

_TUNED = {
    "experts": "experts, each on its task",
    "average": "average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
}


def accuracy_figure(curves: Mapping[str, Samples], zero_shot: float) -> Figure:
    """Draw mean test accuracy over N, with λ from validation and without (the paper's Figure 4).

    Args:
        curves: model → N → one value per seed, in %.
        zero_shot: the base's accuracy, in %.
    """
    figure, (tuned, fixed) = panels(2, 2, 3.7, sharey=True)
    dress(tuned, "λ from validation", "rounds N", "mean test accuracy, %")
    for number, (name, label) in enumerate(_TUNED.items()):
        curve(tuned, curves[name], label, number)
    dress(fixed, "no validation", "rounds N")
    curve(fixed, curves["average"], "_average", 1)
    for number, name in enumerate((name for name in curves if name not in _TUNED), start=2):
        curve(fixed, curves[name], name.replace("_", " "), number, linestyle=":")
    for panel in (tuned, fixed):
        panel.axhline(
            zero_shot,
            color=MUTED,
            linestyle=(0, (4, 3)),
            linewidth=1.1,
            label="zero-shot" if panel is tuned else "_zero",
        )
        round_axis(panel, sorted(int(n) for n in curves["average"]))
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def gap_figure(mean: Samples, tasks: Mapping[str, Samples]) -> Figure:
    """Draw expert − average in points over N, mean and per task (the paper's Figure 6)."""
    figure, (whole, each) = panels(2, 2, 3.7)
    dress(whole, "Single-task gap, mean over tasks", "rounds N", "expert − average, points")
    curve(whole, mean, "mean", 0)
    whole.axhline(2, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
    dress(each, "… per task", "rounds N")
    for number, (task, samples) in enumerate(tasks.items()):
        curve(each, {n: [sum(v) / len(v)] for n, v in samples.items()}, task, number)
    for panel in (whole, each):
        round_axis(panel, sorted(int(n) for n in mean))
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def task_figure(accuracy: Mapping[str, Mapping[str, Samples]], base: Mapping[str, float]) -> Figure:
    """Draw every task's expert and average over N (the paper's Figures 8 and 9).

    Args:
        accuracy: `experts` and `average` → task → N → one value per seed, in %.
        base: task → zero-shot accuracy, in %.
    """
    figure, axes = panels(len(base), 4, 2.6, sharey=True)
    for index, (panel, task) in enumerate(zip(axes, base, strict=True)):
        dress(panel, plain(task), "rounds N" if index >= len(base) - 4 else "", "accuracy, %" if index % 4 == 0 else "")
        curve(panel, accuracy["experts"][task], "expert" if not index else "_expert", 0)
        curve(panel, accuracy["average"][task], "average" if not index else "_average", 1)
        panel.axhline(
            base[task], color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1, label="zero-shot" if not index else "_zero"
        )
        round_axis(panel, sorted(int(n) for n in accuracy["average"][task]))
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
