"""A laboratory of small nets that really learn: three tasks of numbers, each run about a second."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mergeflow.modalities.classification import Classification
from mergeflow.modality import Examples
from studies.lab.inputs import Laboratory
from tests.project_folder import change_params
from tests.studies.small_lab import train_run
from tests.toy_project import ROOT, make_toy_project, run_pipeline

SEEDS = [0, 1]
NAMES = ("north", "east", "south")


def make_toy_lab(
    root: Path, training: dict[str, dict[str, Any]], classes: int, widths: list[int], **finetune: Any
) -> Path:
    """Write a toy project below `root`, prepared, with its base and the studies' training runs.

    Args:
        root: a folder that does not exist.
        training: name of a run → what it changes in `finetune`.
        classes: of each task.
        widths: of the hidden layers.
        finetune: what is changed for all runs.
    """
    make_toy_project(root, {"widths": [24, *widths, classes], "head": "none", "activation": "relu"}, **finetune)
    source = f"toy:clouds,inputs=24,train=300,validation=100,test=200,classes={classes}"
    change_params(root, {"tasks": dict.fromkeys(NAMES, source), "data": {"inputs": 24}})
    run_pipeline(root, ("prepare", "base"))
    (root / "studies").mkdir()
    whole = yaml.safe_load((ROOT / "studies/params.yaml").read_text()) | {"seeds": SEEDS, "runs": training}
    whole["studies"] |= yaml.safe_load((ROOT / "worlds/pocket20/studies/params.yaml").read_text())["studies"]
    (root / "studies/params.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    for name in training:
        train_run(root, name)
    return root


class WrongTest(Laboratory):
    """A laboratory whose test labels are wrong: what is chosen with them was chosen on test."""

    def examples(self, split: str) -> dict[str, Examples]:
        by_task = super().examples(split)
        if split != "test":
            return by_task
        return {
            t: replace(rows, labels=1 - rows.labels) for t, rows in by_task.items() if isinstance(rows, Classification)
        }
