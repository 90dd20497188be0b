"""A project with prepared data for tests of training, and its stages run in processes that may be killed."""

import multiprocessing
import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from tests.flows.small_project import draw_task, small_params
from tests.project_folder import link_code


def make_project(folder: Path) -> Path:
    """Make a small project whose base and data are up to date; the code is that of this checkout."""
    from tasks.project.graph import load_graph
    from tasks.running.runner import run_stage

    link_code(folder)
    draw_task(folder / "inputs/red", (220, 40, 40), 1)
    draw_task(folder / "inputs/blue", (40, 40, 220), 2)
    set_finetune(folder)
    for address, stage in load_graph(folder).items():
        if stage.name in ("prepare", "base"):
            assert run_stage(folder, stage), address
    return folder


def set_finetune(folder: Path, **changes: Any) -> None:
    """Write params.yaml with these fine-tuning settings."""
    values = small_params()
    values["run"]["device"] = "cpu"
    values["finetune"] |= {"steps": 12, "batch_size": 8, "save_every": 2, **changes}
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))


def run_stage_here(folder: str, name: str, item: str | None) -> None:
    from tasks.project.graph import find_stage, load_graph
    from tasks.running.runner import run_stage

    os.chdir(folder)
    run_stage(Path(folder), find_stage(load_graph(Path(folder)), name, item))


def start_stage(folder: Path, name: str, item: str | None = None) -> BaseProcess:
    """Start one stage in a process of its own, forked from a server that has imported torch already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tasks.training", "tasks.multitask", "open_clip", "peft"])
    process = context.Process(target=run_stage_here, args=(str(folder), name, item))
    process.start()
    return process


def outputs(folder: Path, path: str) -> dict[str, bytes]:
    made = folder / path
    return {str(p.relative_to(made)): p.read_bytes() for p in sorted(made.rglob("*")) if p.is_file()}
