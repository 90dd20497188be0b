"""Figure of the study `merge_frequency`: merged accuracy over N, and over the steps."""

from collections.abc import Mapping

from matplotlib.figure import Figure

from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.intervals import Samples, curve, round_axis


def frequency_figure(curves: Mapping[str, Samples], over: Mapping[str, Samples]) -> Figure:
    """Draw the final merge over N beside the merges of some runs over their steps.

    Args:
        curves: rule → N → test accuracy in %, one value per seed.
        over: run → steps → validation accuracy in %, one value per seed.
    """
    figure, (final, course) = panels(2, 2, 3.6)
    dress(final, "After the whole budget", "rounds N", "mean test accuracy, %")
    for number, (kind, samples) in enumerate(curves.items()):
        curve(final, samples, kind, number)
    round_axis(final, sorted({int(n) for samples in curves.values() for n in samples}))
    dress(course, "On the way", "steps per task", "mean validation accuracy, %")
    for number, (name, points) in enumerate(over.items(), start=len(curves)):
        curve(course, points, name, number, markersize=4)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
