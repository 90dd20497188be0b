"""Stage `train` of the studies: one way of fine-tuning, on the project's tasks, for every seed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mergeflow import layout
from mergeflow.analysis.geometry import cosine_matrix
from mergeflow.checkpoints import open_checkpoint
from mergeflow.training import Cost, FineTuneSettings, IterativeRun
from tasks.project.stage import StageIO
from tasks.training import Workbench, train, tune_round, write_last_round

PARAMS = "studies/params.yaml"
State = dict[str, Tensor]


def run(io: StageIO) -> None:
    """Write `outputs/studies/runs/<name>/seed_<s>`: `experts/<task>` or `model`, and for an iterative run its rounds.

    Every piece of training is kept in the scratch folder until all are there, so a killed run goes on where it was.
    """
    run = _asked(io)
    seeds, bench = io.section(f"{PARAMS}:seeds"), Workbench.open(io)
    folder = io.out(layout.study_run(io.item))
    costs: dict[str, dict[str, Any]] = {}
    for seed in seeds:
        kept = io.scratch / f"seed_{seed}"
        work = _iterative if run.settings.regime == "iterative" else _independent
        costs[f"seed_{seed}"] = work(io, bench, run, seed, kept).as_json()
        shutil.copytree(kept / "result", folder / f"seed_{seed}")
    io.costs["training"] = costs


@dataclass(frozen=True)
class Asked:
    """What a run asks for: its tasks, in order, and how they are tuned."""

    tasks: list[str]
    settings: FineTuneSettings


def _asked(io: StageIO) -> Asked:
    """Return the stage's run of studies/params.yaml."""
    run = io.section(f"{PARAMS}:runs.{io.item}")
    return Asked(list(io.section("tasks"))[: run.tasks], run.finetune)


def _independent(io: StageIO, bench: Workbench, run: Asked, seed: int, kept: Path) -> Cost:
    """Train each task's expert, or one joint model."""
    settings, total = run.settings, Cost()
    joint = settings.regime == "joint"
    pieces = {"model": run.tasks} if joint else {f"experts/{task}": [task] for task in run.tasks}
    for name, members in pieces.items():
        target = kept / "result" / name
        if not target.exists():
            part = kept / "part"
            shutil.rmtree(part, ignore_errors=True)
            scratch = kept / "state" / name
            cost = train(bench, members, settings, seed, scratch, part, _progress(io, f"seed {seed}, {name}"))
            (kept / f"{target.name}.cost.json").write_text(json.dumps(vars(cost)))
            target.parent.mkdir(parents=True, exist_ok=True)
            part.rename(target)
            shutil.rmtree(scratch)
        total += Cost(**json.loads((kept / f"{target.name}.cost.json").read_text()))
    return total


def _iterative(io: StageIO, bench: Workbench, run: Asked, seed: int, kept: Path) -> Cost:
    """Do all rounds; keep the last round's experts and start, every round's merge, and a row of measures for each."""
    rounds = IterativeRun(kept / "rounds", io.dep(layout.BASE_MODEL), tuple(run.tasks), run.settings, seed)
    rows: list[dict[str, Any]] = []
    for number in range(1, rounds.rounds + 1):
        for task in rounds.waiting(number):
            tune_round(bench, rounds, number, task, _progress(io, f"seed {seed}, round {number}, {task}"))
        row = kept / "rounds" / f"row_{number:03}.json"
        if not row.exists():
            measures = _measure(bench, rounds, number)
            row.write_text(json.dumps(measures))
        rounds.merge(number)
        rows.append(json.loads(row.read_text()))
    result = kept / "result"
    shutil.rmtree(result, ignore_errors=True)
    cost = write_last_round(bench, rounds, result / "experts")
    (result / "merged").mkdir()
    for number in range(1, rounds.rounds + 1):
        shutil.copy(rounds.merged(number), result / "merged" / f"round_{number:03}.safetensors")
    shutil.copy(rounds.start(rounds.rounds), result / "start.safetensors")
    (result / "rounds.json").write_text(json.dumps(rows, indent=1) + "\n")
    return cost


def _measure(bench: Workbench, rounds: IterativeRun, number: int) -> dict[str, Any]:
    """Return a round's geometry, from θ0 (τ) and from its start (δ), and the validation accuracy of its experts."""
    base, start = _load(rounds.base), _load(rounds.start(number))
    experts = {task: _load(rounds.expert(number, task)) for task in rounds.tasks}
    records = {task: rounds.record(number, task)["epochs"][-1] for task in rounds.tasks}
    return {
        "round": number,
        "steps": max(record["steps"] for record in records.values()),
        "tasks": list(rounds.tasks),
        "cosine_tau": cosine_matrix([_minus(expert, base) for expert in experts.values()]),
        "cosine_delta": cosine_matrix([_minus(expert, start) for expert in experts.values()]),
        "expert_validation": {task: record["validation_accuracy"] for task, record in records.items()},
    }


def _progress(io: StageIO, what: str) -> Callable[[int, int], None]:
    return lambda done, total: io.report(what, done, total)


def _load(path: Path) -> State:
    with open_checkpoint(path) as state:
        return {name: state[name].clone() for name in state}


def _minus(a: State, b: State) -> State:
    return {name: a[name] - b[name] for name in a}
