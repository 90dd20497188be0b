"""Stage `train` of the studies: one way of fine-tuning, on the project's tasks, for every seed."""

import json
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint, read_state, write_checkpoint
from mergeflow.checkpoints.writer import link_or_copy, write_atomically
from mergeflow.errors import MergeflowError
from mergeflow.processes import worker_pool
from mergeflow.training import Cost, FineTuneSettings
from tasks.project.stage import CHOICES, StageIO
from tasks.running.devices import device_names
from tasks.training import Workbench, train

RESULT, DONE = "result", "done.json"
Trained = tuple[Cost, list[float]]
"""What one seed cost, and in an iterative run the processor seconds of each round."""


def run(io: StageIO) -> None:
    """Write `outputs/studies/runs/<name>/seed_<s>`: `experts/<task>` or `model`, and for an iterative run its rounds.

    Every piece of training is kept in the scratch folder until its seed is done, so a killed run goes on where it was.
    """
    run, folder = _requested(io), io.out(layout.study_run(io.item))
    _check_space(io, run)
    _train_seeds(io, run)
    folders = {f"seed_{seed}": _seed_folder(io, seed) for seed in run.seeds}
    costs = {seed: json.loads((seed_folder / DONE).read_text()) for seed, seed_folder in folders.items()}
    io.costs["training"] = {seed: record["training"] for seed, record in costs.items()}
    if rounds := {seed: record["rounds"] for seed, record in costs.items() if record["rounds"]}:
        io.costs["rounds"] = rounds
    for seed_name, seed_folder in folders.items():
        shutil.copytree(seed_folder / RESULT, folder / seed_name, copy_function=link_or_copy)


def _seed_folder(io: StageIO, seed: int) -> Path:
    return io.scratch / f"seed_{seed}"


def _missing(io: StageIO, run: "Asked") -> tuple[list[int], int]:
    """Return the seeds that are not trained, and how many train at a time: on a device one."""
    missing = [seed for seed in run.seeds if not (_seed_folder(io, seed) / DONE).exists()]
    return missing, min(io.params.run.workers, len(missing)) if device_names(io.params.run.device) == ["cpu"] else 1


def _train_seeds(io: StageIO, run: "Asked") -> None:
    """Train every seed, several in processes of their own where they may."""
    missing, workers = _missing(io, run)
    if workers > 1:
        with worker_pool(workers) as pool:
            trained = [pool.submit(_train_seed, io, None, run, seed) for seed in missing]
            for done, future in enumerate(as_completed(trained), 1):
                future.result()
                io.report("seeds", done, len(trained))
    bench = Workbench.open(io)
    for seed in run.seeds:
        _train_seed(io, bench, run, seed)


def _train_seed(io: StageIO, bench: Workbench | None, run: "Asked", seed: int) -> None:
    """Leave a seed's result and its costs in its folder, and nothing of what led there."""
    folder = _seed_folder(io, seed)
    work = _published if run.checkpoints else _in_rounds if run.settings.regime == "iterative" else _independent
    if not (folder / DONE).exists():
        cost, rounds = work(io, bench.renewed() if bench else Workbench.open(io), run, seed, folder)
        write_atomically(folder / DONE, json.dumps({"training": cost.as_json(), "rounds": rounds}))
    for path in folder.iterdir():
        if path.name not in (DONE, RESULT):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


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


def _check_space(io: StageIO, run: Asked) -> None:
    """Refuse before the first step a run that this disk cannot take."""
    model, settings = io.dep(layout.BASE_MODEL).stat().st_size, run.settings
    missing, workers = _missing(io, run)
    rounds = settings.iterative.rounds if settings.regime == "iterative" else 0
    epochs = settings.epochs if settings.keep_epochs else 0
    experts = 1 if settings.regime == "joint" else len(run.tasks)
    models = experts * (1 + epochs) + (rounds + 1 if rounds else 0)
    # While a seed trains it has beside its result the experts of the round before, or the optimiser's two moments.
    needed = model * (models * len(missing) + (2 * experts if rounds else 3) * workers)
    free = shutil.disk_usage(io.root).free
    if missing and needed > free:
        raise MergeflowError(
            f"the run {io.item} needs about {needed / 1e9:.1f} GB, for {models} models of {model / 1e6:.0f} MB of each "
            f"of {len(missing)} seeds, and {free / 1e9:.1f} GB are free where {io.root} is. Free some space, or ask "
            f"for fewer seeds, tasks{' or rounds' * bool(rounds)} in {CHOICES}."
        )


def _in_rounds(io: StageIO, bench: Workbench, run: Asked, seed: int, folder: Path) -> Trained:
    from studies.lab.rounds import train_in_rounds  # here, because it depends on every merge method

    return train_in_rounds(io, bench, run.tasks, run.settings, seed, folder, folder / RESULT)


def _published(io: StageIO, bench: Workbench, run: Asked, seed: int, folder: Path) -> Trained:
    """Take the experts that others trained."""
    assert run.checkpoints
    shutil.rmtree(folder / RESULT, ignore_errors=True)
    take_experts(io.root, run.checkpoints, run.tasks, seed, io.dep(layout.BASE_MODEL), folder / RESULT)
    return Cost(), []


def _independent(io: StageIO, bench: Workbench, run: Asked, seed: int, folder: Path) -> Trained:
    """Train each task's expert, or one joint model."""
    settings, total = run.settings, Cost()
    joint = settings.regime == "joint"
    pieces = {"model": run.tasks} if joint else {f"experts/{task}": [task] for task in run.tasks}
    for name, members in pieces.items():
        target = folder / RESULT / name
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
    return total, []


# Experts that somebody published: checkpoints are taken without training


def take_experts(root: Path, pattern: str, tasks: Sequence[str], seed: int, base: Path, folder: Path) -> None:
    """Write `experts/<task>` below `folder` from checkpoints in any format that `mergeflow merge` reads.

    Args:
        root: the project, which the pattern is relative to.
        pattern: a path with `{task}`, and `{seed}` if there is more than one seed.
        base: checkpoint of θ0, whose tensors the experts must have.
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
