"""A toy project for tests: two tasks of numbers and a small net, its pipeline up to `evaluate` in about two seconds."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TASKS = {"left": "toy:clouds", "right": "toy:clouds,classes=4"}
SWEPT: dict[str, dict[str, list[float]]] = {
    "average": {"scale": [1.0]},
    "task_arithmetic": {"scale": [0.3, 0.6]},
    "ties": {"keep": [0.2], "scale": [1.0]},
    "cart": {"rank_ratio": [0.25], "scale": [1.0, 2.0]},
}
PIPELINE = ("prepare", "base", "multitask", "finetune", "vectors", "sweep", "select", "evaluate")


def make_toy_project(folder: Path, model: dict[str, Any] | None = None, **finetune: Any) -> Path:
    """Write the choices of a toy project, of which `model` and `finetune` change some; its code is this checkout's."""
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values |= {
        "tasks": TASKS,
        "data": {"inputs": 8},
        "model": {"modality": "toy", "widths": [8, 16, 6]} | (model or {}),
    }
    values["finetune"] |= {"steps": 60, "batch_size": 16, "learning_rate": 0.02, "save_every": 20, **finetune}
    values["sweep"] = SWEPT
    values["run"]["device"] = "cpu"
    (folder / "inputs").mkdir(parents=True)
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    for name in ("dvc.yaml", "mergeflow", "tasks", "registry"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run_pipeline(folder: Path, stages: tuple[str, ...] = PIPELINE) -> None:
    """Run stages, each with all its items, in the order of the graph."""
    from tasks.project.graph import load_graph
    from tasks.project.runner import run_stage

    for stage in load_graph(folder).values():
        if stage.name in stages:
            run_stage(folder, stage)
