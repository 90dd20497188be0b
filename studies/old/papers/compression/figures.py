"""Figure of the study `compression`: accuracy that is kept over storage."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.intervals import curve
from tasks.plotting.palette import MUTED

Lines = Mapping[str, Sequence[tuple[float, Sequence[float]]]]


def storage_figure(suites: Mapping[int, Lines]) -> Figure:
    """Draw relative accuracy over storage, a panel per number of tasks; a rank's curve is a line, a mask a point.

    Args:
        suites: number of tasks → method → (storage in % of all experts, relative accuracy in % per seed).
    """
    figure, axes = panels(len(suites), 3, 3.7, sharey=True)
    for index, (panel, (count, lines)) in enumerate(zip(axes, suites.items(), strict=True)):
        dress(panel, f"{count} tasks", "with θ0, % of all experts", "relative accuracy, %" if index == 0 else "")
        for number, (label, points) in enumerate(lines.items()):
            style = {"linestyle": "-" if len(points) > 1 else "", "markersize": 5.5 if len(points) > 1 else 8}
            curve(panel, dict(points), f"_{label}" if index else label, number, **style)
        panel.axhline(100, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.1)
        panel.axhline(98, color=MUTED, linestyle=":", linewidth=1.1)
        panel.set_xscale("log")
        ticks = [
            tick for tick in (5, 10, 20, 40, 80, 160) if tick >= 0.8 * min(x for ps in lines.values() for x, _ in ps)
        ]
        panel.set_xticks([], minor=True)
        panel.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
