"""Stage `train` of the studies: one way of fine-tuning, on the project's tasks, for every seed."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint, read_state, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.training import Cost, FineTuneSettings
from tasks.project.stage import CHOICES, StageIO
from tasks.training import Workbench, train


def run(io: StageIO) -> None:
    """Write `outputs/studies/runs/<name>/seed_<s>`: `experts/<task>` or `model`, and for an iterative run its rounds.

    Every piece of training is kept in the scratch folder until all are there, so a killed run goes on where it was.
    """
    run = _requested(io)
    bench, folder = Workbench.open(io), io.out(layout.study_run(io.item))
    costs: dict[str, dict[str, Any]] = {}
    train = _in_rounds if run.settings.regime == "iterative" else _independent
    work = _published if run.checkpoints else train
    for seed in run.seeds:
        seed_folder = io.scratch / f"seed_{seed}"
        costs[f"seed_{seed}"] = work(io, bench, run, seed, seed_folder).as_json()
        shutil.copytree(seed_folder / "result", folder / f"seed_{seed}")
    io.costs["training"] = costs


@dataclass(frozen=True)
class Asked:
    """What a run asks for: its tasks, in order, its seeds, and how they are tuned or which checkpoints are taken."""

    tasks: list[str]
    seeds: list[int]
    settings: FineTuneSettings
    checkpoints: str | None


def _requested(io: StageIO) -> Asked:
    """Return the stage's run of studies/params.yaml."""
    run, seeds = io.section(f"{CHOICES}:runs.{io.item}"), io.section(f"{CHOICES}:seeds")
    count = 1 if run.checkpoints and "{seed}" not in run.checkpoints else run.seeds
    return Asked(list(io.section("tasks"))[: run.tasks], seeds[:count], run.finetune, run.checkpoints)


def _in_rounds(io: StageIO, bench: Workbench, run: Asked, seed: int, folder: Path) -> Cost:
    """Train all rounds of one seed."""
    from studies.lab.rounds import train_in_rounds  # here, because it depends on every merge method

    return train_in_rounds(io, bench, run.tasks, run.settings, seed, folder)


def _published(io: StageIO, bench: Workbench, run: Asked, seed: int, folder: Path) -> Cost:
    """Take the experts that others trained."""
    assert run.checkpoints
    shutil.rmtree(folder / "result", ignore_errors=True)
    take_experts(io.root, run.checkpoints, run.tasks, seed, io.dep(layout.BASE_MODEL), folder / "result")
    return Cost()


def _independent(io: StageIO, bench: Workbench, run: Asked, seed: int, folder: Path) -> Cost:
    """Train each task's expert, or one joint model."""
    settings, total = run.settings, Cost()
    joint = settings.regime == "joint"
    pieces = {"model": run.tasks} if joint else {f"experts/{task}": [task] for task in run.tasks}
    for name, members in pieces.items():
        target = folder / "result" / name
        if not target.exists():
            part = folder / "part"
            shutil.rmtree(part, ignore_errors=True)
            scratch = folder / "state" / name
            cost = train(bench, members, settings, seed, scratch, part, partial(io.report, f"seed {seed}, {name}"))
            (folder / f"{target.name}.cost.json").write_text(json.dumps(vars(cost)))
            target.parent.mkdir(parents=True, exist_ok=True)
            part.rename(target)
            shutil.rmtree(scratch)
        total += Cost(**json.loads((folder / f"{target.name}.cost.json").read_text()))
    return total


# Experts that somebody published: checkpoints are taken without training


def take_experts(root: Path, pattern: str, tasks: Sequence[str], seed: int, base: Path, folder: Path) -> None:
    """Write `experts/<task>` below `folder` from checkpoints in any format that `mergeflow merge` reads.

    Args:
        root: the project, which the pattern is relative to.
        pattern: a path with `{task}`, and `{seed}` if there is more than one seed.
        tasks: names.
        seed: the seed asked for.
        base: checkpoint of θ0, whose tensors the experts must have.
        folder: where the result is built.

    Raises:
        MergeflowError: listing every checkpoint that is not there, or does not have the base's names and shapes.
    """
    paths = {task: root / pattern.format(task=task, seed=seed) for task in tasks}
    with open_checkpoint(base) as state:
        wanted = {name: tuple(info.shape) for name, info in state.infos.items()}
    faults = [fault for task, path in paths.items() for fault in _faults(task, path, wanted)]
    if faults:
        raise MergeflowError(
            f"checkpoints: {pattern} cannot be the experts of this project:\n  " + "\n  ".join(faults) + "\nName one "
            "checkpoint for each task, fine-tuned from the project's base, with the base's names of tensors."
        )
    for task, path in paths.items():
        write_checkpoint(folder / "experts" / task / layout.MODEL_FILE, read_state(path))


def _faults(task: str, path: Path, wanted: Mapping[str, tuple[int, ...]]) -> list[str]:
    try:
        with open_checkpoint(path) as state:
            shapes = {name: tuple(info.shape) for name, info in state.infos.items()}
    except MergeflowError as error:
        return [f"{task}: {error}"]
    faults = []
    if missing := sorted(wanted.keys() - shapes.keys()):
        faults.append(f"{task}: {path} lacks {len(missing)} tensors of the base, among them {missing[0]}")
    if more := sorted(shapes.keys() - wanted.keys()):
        faults.append(f"{task}: {path} has {len(more)} tensors that the base lacks, among them {more[0]}")
    return faults + [
        f"{task}: {name} has shape {shapes[name]}, the base's has {shape}"
        for name, shape in wanted.items()
        if shapes.get(name, shape) != shape
    ]
