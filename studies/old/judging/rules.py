"""The rules of the studies, applied to tidy rows alone: the verdicts of a record without the work that made it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mergeflow.errors import MergeflowError
from studies.old.judging import cart, merging
from studies.old.judging.notes import NOTES
from studies.old.judging.pieces import Rows, grouped
from studies.old.papers.adviser import results as adviser
from studies.old.papers.adviser_suites import results as adviser_suites
from studies.old.papers.analogy import results as analogy
from studies.old.papers.coloured_digits import results as coloured_digits
from studies.old.papers.laboratory import results as laboratory
from studies.old.papers.language_arithmetic import results as language_arithmetic
from studies.old.papers.linearity_averages import study as linearity_averages
from studies.old.papers.linearity_controls import results as linearity_controls
from studies.old.papers.linearity_edits import study as linearity_edits
from studies.old.papers.linearity_experts import results as linearity_experts
from studies.old.papers.linearity_matching import results as linearity_matching
from studies.old.papers.linearity_pairs import results as linearity_pairs
from studies.old.papers.linearity_spawning import study as linearity_spawning
from studies.old.papers.linearity_stitches import study as linearity_stitches
from studies.old.papers.linearity_texts import results as linearity_texts
from studies.old.papers.linearity_why import study as linearity_why
from studies.old.papers.mergeability import results as mergeability
from studies.old.papers.mergeability_suites import results as mergeability_suites
from studies.old.papers.sentence_arithmetic import results as sentence_arithmetic
from studies.old.papers.structure import results as structure
from studies.old.papers.unlearning import results as unlearning
from studies.old.papers.unseen_tasks import results as unseen_tasks
from studies.old.results import Finding
from studies.old.rows import Row, picked
from tasks.project.files import read_yaml
from tasks.project.stage import CHOICES
from tasks.project.studies import find_study_modules, load_declaration

Rule = Callable[[Rows, Any], list[Finding]]


def _by_rows(rule: Callable[[list[Row]], list[Finding]]) -> Rule:
    """Return a rule that asks for no choices."""
    return lambda rows, options: rule(list(rows))


def _of_adviser(rows: Rows) -> list[Finding]:
    return adviser.findings(*(picked(rows, part=part) for part in ("sets", "edits")))


def _by_part(rows: Rows) -> dict[str, list[Row]]:
    return {part: own for (part,), own in grouped(rows, "part").items()}


def _of_mergeability_suites(rows: Rows, options: Any) -> list[Finding]:
    """The pairs of a seed stand in the order of the tasks, of which a suite has the first so many."""
    tasks = list(dict.fromkeys(task for row in rows for task in row["pair"].split(" – ")))
    suites = {count: tasks[:count] for count in sorted(options.counts)}
    return mergeability_suites.findings(rows, suites, options.runs)


def _of_controls(rows: Rows) -> list[Finding]:
    labels = [row for row in rows if "labels" in row["combination"]]
    return linearity_controls.findings({"matching": [row for row in rows if row not in labels], "labels": labels})


RULES: Mapping[str, Rule] = {
    "adaptation": _by_rows(cart.of_adaptation),
    "adviser": _by_rows(_of_adviser),
    "adviser_regimes": _by_rows(adviser_suites.findings),
    "adviser_suites": _by_rows(adviser_suites.findings),
    "alignment": merging.of_alignment,
    "analogy": _by_rows(analogy.findings),
    "bases": merging.of_bases,
    "cart_landscape": _by_rows(cart.of_cart_landscape),
    "coloured_clip": _by_rows(coloured_digits.findings),
    "coloured_clip_head": _by_rows(coloured_digits.findings),
    "coloured_digits": _by_rows(coloured_digits.findings),
    "compression": lambda rows, options: cart.of_compression(rows, options.target),
    "cost": _by_rows(merging.of_cost),
    "equivalence": _by_rows(merging.of_equivalence),
    "glue": _by_rows(merging.of_glue),
    "gradients": merging.of_gradients,
    "interference": merging.of_interference,
    "laboratory": lambda rows, options: laboratory.study_result(rows, options).findings,
    "landscape": merging.of_landscape,
    "language_arithmetic": _by_rows(lambda rows: language_arithmetic.study_result(rows).findings),
    "linearity_averages": _by_rows(lambda rows: linearity_averages.findings(**_by_part(rows))),
    "linearity_controls": _by_rows(_of_controls),
    "linearity_edits": lambda rows, options: linearity_edits.findings(list(rows), options.scale, options.scales),
    "linearity_experts": lambda rows, options: linearity_experts.findings(
        _by_part(rows), options.scale, options.scales
    ),
    "linearity_matching": _by_rows(linearity_matching.findings),
    "linearity_pairs": _by_rows(lambda rows: linearity_pairs.findings(_by_part(rows))),
    "linearity_spawning": lambda rows, options: linearity_spawning.findings(**_by_part(rows), options=options),
    "linearity_stitches": _by_rows(linearity_stitches.findings),
    "linearity_texts": lambda rows, options: linearity_texts.findings(_by_part(rows), options.scale, options.scales),
    "linearity_why": _by_rows(linearity_why.findings),
    "many_tasks": lambda rows, options: cart.of_many_tasks(
        rows, {name: one.label for name, one in options.together.items()}
    ),
    "merge_frequency": _by_rows(merging.of_merge_frequency),
    "mergeability": lambda rows, options: mergeability.findings(rows, options.runs, options.iterative),
    "mergeability_suites": _of_mergeability_suites,
    "mima": merging.of_mima,
    "one_epoch": merging.of_one_epoch,
    "projection": _by_rows(merging.of_projection),
    "rank_curve": _by_rows(cart.of_rank_curve),
    "sentence_arithmetic": _by_rows(lambda rows: sentence_arithmetic.study_result(rows).findings),
    "structure": _by_rows(structure.findings),
    "structure_suite": _by_rows(structure.findings),
    "subset_scaling": lambda rows, options: cart.of_subset_scaling(rows, options.starts),
    "unlearning": lambda rows, options: unlearning.study_result(rows, options).findings,
    "unseen_tasks": _by_rows(unseen_tasks.findings),
}
"""Study → what its rules find in its tidy rows and choices."""


def judge_rows(root: Path, study: str, rows: Rows) -> list[Finding]:
    """Return what the rules of a study find in its tidy rows.

    Args:
        root: the project whose `studies/params.yaml` has the study's choices.
        study: its name.
        rows: as the study leaves them.

    Raises:
        MergeflowError: the study is not one of mergeflow's, so that nothing leads from its rows to its rules.
    """
    if study not in RULES:
        raise MergeflowError(
            f"study {study} cannot be judged from its rows, which only mergeflow's own studies can: measure it, "
            f"`mergeflow study {study}`."
        )
    return RULES[study](rows, choices(root, study))


def notes_of(root: Path, study: str, rows: Rows) -> list[str] | None:
    """Return what decides a study's findings where its rows tell it; None where they do not.

    Args:
        root: the project whose `studies/params.yaml` has the study's choices.
        study: its name.
        rows: as the study leaves them.
    """
    return NOTES[study](rows, choices(root, study)) if study in NOTES else None


def choices(root: Path, study: str) -> Any:
    """Return a study's choices.

    Args:
        root: the project whose `studies/params.yaml` has them.
        study: its name.
    """
    written = read_yaml(root / CHOICES)["studies"][study]
    return load_declaration(root, find_study_modules(root)[study]).options.model_validate(written)
