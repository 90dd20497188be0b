"""What the small projects of tests have in common: four methods, this checkout's code, a registry of their own."""

import shutil
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import yaml

from tasks.project.stage import STATE

ROOT = Path(__file__).parents[1]
SWEPT: dict[str, dict[str, list[float]]] = {
    "average": {"scale": [1.0]},
    "task_arithmetic": {"scale": [0.3, 0.6]},
    "ties": {"keep": [0.2], "scale": [1.0]},
    "cart": {"rank_ratio": [0.25], "scale": [1.0, 2.0]},
}
PIPELINE = ("prepare", "base", "multitask", "finetune", "vectors", "sweep", "select", "evaluate")


def write_project(folder: Path, values: dict[str, Any], finetune: dict[str, Any]) -> Path:
    """Write this repository's params.yaml with other sections and other values of `finetune`; link to its code."""
    values = {**yaml.safe_load((ROOT / "params.yaml").read_text()), "sweep": SWEPT, **values}
    values["finetune"] |= finetune
    values["run"]["device"] = "cpu"
    (folder / "inputs").mkdir(parents=True, exist_ok=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    link_code(folder)
    return folder


def change_params(folder: Path, changes: Mapping[str, Any], file: str = "params.yaml") -> None:
    """Replace values of a project's choices; a key names a section, or with dots a value in one."""
    path = folder / file
    values = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        *above, last = key.split(".")
        reduce(dict.__getitem__, above, values)[last] = value
    path.write_text(yaml.safe_dump(values, sort_keys=False))


def link_code(folder: Path) -> None:
    for name in ("dvc.yaml", "mergeflow", "tasks", "registry"):
        (folder / name).symlink_to(ROOT / name)
    remember_code(folder)


def remember_code(folder: Path) -> None:
    """Give a project what the code of its stages says, as it keeps it: to read all of it takes seconds."""
    from tests.flows.small_project import made_once

    shutil.copytree(made_once("code", read_code) / STATE, folder / STATE)


def read_code(folder: Path) -> None:
    from tasks.project.graph import load_graph
    from tasks.running.digests import Code

    code = Code(folder)
    for stage in load_graph(ROOT, studies=True).values():
        code.digest(stage.module)


def run_pipeline(folder: Path, stages: tuple[str, ...] = PIPELINE) -> Path:
    """Run stages, each with all its items, in the order of the graph; return the folder."""
    from tasks.project.graph import load_graph
    from tasks.running.runner import run_stage

    for stage in load_graph(folder).values():
        if stage.name in stages:
            run_stage(folder, stage)
    return folder


def register(folder: Path, model: str, stages: tuple[str, ...] = ("figures", "register")) -> Any:
    """Run a project's last stages into an empty registry of its own, whose gates let much pass; return the registry."""
    from registry.store import connect
    from tests.flows.small_project import registry_template, run_in

    change_params(folder, {"registry.model": model, "registry.tolerance": 0.5})
    shutil.copyfile(registry_template(), folder / "mlflow.db")
    assert run_in(folder, "dvc", "init", "--no-scm", "--quiet").returncode == 0
    run_pipeline(folder, stages)
    return connect(project_root=folder)
