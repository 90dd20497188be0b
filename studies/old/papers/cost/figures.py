"""Figure of the study `cost`: accuracy over the images that training saw."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from tasks.plotting.drawing import HALF_WIDTH, dress, legend, panels
from tasks.plotting.intervals import curve


def cost_figure(points: Mapping[str, tuple[float, Sequence[float]]]) -> Figure:
    """Draw mean test accuracy over images trained on, a point per model.

    Args:
        points: model → (images, accuracy in % per seed).
    """
    figure, (panel,) = panels(1, 1, 4.4)
    dress(panel, "Accuracy and budget", "training images, thousands", "mean test accuracy, %", grid="both")
    for number, (label, (images, accuracy)) in enumerate(points.items()):
        curve(panel, {images / 1000: accuracy}, label, number, linestyle="", markersize=8)
    panel.margins(x=0.12, y=0.12)
    panel.set_xlim(left=0)
    legend(figure, HALF_WIDTH, loc="outside lower center")
    return figure
