"""Stage `finetune`: one expert."""

import shutil

from mergeflow import layout
from mergeflow.training import TOGETHER
from tasks.project.stage import StageIO
from tasks.training import train_in_stage


def run(io: StageIO) -> None:
    """Write `outputs/experts/<task>`: the expert's weights, its head, and `training.json`, its settings and trajectory.

    In a regime that trains the tasks together the expert was made by the stage `multitask`.
    """
    folder = io.out(layout.expert(io.item))
    if io.section("finetune").regime in TOGETHER:
        shutil.copytree(io.dep(f"{layout.MULTITASK}/{io.item}"), folder)
    else:
        train_in_stage(io, [io.item], folder)
