"""Figures of the study `unlearning`, from its rows alone."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from mergeflow.evaluation.averages import mean_interval
from studies.old.papers.unlearning.options import BOOKS, Options
from studies.old.papers.unlearning.results import WAYS, values
from studies.old.rows import Row
from suites.books.suite import GENERAL
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style


def figures(rows: Sequence[Row], options: Options) -> dict[str, Figure]:
    """Return the log-perplexity of each text over λ, for each kind of task vector.

    Args:
        rows: of all seeds.
        options: the study's choices.
    """
    figure, axes = panels(len(WAYS), len(WAYS), 3.4)
    scales = sorted(options.scales)
    for panel, (way, told) in zip(axes, WAYS.items(), strict=True):
        dress(panel, told.capitalize(), "λ", "log-perplexity, nats", grid="both")
        for number, book in enumerate((*BOOKS, GENERAL)):
            found = [mean_interval(values(rows, "test", way=way, book=book, scale=scale)) for scale in scales]
            means, halves = [one[0] for one in found], [one[1] for one in found]
            panel.errorbar(scales, means, halves, label=book, **series_style(number))
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return {"perplexity": figure}
