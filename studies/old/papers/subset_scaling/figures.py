"""Figure of the study `subset_scaling`: accuracy over the number of merged tasks, and CART's lead."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, plain, series_style
from tasks.plotting.palette import MUTED

Curve = Mapping[int, tuple[float, float]]  # N → mean, half-width of its interval


def scaling_figure(curves: Mapping[str, Curve], leads: Mapping[str, Curve], zero_shot: Mapping[int, float]) -> Figure:
    """Draw normalised accuracy over N (the paper's Figure 7), and how far CART is ahead subset by subset.

    Args:
        curves: method → N → mean in % and half interval over subsets.
        leads: method → N → CART less the method, in points.
        zero_shot: the base's normalised accuracy in %.
    """
    figure, (left, right) = panels(2, 2, 3.9)
    dress(left, "Normalised accuracy", "merged tasks N", "test, %")
    dress(right, "CART's lead, subset by subset", "merged tasks N", "points")
    for number, (name, points) in enumerate(curves.items()):
        _curve(left, points, name, number)
        if name in leads:
            _curve(right, leads[name], f"_{name}", number)
    left.plot(list(zero_shot), list(zero_shot.values()), color=MUTED, linestyle=(0, (4, 3)), label="zero-shot")
    right.axhline(0, color=MUTED, linewidth=1.1)
    for panel in (left, right):
        panel.set_xticks(list(zero_shot))
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _curve(panel: Axes, points: Curve, label: str, number: int) -> None:
    centres, halves = zip(*points.values(), strict=True)
    bars = [half if half < float("inf") else 0.0 for half in halves]
    panel.errorbar(
        list(points), centres, yerr=bars, label=plain(label), capsize=2.5, elinewidth=1.0, **series_style(number)
    )
