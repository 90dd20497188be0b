"""Stage `sweep`: every candidate of one method, scored on validation."""

import json
from dataclasses import asdict
from typing import Any

from mergeflow.evaluation import CandidateScorer, score_of
from mergeflow.merging import configure
from tasks.parameters import candidates
from tasks.runner import StageIO
from tasks.vision import BASE, choose_device, expert_summary, load_encoder, load_images, load_states


def run(io: StageIO) -> None:
    """Write `outputs/sweeps/<method>.json`: arguments, accuracy per task, mean and normalised mean of each candidate.

    Candidates that differ in `scale` alone share one direction, and candidates of any arguments share factorisations.
    """
    device = choose_device(io)
    tasks = list(io.section("tasks"))
    base, experts = load_states(io, tasks)
    encoder = load_encoder(io, BASE, device)
    data = {task: load_images(io, "validation", task, device) for task in tasks}
    individual = {task: expert_summary(io, task)["validation_accuracy"] for task in tasks}
    scorer = CandidateScorer(encoder, data, base, experts, batch_size=io.section("evaluation").batch_size)
    rows: list[dict[str, Any]] = []
    grid = candidates(io.item, io.section(f"sweep.{io.item}"))
    for done, args in enumerate(grid, start=1):
        accuracy = scorer.candidate(configure(io.item, args))
        rows.append({"args": args, **asdict(score_of(accuracy, individual))})
        io.report("candidates", done, len(grid))
    found = {"method": io.item, "split": "validation", "individual": individual, "candidates": rows}
    io.out(f"outputs/sweeps/{io.item}.json").write_text(json.dumps(found, indent=1) + "\n")
