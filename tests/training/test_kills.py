"""Training killed with SIGKILL at random points, in every kind of stage: it continues, to the same bits."""

import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.projects import make_project, outputs, set_finetune, start_stage

ROUNDS = {"regime": "iterative", "iterative": {"rounds": 3}}
KEPT = {"regime": "iterative", "iterative": {"rounds": 2, "optimiser": "kept", "schedule": "per_round"}}
SLOW = pytest.mark.slow
CASES = [
    pytest.param("multitask", None, ROUNDS, id="rounds"),
    pytest.param("finetune", "red", {"regime": "lora", "keep_epochs": True}, id="lora"),
    pytest.param("multitask", None, KEPT, id="rounds-kept", marks=SLOW),
    pytest.param("multitask", None, {"regime": "joint", "keep_epochs": True}, id="joint", marks=SLOW),
    pytest.param("finetune", "red", {"regime": "steps", "keep_epochs": True}, id="steps", marks=SLOW),
    pytest.param("finetune", "red", {"regime": "linearised"}, id="linearised", marks=SLOW),
]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("ready"))


def complete(folder: Path, stage: str, item: str | None) -> float:
    began = time.monotonic()
    process = start_stage(folder, stage, item)
    process.join(120)
    assert process.exitcode == 0
    return time.monotonic() - began


def saved(folder: Path) -> list[Path]:
    return [path for path in (folder / ".mergeflow/scratch").rglob("*") if path.is_file()]


@pytest.mark.parametrize(("stage", "item", "settings"), CASES)
def test_killed_at_random_points_it_ends_with_the_same_bits(
    ready: Path, tmp_path: Path, stage: str, item: str | None, settings: dict[str, Any]
) -> None:
    folders = [shutil.copytree(ready, tmp_path / name, symlinks=True) for name in ("whole", "killed")]
    for folder in folders:
        set_finetune(folder, **settings)
        if stage == "finetune":
            complete(folder, "multitask", None)
    whole, killed = folders
    seconds = complete(whole, stage, item)
    made = "outputs/multitask" if stage == "multitask" else f"outputs/experts/{item}"
    luck = random.Random(f"{stage} {settings}")
    kills = kept = 0
    for _ in range(3):
        process = start_stage(killed, stage, item)
        process.join(seconds * luck.uniform(0.3, 0.95))
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            kills += 1
            kept += bool(saved(killed))
            assert not (killed / made).exists()
        else:
            break
    complete(killed, stage, item)
    assert kills >= 1
    assert kept >= 1
    found, expected = outputs(killed, made), outputs(whole, made)
    assert found.keys() == expected.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert not saved(killed)
