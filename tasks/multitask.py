"""Stage `multitask`: the regimes that train all tasks in one run, `joint` and `iterative`.

The rounds of an iterative run can be done piece by piece before the stage runs, in other processes (`tasks.rounds`).
The stage itself does what is left, and then gathers the experts.
"""

import json
import shutil

from mergeflow import layout
from mergeflow.training import TOGETHER
from tasks.project.stage import StageIO
from tasks.training import head_file, train_in_stage


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
        from tasks.rounds import train_in_rounds  # here, because it depends on every merge method

        io.costs["training"] = train_in_rounds(io, folder).as_json()


def _joint(io: StageIO, tasks: list[str]) -> None:
    """Train one model; every task's expert is this model."""
    model = io.scratch / "joint"
    shutil.rmtree(model, ignore_errors=True)
    train_in_stage(io, tasks, model)
    for task in tasks:
        expert = io.out(layout.MULTITASK) / task
        shutil.copytree(model, expert, ignore=shutil.ignore_patterns("heads"))
        if (head := head_file(model, tasks, task)).exists():
            shutil.copy(head, expert / layout.HEAD_FILE)
