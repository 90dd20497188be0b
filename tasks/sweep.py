"""Stage `sweep`: every candidate of one method, scored on validation."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.evaluation import CandidateScorer, score_of
from mergeflow.merging import configure
from tasks.project.parameters import candidates
from tasks.project.stage import StageIO
from tasks.vision import BASE, choose_device, expert_summary, load_encoder, load_images, load_states

Row = dict[str, Any]


def run(io: StageIO) -> None:
    """Write `outputs/sweeps/<method>.json`: each candidate's arguments, accuracy per task, mean and normalised mean."""
    score = open_scorer(io)
    rows: list[Row] = []
    grid = candidates(io.item, io.section(f"sweep.{io.item}"))
    for done, args in enumerate(grid, start=1):
        rows.append(score(args))
        io.report("candidates", done, len(grid))
    write_rows(io, io.out(layout.sweep(io.item)), rows)


def open_scorer(io: StageIO) -> Callable[[Mapping[str, Any]], Row]:
    """Return what scores one candidate of the stage's method on validation.

    Candidates that differ in `scale` alone share one direction when they follow each other, and candidates of any
    arguments share factorisations.
    """
    device = choose_device(io)
    tasks = list(io.section("tasks"))
    base, experts = load_states(io, tasks)
    encoder = load_encoder(io, io.path(BASE), device)
    data = {task: load_images(io, "validation", task, device) for task in tasks}
    known = individual(io)
    scorer = CandidateScorer(encoder, data, base, experts, batch_size=io.section("evaluation").batch_size)

    def score(args: Mapping[str, Any]) -> Row:
        accuracy = scorer.candidate(configure(io.item, args))
        return {"args": dict(args), **asdict(score_of(accuracy, known))}

    return score


def individual(io: StageIO) -> dict[str, float]:
    """Return the validation accuracy of each task's own expert."""
    return {task: expert_summary(io, task)["validation_accuracy"] for task in io.section("tasks")}


def write_rows(io: StageIO, path: Path, rows: list[Row]) -> None:
    """Write the scored candidates of the stage's method."""
    found = {"method": io.item, "split": "validation", "individual": individual(io), "candidates": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n")
