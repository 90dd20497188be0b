"""Tables and findings of the study `sentence_arithmetic`, from its rows. The rules were written before the run."""

from collections.abc import Sequence
from functools import partial
from statistics import fmean
from typing import Any

from studies.old.claims import judge, paired
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
from studies.old.papers.sentence_arithmetic.texts import TARGET
from studies.old.results import Cell, Finding, StudyResult, Table, with_interval
from studies.old.rows import Row, by_seed, picked, tidy

BELOW, AHEAD, ABOVE_AVERAGE, AS_GOOD = 5.0, 5.0, 1.0, 2.0  # points, of two tasks by one encoder
LOST, STAYS = 10.0, 2.0  # points, of a task taken away
NEARER, ABOVE_BASE = 2.0, 5.0  # points, of the analogy
EXPERTS = "each by its own expert"
_SYSTEM = "P22"
_TASKS = [told(task) for task in PAIR]


def values(rows: Sequence[Row], task: str | None = None, **wanted: Any) -> list[float]:
    """Return figures on test, the mean over tasks, one number for each seed.

    Args:
        rows: of all seeds.
        task: this one alone.
        wanted: what else the rows have.
    """
    own = picked(rows, **wanted) if task is None else picked(rows, task=task, **wanted)
    return by_seed(own, lambda found: fmean(row["test"] for row in found))


def with_experts(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, and those of two encoders that each do their own task.

    Args:
        rows: of all seeds.
    """
    names = {told(task): way for task, way in ALONE.items()}
    kept = [row for row in rows if row["way"] != EXPERTS]
    own = [row for row in kept if row["part"] == ADDITION and row["way"] == names.get(row["task"])]
    return [*kept, *({**row, "way": EXPERTS} for row in own)]


def study_result(rows: Sequence[Row]) -> StudyResult:
    """Return the study's result.

    Args:
        rows: of all seeds.
    """
    rows = with_experts(rows)
    tables = [_addition_table(rows), _negation_table(rows), _analogy_table(rows)]
    return StudyResult(tables, [*_of_addition(rows), *_of_negation(rows), *_of_analogy(rows)], [], tidy(rows))


def _of_addition(rows: Sequence[Row]) -> list[Finding]:
    read = partial(values, rows, part=ADDITION)
    added = partial(read, way=ADDED, heads=TRAINED_HEADS)
    told_of = partial(judge, _SYSTEM, ours=True)
    mean = "mean over both tasks; λ by validation"
    claims = (
        ("is better than the base with heads fitted to it", BASE, f"by ≥ {AHEAD:g} points", AHEAD),
        ("is better than the average of the experts", AVERAGE, f"by ≥ {ABOVE_AVERAGE:g} point", ABOVE_AVERAGE),
        ("is as good as training on both tasks together", JOINT, f"at most {AS_GOOD:g} points behind", -AS_GOOD),
    )
    return [
        told_of(
            "One encoder, θ_0 + Δ_sentiment + λ Δ_acceptability, does both tasks with their experts' heads.",
            {f"{task}, less its expert": paired(added(task), read(task, way=EXPERTS)) for task in _TASKS},
            f"at most {BELOW:g} points below the expert on each",
            low=-BELOW,
        ),
        told_of(
            "It is better at both together than either expert.",
            {f"less {way} alone": paired(added(), read(way=way)) for way in ALONE.values()},
            f"by ≥ {AHEAD:g} points, {mean}",
            low=AHEAD,
        ),
        *(
            told_of(f"It {claim}.", {f"less {way}": paired(added(), read(way=way))}, f"{rule}, {mean}", low=low)
            for claim, way, rule, low in claims
        ),
        told_of(
            "The experts' heads read it as well as heads that are fitted to it.",
            {"fitted less trained heads": paired(read(way=ADDED, heads=FITTED), added())},
            f"at most {AS_GOOD:g} points less, {mean}",
            high=AS_GOOD,
        ),
    ]


def _of_negation(rows: Sequence[Row]) -> list[Finding]:
    sentiment, acceptability = _TASKS
    told_of = partial(judge, _SYSTEM, ours=True)

    def lost(start: str, way: str, task: str, heads: str) -> list[float]:
        """Return how much smaller the figure is than before, whatever its sign."""
        before, after = (
            [abs(one) for one in values(rows, task, part=NEGATION, start=start, way=which, heads=heads)]
            for which in (BEFORE, way)
        )
        return paired(before, after)

    found = []
    for start, heads in ((BASE, FITTED), (JOINT, TRAINED_HEADS)):
        found += [
            told_of(
                f"Taking λ Δ_acceptability away from {_FROM[start]} takes acceptability away.",
                {"lost": lost(start, AFTER, acceptability, heads)},
                f"≥ {LOST:g} points of Matthews' correlation; λ by validation",
                low=LOST,
            ),
            told_of(
                f"Taking it away from {_FROM[start]} leaves sentiment as it is.",
                {"lost": lost(start, AFTER, sentiment, heads)},
                f"at most {STAYS:g} points",
                high=STAYS,
            ),
        ]
    by_vector, by_chance = (lost(JOINT, way, acceptability, TRAINED_HEADS) for way in (AFTER, RANDOM))
    return [
        *found,
        told_of(
            "The direction does it, not the length: a random vector as long takes less away.",
            {"lost by Δ less by the random one": paired(by_vector, by_chance)},
            f"≥ {LOST:g} points; joint training",
            low=LOST,
        ),
        told_of(
            "The encoder forgets, not only its head: heads that are fitted to it before and after lose as well.",
            {"lost": lost(JOINT, AFTER, acceptability, FITTED)},
            f"≥ {LOST:g} points; joint training",
            low=LOST,
        ),
    ]


_FROM = {BASE: "the base", JOINT: "the encoder of joint training"}


def _of_analogy(rows: Sequence[Row]) -> list[Finding]:
    read = partial(values, rows, part=ANALOGIES)
    claims = (
        ("reaches a task that nobody trained better than Δ_A, the expert that is asked the same", "A", NEARER),
        ("is better on that task than the base", BASE, ABOVE_BASE),
        ("is better than Δ_A + Δ_B: taking Δ_C away is worth it", SUM, 0.0),
    )
    return [
        judge(
            _SYSTEM,
            f"Δ_A + (Δ_B − Δ_C) {claim} (questions × texts).",
            {f"less {way}": paired(read(way=ANALOGY), read(way=way))},
            f"by ≥ {low:g} points of Matthews' correlation; λ by validation",
            low=low,
            ours=way == SUM,
        )
        for claim, way, low in claims
    ]


def _addition_table(rows: Sequence[Row]) -> Table:
    ways = [
        (BASE, FITTED),
        *((way, TRAINED_HEADS) for way in (*ALONE.values(), AVERAGE, ADDED)),
        (ADDED, FITTED),
        *((way, TRAINED_HEADS) for way in (JOINT, EXPERTS)),
    ]
    lines = [
        {"encoder": way, "heads": heads, **_cells(rows, _TASKS, part=ADDITION, way=way, heads=heads)}
        for way, heads in ways
    ]
    return Table("Two tasks by one encoder: figures on test, %", lines)


def _negation_table(rows: Sequence[Row]) -> Table:
    lines: list[dict[str, Cell]] = []
    for start, way, heads in dict.fromkeys(
        (row["start"], row["way"], row["heads"]) for row in picked(rows, part=NEGATION)
    ):
        cells = _cells(rows, _TASKS, part=NEGATION, start=start, way=way, heads=heads)
        lines.append({"encoder": f"{start}, {way}", "heads": heads, **cells})
    return Table("Acceptability taken away: figures on test, %", lines)


def _analogy_table(rows: Sequence[Row]) -> Table:
    own = picked(rows, part=ANALOGIES)
    lines: list[dict[str, Cell]] = [
        {"encoder": way, **_cells(own, [told(TARGET)], way=way)} for way in dict.fromkeys(row["way"] for row in own)
    ]
    return Table("A task that nobody trained: figures on test, %", lines)


def _cells(rows: Sequence[Row], tasks: Sequence[str], **wanted: Any) -> dict[str, Cell]:
    """Return the cells of a line: the mean λ, each task's figure, and the mean over several."""
    scales = [row["scale"] for row in picked(rows, **wanted) if row.get("scale") is not None]
    return {
        "mean λ": f"{fmean(scales):.2f}" if scales else "",
        **{task: with_interval(values(rows, task, **wanted)) for task in tasks},
        **({"mean": with_interval(values(rows, **wanted))} if len(tasks) > 1 else {}),
    }
