"""Stage `sweep`: every candidate of one method, scored on validation."""

import json
from typing import Any

import torch

from mergeflow.evaluation import accuracies, mean, normalised
from mergeflow.merging import FactorCache, configure, prepare
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
    batch_size = io.section("evaluation").batch_size
    individual = {task: expert_summary(io, task)["validation_accuracy"] for task in tasks}
    rows: list[dict[str, Any]] = []
    grid = candidates(io.item, io.section(f"sweep.{io.item}"))
    cache, direction, prepared_for = FactorCache(), None, None
    for done, args in enumerate(grid, start=1):
        call = configure(io.item, args)
        if direction is None or prepared_for != call.without_scale():
            direction, prepared_for = prepare(call, base, experts, cache=cache), call.without_scale()
        with torch.inference_mode():
            encoder.load_encoder_state(direction.at(call.scale))
        accuracy = accuracies(encoder, data, batch_size)
        rows.append(
            {"args": args, "accuracy": accuracy, "mean": mean(accuracy), "normalised": normalised(accuracy, individual)}
        )
        io.report("candidates", done, len(grid))
    found = {"method": io.item, "split": "validation", "individual": individual, "candidates": rows}
    io.out(f"outputs/sweeps/{io.item}.json").write_text(json.dumps(found, indent=1) + "\n")
