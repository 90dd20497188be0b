"""Training killed with SIGKILL at random points, in every kind of stage: it continues, to the same bits."""

import os
import random
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.training.projects import make_project, outputs, set_finetune, start_stage

pytestmark = pytest.mark.slow

ROUNDS = {"regime": "iterative", "iterative": {"rounds": 3}}
KEPT = {"regime": "iterative", "iterative": {"rounds": 2, "optimiser": "kept", "schedule": "per_round"}}
NIGHTLY = pytest.mark.nightly
CASES = [
    pytest.param("multitask", None, ROUNDS, id="rounds", marks=pytest.mark.slow),
    pytest.param("finetune", "red", {"regime": "lora", "keep_epochs": True}, id="lora"),
    pytest.param("multitask", None, KEPT, id="rounds-kept", marks=NIGHTLY),
    pytest.param("multitask", None, {"regime": "joint", "keep_epochs": True}, id="joint", marks=NIGHTLY),
    pytest.param("finetune", "red", {"regime": "steps", "keep_epochs": True}, id="steps"),
    pytest.param("finetune", "red", {"regime": "linearised"}, id="linearised", marks=NIGHTLY),
]


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("ready"))


def complete(folder: Path, stage: str, item: str | None) -> None:
    process = start_stage(folder, stage, item)
    process.join(240)
    assert process.exitcode == 0


def saved(folder: Path) -> set[tuple[str, int]]:
    """List the files of the scratch folder with their times of writing."""
    files = set()
    for parent, _, names in os.walk(folder / ".mergeflow/scratch"):  # passes over folders that vanish meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                path = os.path.join(parent, name)
                files.add((path, os.stat(path).st_mtime_ns))
    return files


def kill_after_changes(folder: Path, stage: str, item: str | None, changes: int, pause: float) -> bool:
    """Kill the stage a moment after its saved files have changed so many times; return whether it was still alive."""
    process, last = start_stage(folder, stage, item), saved(folder)
    while changes and process.exitcode is None:
        now = saved(folder)
        changes, last = changes - (now != last), now
        time.sleep(0.002)
    time.sleep(pause)
    alive = process.exitcode is None
    if alive:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    return alive


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
    complete(whole, stage, item)
    made = "outputs/multitask" if stage == "multitask" else f"outputs/experts/{item}"
    luck = random.Random(f"{stage} {settings}")
    kills = 0
    for _ in range(3):
        kills += kill_after_changes(killed, stage, item, luck.randint(1, 4), luck.uniform(0, 0.1))
    complete(killed, stage, item)
    assert kills >= 1
    resumed, expected = outputs(killed, made), outputs(whole, made)
    assert resumed.keys() == expected.keys()
    assert [name for name in expected if resumed[name] != expected[name]] == []
    assert not saved(killed)
