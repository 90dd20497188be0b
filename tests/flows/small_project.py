"""A small project of its own: two tasks of drawn pictures in folders, the pocket architecture, a few steps."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from filelock import FileLock
from PIL import Image

from tests.flows.forked import COMMANDS, run_folder, run_forked
from tests.project_folder import remember_code

ROOT = Path(__file__).parents[2]
QUIET = {"DO_NOT_TRACK": "true", "DVC_NO_ANALYTICS": "1", "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "160"}
# What these tests start must not reach a server of whoever runs them.
FOREIGN = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")


@cache
def prefect_home() -> str:
    """A folder of Prefect's for all runs of a test process, its database made already."""
    home = tempfile.mkdtemp(prefix="mergeflow-prefect-")
    shutil.copy(prefect_template(), home)
    return home


@cache
def prefect_template() -> Path:
    """Prefect's database, migrated and empty; tests/flows/test_embedded.py sees that a run without one makes it."""

    def make(folder: Path) -> None:
        upgrade = ("prefect", "server", "database", "upgrade", "--yes")
        run_forked(folder, upgrade, environment(str(folder)), 240).check_returncode()

    return made_once("prefect", make) / "prefect.db"


@cache
def registry_template() -> Path:
    """One migrated, empty registry to be copied: the migrations take seconds, a copy nothing."""

    def make(folder: Path) -> None:
        code = f"from registry.store import connect; connect(project_root={str(folder)!r}, experiment='template')"
        run_in(ROOT, sys.executable, "-c", code).check_returncode()

    return made_once("registry", make) / "mlflow.db"


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    above = run_folder()
    with FileLock(above / f"{name}.lock"):
        if not (above / name).exists():
            shutil.rmtree(above / f"{name}.new", ignore_errors=True)  # of a test that failed here
            (above / f"{name}.new").mkdir()
            make(above / f"{name}.new")
            (above / f"{name}.new").rename(above / name)
    return above / name


def environment(home: str | None = None) -> dict[str, str]:
    """The environment of what tests start; `home` is Prefect's folder."""
    inherited = {key: value for key, value in os.environ.items() if key not in FOREIGN}
    path = f"{Path(sys.executable).parent}:{inherited['PATH']}"
    return {**inherited, **QUIET, "PREFECT_HOME": home or prefect_home(), "PATH": path}


def run_in(
    folder: Path, *command: str, timeout: float = 240, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with environment variables of its own; None takes one away."""
    changed = environment() | variables
    env = {name: value for name, value in changed.items() if value is not None}
    if command[0] in COMMANDS:
        return run_forked(folder, command, env, timeout)
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False)


def commit(folder: Path, what: str = "--all") -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("add", what), (*who, "commit", "--quiet", "--message", "a run")):
        done = run_in(folder, "git", *command)
        assert done.returncode == 0, done.stderr


def draw_task(folder: Path, colour: tuple[int, int, int], seed: int) -> None:
    """Write two classes, a bright square in the middle or in the corner, as an image folder with three splits."""
    random = np.random.default_rng(seed)
    for split, count in (("train", 12), ("val", 6), ("test", 6)):
        for name, place in (("centre", slice(10, 22)), ("corner", slice(0, 12))):
            target = folder / split / f"{folder.name}_{name}"
            target.mkdir(parents=True)
            for index in range(count):
                pixels = random.integers(0, 90, (32, 32, 3), dtype=np.uint8)
                pixels[place, place] = colour
                Image.fromarray(pixels).save(target / f"{index}.png")


def small_params() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["tasks"] = {"red": "folder:inputs/red", "blue": "folder:inputs/blue"}
    values["finetune"] |= {"steps": 12, "batch_size": 8, "save_every": 2}
    values["sweep"] = {
        "average": {"scale": [1.0]},
        "task_arithmetic": {"scale": [0.3, 0.5]},
        "cart": {"rank_ratio": [0.1], "scale": [1.0]},
    }
    return values


def make_project(folder: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("mergeflow", "tasks", "flows", "registry"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("dvc.yaml", ".dvcignore", ".gitignore"):
        shutil.copy(ROOT / name, folder / name)
    remember_code(folder)
    (folder / "params.yaml").write_text(yaml.safe_dump(small_params(), sort_keys=False))
    draw_task(folder / "inputs/red", (220, 40, 40), 1)
    draw_task(folder / "inputs/blue", (40, 40, 220), 2)
    shutil.copyfile(registry_template(), folder / "mlflow.db")
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp", "config.local"))
    assert run_in(folder, "git", "init", "-q").returncode == 0
    return folder


METHOD = """
from mergeflow.merging.method import Args, Parts, Stack, method

from .{helpers} import HALF


class Mine(Args):
    pass


@method("mine", Mine, elementwise=True)
def mine(stack: Stack, args: Mine) -> Parts:
    return stack.base, HALF * stack.taus.sum(0)
"""


def write_method(file: Path, helpers: str) -> None:
    """Write a merge method of a user's own, `mine`, and beside it the file of helpers that it reads."""
    file.write_text(METHOD.format(helpers=helpers))
    file.with_name(f"{helpers}.py").write_text("HALF = 0.5\n")
