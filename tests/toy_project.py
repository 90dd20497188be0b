"""A toy project for tests: two tasks of numbers and a small net, its pipeline up to `evaluate` in about two seconds."""

from pathlib import Path
from typing import Any

from tests.project_folder import PIPELINE, ROOT, SWEPT, run_pipeline, write_project

__all__ = ["PIPELINE", "ROOT", "SWEPT", "TASKS", "make_toy_project", "run_pipeline"]
TASKS = {"left": "toy:clouds", "right": "toy:clouds,classes=4"}


def make_toy_project(folder: Path, model: dict[str, Any] | None = None, **finetune: Any) -> Path:
    """Write the choices of a toy project, of which `model` and `finetune` change some; its code is this checkout's."""
    values = {
        "tasks": TASKS,
        "data": {"inputs": 8},
        "model": {"modality": "toy", "widths": [8, 16, 6]} | (model or {}),
    }
    steps = {"steps": 60, "batch_size": 16, "learning_rate": 0.02, "save_every": 20}
    return write_project(folder, values, steps | finetune)
