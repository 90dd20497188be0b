"""Training runs of the studies in the regime `iterative`, which alone depends on the merge methods."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.analysis.geometry import cosine_matrix
from mergeflow.checkpoints import read_state
from mergeflow.checkpoints.writer import link_or_copy, write_atomically
from mergeflow.training import Cost, FineTuneSettings, IterativeRun
from studies.lab.inputs import State
from tasks.project.stage import StageIO
from tasks.rounds import tune_round, write_last_round
from tasks.training import Workbench


def train_in_rounds(
    io: StageIO,
    bench: Workbench,
    tasks: Sequence[str],
    settings: FineTuneSettings,
    seed: int,
    folder: Path,
    result: Path,
) -> tuple[Cost, list[float]]:
    """Do all rounds; keep the last round's experts and start, every round's merge, and a row of measures for each.

    Args:
        folder: of the stage's scratch, where a killed run goes on.
        result: the folder that gets the experts, the start, the merges and the measures.

    Returns:
        The cost of all rounds, and the processor seconds of each.
    """
    rounds = IterativeRun(folder / "rounds", io.dep(layout.BASE_MODEL), tuple(tasks), settings, seed)
    rows, numbers = list[dict[str, Any]](), range(1, rounds.rounds + 1)
    for number in numbers:
        for task in rounds.waiting(number):
            tune_round(bench, rounds, number, task, partial(io.report, f"seed {seed}, round {number}, {task}"))
        row = folder / "rounds" / f"row_{number:03}.json"
        if not row.exists():
            write_atomically(row, json.dumps(_measure(rounds, number)))
        rounds.merge(number)
        rows.append(json.loads(row.read_text()))
    shutil.rmtree(result, ignore_errors=True)
    cost = write_last_round(bench, rounds, result / "experts")
    (result / "merged").mkdir()
    for number in numbers:
        link_or_copy(rounds.merged(number), result / "merged" / f"round_{number:03}.safetensors")
    shutil.copy(rounds.start(rounds.rounds), result / "start.safetensors")
    (result / "rounds.json").write_text(json.dumps(rows, indent=1) + "\n")
    spent = {n: [rounds.record(n, task)["cost"]["processor_seconds"] for task in tasks] for n in numbers}
    return cost, [sum(seconds) for seconds in spent.values()]


def _measure(rounds: IterativeRun, number: int) -> dict[str, Any]:
    """Return a round's geometry, from θ0 (τ) and from its start (δ), and the validation accuracy of its experts."""
    base, start = read_state(rounds.base), read_state(rounds.start(number))
    experts = {task: read_state(rounds.expert(number, task)) for task in rounds.tasks}
    records = {task: rounds.record(number, task)["epochs"][-1] for task in rounds.tasks}
    return {
        "round": number,
        "steps": max(record["steps"] for record in records.values()),
        "tasks": list(rounds.tasks),
        "cosine_tau": cosine_matrix([_minus(expert, base) for expert in experts.values()]),
        "cosine_delta": cosine_matrix([_minus(expert, start) for expert in experts.values()]),
        "expert_validation": {task: record["validation_accuracy"] for task, record in records.items()},
    }


def _minus(a: State, b: State) -> State:
    return {name: a[name] - b[name] for name in a}
