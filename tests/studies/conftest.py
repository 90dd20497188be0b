"""One small laboratory for the tests of all studies."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.studies.small_lab import ROOT, make_lab

ITERATIVE: dict[str, Any] = {"regime": "iterative"}
RUNS: dict[str, dict[str, Any]] = {
    "one_epoch": {"regime": "one_epoch"},
    "converged": {"regime": "epochs", "epochs": 2, "keep_epochs": True},
    "joint": {"regime": "joint", "steps": 4},
    "mima_1": {**ITERATIVE, "iterative": {"rounds": 1}},
    "mima_2": {**ITERATIVE, "iterative": {"rounds": 2}},
    "atm_4": {
        **ITERATIVE,
        "iterative": {"rounds": 4, "merge": "task_arithmetic", "args": {"scale": 0.5}},
    },
    "published": {
        "seeds": 1,
        "checkpoints": "outputs/studies/runs/mima_1/seed_{seed}/experts/{task}/model.safetensors",
    },
}


MANY: dict[str, dict[str, Any]] = {
    "experts": {"tasks": 3},
    "joint_2": {"tasks": 2, "regime": "joint"},
    "joint_3": {"tasks": 3, "regime": "joint"},
    "mima_3": {"tasks": 3, "regime": "iterative", "iterative": {"rounds": 2}},
}


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_lab(tmp_path_factory.mktemp("lab"), RUNS)


@pytest.fixture(scope="session")
def many_lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The laboratory of the studies of many tasks: three tasks; studies take the first 2 or 3."""
    torch.set_num_threads(1)
    return make_lab(tmp_path_factory.mktemp("many_lab"), MANY, world=ROOT / "worlds/pocket20")
