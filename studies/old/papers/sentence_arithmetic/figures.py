"""Figures of the study `sentence_arithmetic`, from its rows alone."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure

from studies.old.papers.analogy.results import ANALOGY, SUM
from studies.old.papers.sentence_arithmetic.measuring import (
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
from studies.old.papers.sentence_arithmetic.results import values
from studies.old.papers.sentence_arithmetic.texts import TARGET
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, new_figure
from tasks.plotting.intervals import curve


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw both tasks by every encoder, and before and after one is taken away; and the target of the analogy.

    Args:
        rows: of all seeds.
    """
    pair = [told(task) for task in PAIR]
    heads = {BASE: FITTED} | dict.fromkeys((*ALONE.values(), AVERAGE, ADDED, JOINT), TRAINED_HEADS)
    reached = (BASE, "A", SUM, ANALOGY, f"{ANALOGY}, λ = 1")
    drawn = {
        "addition": (
            "Two tasks by one encoder",
            {task: {"part": ADDITION, "task": task} for task in pair},
            {way: {"way": way, "heads": own} for way, own in heads.items()},
        ),
        "negation": (
            "Acceptability taken away",
            {
                f"{start}: {task}": {"part": NEGATION, "start": start, "task": task, "heads": own}
                for start, own in ((BASE, FITTED), (JOINT, TRAINED_HEADS))
                for task in pair
            },
            {way: {"way": way} for way in (BEFORE, AFTER, RANDOM)},
        ),
        "analogy": (
            "A task that nobody trained",
            {told(TARGET): {"part": ANALOGIES}},
            {way: {"way": way} for way in reached},
        ),
    }
    return {name: _drawn(rows, *what) for name, what in drawn.items()}


def _drawn(
    rows: Sequence[Row], title: str, places: Mapping[str, dict[str, Any]], ways: Mapping[str, dict[str, Any]]
) -> Figure:
    """Draw one panel: at each place every way, side by side."""
    figure = new_figure(FULL_WIDTH, 3.4)
    panel = figure.subplots()
    dress(panel, title, "", "accuracy or correlation, %")
    for number, (label, way) in enumerate(ways.items()):
        beside = (number - (len(ways) - 1) / 2) * 0.7 / len(ways)
        found = {at + beside: values(rows, **place, **way) for at, place in enumerate(places.values())}
        curve(panel, found, label, number, linestyle="")
    panel.set_xticks(range(len(places)), labels=[fill(label, 18) for label in places])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
