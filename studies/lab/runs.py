"""Stage `train` of the studies: one way of fine-tuning, on the project's tasks, for every seed."""

import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.training import Cost, FineTuneSettings
from studies.lab.published import take_experts
from tasks.project.stage import CHOICES, StageIO
from tasks.training import Workbench, train


def run(io: StageIO) -> None:
    """Write `outputs/studies/runs/<name>/seed_<s>`: `experts/<task>` or `model`, and for an iterative run its rounds.

    Every piece of training is kept in the scratch folder until all are there, so a killed run goes on where it was.
    """
    run = _asked(io)
    bench, folder = Workbench.open(io), io.out(layout.study_run(io.item))
    costs: dict[str, dict[str, Any]] = {}
    own = _in_rounds if run.settings.regime == "iterative" else _independent
    work = _published if run.checkpoints else own
    for seed in run.seeds:
        kept = io.scratch / f"seed_{seed}"
        costs[f"seed_{seed}"] = work(io, bench, run, seed, kept).as_json()
        shutil.copytree(kept / "result", folder / f"seed_{seed}")
    io.costs["training"] = costs


@dataclass(frozen=True)
class Asked:
    """What a run asks for: its tasks, in order, its seeds, and how they are tuned or which checkpoints are taken."""

    tasks: list[str]
    seeds: list[int]
    settings: FineTuneSettings
    checkpoints: str | None


def _asked(io: StageIO) -> Asked:
    """Return the stage's run of studies/params.yaml."""
    run, seeds = io.section(f"{CHOICES}:runs.{io.item}"), io.section(f"{CHOICES}:seeds")
    count = 1 if run.checkpoints and "{seed}" not in run.checkpoints else run.seeds
    return Asked(list(io.section("tasks"))[: run.tasks], seeds[:count], run.finetune, run.checkpoints)


def _in_rounds(io: StageIO, bench: Workbench, run: Asked, seed: int, kept: Path) -> Cost:
    """Train all rounds of one seed."""
    from studies.lab.rounds import train_in_rounds  # here, because it depends on every merge method

    return train_in_rounds(io, bench, run.tasks, run.settings, seed, kept)


def _published(io: StageIO, bench: Workbench, run: Asked, seed: int, kept: Path) -> Cost:
    """Take the experts that others trained."""
    assert run.checkpoints
    shutil.rmtree(kept / "result", ignore_errors=True)
    take_experts(io.root, run.checkpoints, run.tasks, seed, io.dep(layout.BASE_MODEL), kept / "result")
    return Cost()


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
            cost = train(bench, members, settings, seed, scratch, part, partial(io.report, f"seed {seed}, {name}"))
            (kept / f"{target.name}.cost.json").write_text(json.dumps(vars(cost)))
            target.parent.mkdir(parents=True, exist_ok=True)
            part.rename(target)
            shutil.rmtree(scratch)
        total += Cost(**json.loads((kept / f"{target.name}.cost.json").read_text()))
    return total
