"""Stage `sweep`: every candidate of one method, scored on validation."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.documents import Candidate, Sweep, write_document
from mergeflow.evaluation import CandidateScorer, mean, normalised
from mergeflow.search.candidates import Journal, Strategy, climb, grid, grid_of, remembered, score_all
from tasks.models import choose_device, expert_summary, load_for_experts, load_model, load_states
from tasks.project.stage import StageIO

JOURNAL = "candidates.jsonl"


def run(io: StageIO) -> None:
    """Write `outputs/sweeps/<method>.json`: each candidate's arguments, accuracy per task, mean and normalised mean."""
    values = io.section(f"sweep.{io.item}")
    rows, total = list[Candidate](), len(grid_of(io.item, values))
    for row in score_candidates(io, grid(io.item, values)):
        rows.append(row)
        io.report("candidates", len(rows), total)
    write_rows(io, io.out(layout.sweep(io.item)), rows)


def sweep_near(io: StageIO, start: Mapping[str, Any]) -> None:
    """Write `outputs/sweeps/<method>.json` with the candidates that a climb from `start` has scored.

    Args:
        start: the arguments to start from; arguments that the grid does not name play no part.
    """
    with io.holds:
        rows = list(score_candidates(io, climb(io.section(f"sweep.{io.item}"), start)))
        write_rows(io, io.root / layout.sweep(io.item), rows)


def score_candidates(io: StageIO, strategy: Strategy) -> Iterator[Candidate]:
    """Yield the candidates of the stage's method that a strategy asks for, scored on validation.

    Each score is in the journal before the next candidate is merged, so a killed stage goes on after the last one, and
    one whose grid has grown scores what is new.
    Candidates that differ in `scale` alone share one direction when they follow each other, and candidates of any
    arguments share factorisations.
    """
    experts = individual(io)
    with Journal(io.journals / JOURNAL) as journal:
        journal.begin({"individual": experts})  # the folder belongs to one state of all other inputs
        score = remembered(open_scorer(io).candidate, journal)
        for candidate in score_all(io.item, strategy, score, lambda accuracy: normalised(accuracy, experts)):
            reached, accuracy = normalised(candidate.scores, experts), candidate.scores
            yield {"args": candidate.varied, "accuracy": accuracy, "mean": mean(accuracy), "normalised": reached}


def open_scorer(io: StageIO) -> CandidateScorer:
    device = choose_device(io)
    tasks = list(io.section("tasks"))
    base, experts = load_states(io, tasks)
    model = load_model(io, layout.BASE_MODEL, device)
    data = load_for_experts(io, "validation", tasks, device)
    return CandidateScorer(model, data, base, experts, **dict(io.section("evaluation")))


def individual(io: StageIO) -> dict[str, float]:
    """Return the validation accuracy of each task's own expert."""
    return {task: expert_summary(io, task)["validation_accuracy"] for task in io.section("tasks")}


def write_rows(io: StageIO, path: Path, rows: list[Candidate]) -> None:
    sweep: Sweep = {"method": io.item, "split": "validation", "individual": individual(io), "candidates": rows}
    write_document(path, sweep)
