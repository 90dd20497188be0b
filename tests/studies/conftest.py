"""One small laboratory for the tests of all studies."""

import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from studies.lab import inputs
from studies.lab.rows import Row
from tasks.project.stage import StageIO
from tests.once import once
from tests.studies.small_lab import ROOT, link_choices, make_lab
from tests.studies.toy_lab import make_toy_lab

MANY: dict[str, dict[str, Any]] = {
    "experts": {"tasks": 3},
    "joint_2": {"tasks": 2, "regime": "joint"},
    "joint_3": {"tasks": 3, "regime": "joint"},
    "mima_3": {"tasks": 3, "regime": "iterative", "iterative": {"rounds": 2}},
}


def _rounds(count: int, steps: int = 64, **changes: Any) -> dict[str, Any]:
    return {"regime": "iterative", "steps": steps, "iterative": {"rounds": count, **changes}}


TOY: dict[str, dict[str, Any]] = {
    "one_epoch": {"regime": "one_epoch", "batch_size": 8},
    "converged": {"regime": "epochs", "epochs": 3, "keep_epochs": True, "batch_size": 8},
    "cold": {"regime": "epochs", "epochs": 3, "keep_epochs": True, "learning_rate": 1e-5},
    "joint": {"regime": "joint", "steps": 64},
    "joint_half": {"seeds": 1, "regime": "joint", "steps": 64, "learning_rate": 1e-6},
    "mima_1": _rounds(1),
    "linearised": {"regime": "linearised", "steps": 64},
    "published": {
        "seeds": 1,
        "checkpoints": "outputs/studies/runs/mima_1/seed_{seed}/experts/{task}/model.safetensors",
    },
    "mima_4": _rounds(4),
    "mima_16": _rounds(16),
    "mima_1_16": _rounds(1, 16),
    "mima_4_16": _rounds(4, 16),
    "mima_4_kept": _rounds(4, optimiser="kept"),
    "whole_2_4": _rounds(4, merge="task_arithmetic", args={"scale": 2 / 3}),
    "per_round_1_4": _rounds(4, schedule="per_round"),
    "per_round_2_4": _rounds(4, merge="task_arithmetic", args={"scale": 2 / 3}, schedule="per_round"),
}


@pytest.fixture(autouse=True, scope="session")
def every_piece_can_go_to_another_process() -> None:
    """Let the laboratories, which measure pieces in turn, ask of each what measuring side by side asks of it."""
    cached_all = inputs.cached_all

    def pickled(io: StageIO, measures: Mapping[str, Callable[[], Row]], what: str = "pieces") -> list[Row]:
        for measure in measures.values():
            pickle.dumps(measure)
        return cached_all(io, measures, what)

    inputs.cached_all = pickled


@pytest.fixture(scope="session")
def bare_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the project's choices alone, for studies that read no outputs."""
    return link_choices(tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="session")
def toy_lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tasks of small nets, trained far enough for the papers' findings to show."""
    torch.set_num_threads(1)
    make = partial(make_toy_lab, training=TOY, classes=3, widths=[128], learning_rate=0.005, save_every=1000)
    return once(tmp_path_factory, "toy_lab", make)


@pytest.fixture(scope="session")
def toy_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Deeper small nets, whose experts are merged once."""
    torch.set_num_threads(1)
    runs = {"experts": {"regime": "steps", "steps": 64}, "mima_8": _rounds(8)}
    make = partial(make_toy_lab, training=runs, classes=2, widths=[64, 64], learning_rate=0.01, save_every=1000)
    return once(tmp_path_factory, "toy_experts", make)


@pytest.fixture(scope="session")
def many_lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The laboratory of the studies of many tasks: three tasks; studies take the first 2 or 3."""
    torch.set_num_threads(1)
    make = partial(make_lab, training=MANY, world=ROOT / "worlds/pocket20")
    return once(tmp_path_factory, "many_lab", make)
