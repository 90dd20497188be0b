"""Stage `finetune`: one expert."""

import shutil

from mergeflow import layout
from mergeflow.training import TOGETHER
from tasks.project.stage import StageIO
from tasks.training import Workbench, train


def run(io: StageIO) -> None:
    """Write `outputs/experts/<task>`: the expert's weights, its head, and `training.json`, its settings and trajectory.

    In a regime that trains the tasks together the expert was made by the stage `multitask`.
    """
    task, settings = io.item, io.section("finetune")
    folder = io.out(layout.expert(task))
    if settings.regime in TOGETHER:
        shutil.copytree(io.dep(f"{layout.MULTITASK}/{task}"), folder)
        return
    cost = train(
        Workbench.open(io),
        [task],
        settings,
        io.section("seed"),
        io.scratch / "training",
        folder,
        lambda done, total: io.report("steps", done, total),
    )
    io.costs["training"] = cost.as_json()
