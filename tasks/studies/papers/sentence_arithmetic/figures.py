"""Figures of the study `sentence_arithmetic`, from its rows alone."""

from collections.abc import Sequence
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure

from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.intervals import curve
from tasks.studies.papers.analogy.results import ANALOGY, SUM, TRAINED
from tasks.studies.papers.sentence_arithmetic.measuring import (
    ADDED,
    ADDITION,
    AFTER,
    ALONE,
    ANALOGIES,
    AVERAGE,
    BASE,
    BEFORE,
    FITTED,
    JOINT,
    NEGATION,
    PAIR,
    RANDOM,
    TRAINED_HEADS,
    told,
)
from tasks.studies.papers.sentence_arithmetic.results import values
from tasks.studies.pieces import Row

_MEASURED = "accuracy or Matthews' correlation, %"


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw both tasks by every encoder, and before and after one is taken away; and the targets of the analogies.

    Args:
        rows: of all seeds.
    """
    pair = [told(task) for task in PAIR]
    heads = {BASE: FITTED} | dict.fromkeys((*ALONE.values(), AVERAGE, ADDED, JOINT), TRAINED_HEADS)
    added = {way: {"part": ADDITION, "way": way, "heads": own} for way, own in heads.items()}
    taken = {
        f"{start}, {way}": {"part": NEGATION, "start": start, "way": way, "heads": own}
        for start, own in ((BASE, FITTED), (JOINT, TRAINED_HEADS))
        for way in (BEFORE, AFTER, RANDOM)
    }
    targets = list(dict.fromkeys(row["task"] for row in rows if row["part"] == ANALOGIES))
    reached = {way: {"part": ANALOGIES, "way": way} for way in (BASE, "A", SUM, ANALOGY, TRAINED)}
    return {
        "addition": _drawn(rows, pair, added, "Two tasks by one encoder"),
        "negation": _drawn(rows, pair, taken, "Acceptability taken away"),
        "analogies": _drawn(rows, targets, reached, "Tasks that nobody trained"),
    }


def _drawn(rows: Sequence[Row], tasks: Sequence[str], ways: dict[str, dict[str, Any]], title: str) -> Figure:
    """Draw one panel: for each task the figure of every way, side by side."""
    figure, (panel,) = panels(1, 1, 3.2)
    dress(panel, title, "", _MEASURED)
    for number, (label, wanted) in enumerate(ways.items()):
        shift = (number - (len(ways) - 1) / 2) * 0.7 / len(ways)
        found = {place + shift: values(rows, task, **wanted) for place, task in enumerate(tasks)}
        curve(panel, found, label, number, linestyle="")
    panel.set_xticks(range(len(tasks)), labels=[fill(task, 14) for task in tasks])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
