"""Stage `multitask`: the regimes that train all tasks in one run, `joint` and `iterative`.

The rounds of an iterative run can be done piece by piece before the stage runs, in other processes: a flow asks for
the pieces with `open_rounds`. The stage itself does what is left, and then gathers the experts.
"""

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace

from filelock import FileLock

from mergeflow import layout
from mergeflow.training import TOGETHER, IterativeRun
from tasks.project.stage import StageIO
from tasks.training import Workbench, head_file, train, tune_round, write_last_round


def run(io: StageIO) -> None:
    """Write `outputs/multitask`: `regime.json`, and every task's expert where the regime trains them together."""
    settings, tasks = io.section("finetune"), list(io.section("tasks"))
    folder = io.out(layout.MULTITASK)
    folder.mkdir(parents=True)
    record = {"regime": settings.regime, "trains_here": settings.regime in TOGETHER}
    (folder / "regime.json").write_text(json.dumps(record) + "\n")
    if settings.regime == "joint":
        _joint(io, tasks)
    elif settings.regime == "iterative":
        rounds = open_rounds(io)
        for number in range(1, rounds.rounds + 1):
            for task in rounds.waiting(number):
                tune(io, number, task)
            rounds.merge(number)
        cost = write_last_round(Workbench.open(io), rounds, folder)
        io.costs["training"] = cost.as_json()


def open_rounds(io: StageIO) -> IterativeRun:
    """Return the stage's iterative run, begun or not."""
    tasks, settings = tuple(io.section("tasks")), io.section("finetune")
    return IterativeRun(io.scratch / "rounds", io.dep(layout.BASE_MODEL), tasks, settings, io.section("seed"))


def tune(io: StageIO, number: int, task: str) -> None:
    """Tune one task of one round, unless it is done; two callers never do the same piece at once."""
    rounds = open_rounds(io)
    rounds.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(rounds.folder / f"{task}.lock"), ExitStack() as held:
        if task in rounds.waiting(number):
            bench = Workbench.open(replace(io, holds=held))  # a device for this piece alone
            tune_round(bench, rounds, number, task, lambda done, total: io.report(f"round {number}", done, total))


def _joint(io: StageIO, tasks: list[str]) -> None:
    """Train one model; every task's expert is this model."""
    model = io.scratch / "joint"
    shutil.rmtree(model, ignore_errors=True)
    cost = train(
        Workbench.open(io),
        tasks,
        io.section("finetune"),
        io.section("seed"),
        io.scratch / "training",
        model,
        lambda done, total: io.report("steps", done, total),
    )
    io.costs["training"] = cost.as_json()
    for task in tasks:
        own = io.out(layout.MULTITASK) / task
        shutil.copytree(model, own, ignore=shutil.ignore_patterns("heads"))
        if (head := head_file(model, tasks, task)).exists():
            shutil.copy(head, own / layout.HEAD_FILE)
