"""Figures of the study `structure`, from its rows alone."""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from studies.lab.reductions import FULL, LORA, PRUNED, SVD
from studies.old.papers.structure.results import SCORES, Scores
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.intervals import curve
from tasks.plotting.palette import MUTED

_BESIDE = 1.06  # from one kind's marks to the next one's, on a logarithmic axis


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Return the study's figures, name → figure.

    Args:
        rows: of all parts and seeds.
    """
    scores = Scores(rows)
    drawn = {"rank": ((SVD, LORA), "rank"), "pruned": (PRUNED, "share of the MLPs' numbers kept")}
    return {name: _over(scores, kinds, label) for name, (kinds, label) in drawn.items()}


def _over(scores: Scores, kinds: Sequence[str], label: str) -> Figure:
    """Draw each score over the amount that is kept, a curve with intervals for each kind, a level for the whole."""
    figure, axes = panels(len(SCORES), 3, 2.8)
    for panel, score in zip(axes, SCORES, strict=True):
        first = panel is axes[0]
        dress(panel, score.capitalize(), label, "points" if first else "", "both")
        whole = fmean(scores.of(FULL, None, score))
        panel.axhline(whole, color=MUTED, linestyle="--", linewidth=1, label="whole" if first else "_again")
        for number, kind in enumerate(kinds):
            aside = _BESIDE ** (number - (len(kinds) - 1) / 2)
            found = {aside * amount: scores.of(kind, amount, score) for amount in scores.amounts(kind)}
            curve(panel, found, kind if first else "_again", number)
        shown = sorted({amount for kind in kinds for amount in scores.amounts(kind)})
        panel.set_xscale("log")
        panel.set_xticks(shown, labels=[f"{amount:g}" for amount in shown])
        panel.set_xticks([], minor=True)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
