"""kill -9 of a run, by either driver: nothing of it lives on, and the next run ends with the undisturbed bits; Ctrl-C.

The night's part, 60 kills in half an hour on a busy machine: `pytest -s -n 0 tests/flows/test_kills.py -m nightly`.
"""

import json
import os
import shutil
import signal
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.flows.kill_driver import (
    PROJECTS,
    hashes,
    kill_at_random,
    make_toy_repository,
    session,
    start,
    strike,
    wait_for,
    wait_for_end,
)
from tests.flows.small_project import commit, prefect_template, registry_template, run_in
from tests.toy_project import PIPELINE, make_toy_project, run_pipeline

pytestmark = pytest.mark.slow
RECORDS = {"dvc.lock", "outputs/code.yaml", "outputs/registration.json"}  # of the drivers, not of the stages


@dataclass(frozen=True)
class Undisturbed:
    """A project after a run that was left alone: its folder, its hashes, and the seconds that the run took."""

    folder: Path
    hashes: dict[str, str]
    seconds: float


def undisturbed(kind: str, folder: Path) -> Undisturbed:
    PROJECTS[kind](folder)
    begin = time.monotonic()
    done = run_in(folder, "mergeflow", "run", timeout=900, PREFECT_HOME=None)
    assert (done.returncode, done.stderr) == (0, "")
    return Undisturbed(folder, hashes(folder), time.monotonic() - begin)


def ask(folder: Path, question: str) -> set[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{folder}/.mergeflow/prefect/prefect.db?mode=ro", uri=True) as database:
        return set(database.execute(question).fetchall())


def test_killed_alone_nothing_lives_on_and_the_next_run_continues_and_records_both(tmp_path: Path) -> None:
    folder = with_prefect(make_toy_repository(tmp_path / "project"))
    kill_in_training(folder)
    continued(folder)
    assert ask(folder, "SELECT state_type FROM flow_run") == {("CRASHED",), ("COMPLETED",)}
    last = "flow_run_id = (SELECT id FROM flow_run WHERE state_type = 'COMPLETED')"
    tasks = dict(ask(folder, f"SELECT name, state_type FROM task_run WHERE {last}"))
    assert {"finetune@left", "sweep@average", "evaluate", "register"} <= set(tasks)
    assert set(tasks.values()) == {"COMPLETED"}
    assert ("evaluate has run",) in ask(folder, f"SELECT message FROM log WHERE {last}")
    assert {("results",), ("decision",), ("report",)} <= ask(folder, "SELECT key FROM artifact")
    # Stage functions called one by one, in this process, make the same files.
    plain = make_toy_project(tmp_path / "plain")
    run_pipeline(plain, (*PIPELINE, "figures"))
    assert hashes(plain) == {name: value for name, value in hashes(folder).items() if name not in RECORDS}


def with_prefect(folder: Path) -> Path:
    """Give a project Prefect's database, whose making takes a run seconds."""
    (folder / ".mergeflow/prefect").mkdir(parents=True)
    shutil.copy(prefect_template(), folder / ".mergeflow/prefect")
    return folder


def kill_in_training(folder: Path) -> None:
    """Kill a flow while it fine-tunes, alone; nothing that it started may live on."""
    process = start(folder, "flow")
    try:
        assert wait_for(lambda: [*(folder / ".mergeflow/progress").glob("finetune*")] or process.poll(), 200)
        assert process.poll() is None
        strike(process, alone=True)
        assert wait_for_end(process.pid), session(process.pid)
    finally:
        strike(process, alone=False)


def continued(folder: Path) -> None:
    """Run what a kill has left to do; the project is then registered, once."""
    last = run_in(folder, "mergeflow", "run", timeout=900, PREFECT_HOME=None)
    assert last.returncode == 0, last.stderr
    assert "Traceback" not in last.stderr
    registered = json.loads((folder / "outputs/registration.json").read_text())
    assert (registered["version"], registered["aliases"]) == ("1", ["champion"])


@pytest.mark.parametrize(
    ("number", "runner"),
    [
        (signal.SIGINT, "threads"),
        *(pytest.param(signal.SIGINT, runner, marks=pytest.mark.nightly) for runner in ("processes", "dask", "ray")),
        *(pytest.param(signal.SIGTERM, runner, marks=pytest.mark.nightly) for runner in ("threads", "processes")),
    ],
)
def test_a_run_told_to_stop_does_not_wait_for_its_stages(number: int, runner: str, tmp_path: Path) -> None:
    folder = with_prefect(make_toy_repository(tmp_path / "project", runner, steps=200_000))  # it does not end by itself
    process = start(folder, "flow")
    try:
        assert wait_for(lambda: [*(folder / ".mergeflow/progress").glob("finetune*")] or process.poll(), 200)
        # As a terminal does, to all processes; as a supervisor does, to the driver.
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        assert process.wait(100) == 128 + number
        assert wait_for_end(process.pid), session(process.pid)
    finally:
        strike(process, alone=False)
    log = (tmp_path / "project.log").read_text()
    assert "✓ base" in log
    assert log.index("Stopping: recording") < log.index("Stopped: what has finished is recorded")
    assert runner in ("dask", "ray") or "Traceback" not in log  # their own workers print theirs
    assert "base" in yaml.safe_load((folder / "dvc.lock").read_text())["stages"]
    assert ask(folder, "SELECT state_type FROM flow_run") == {("CRASHED",)}


@pytest.mark.nightly
@pytest.mark.parametrize("runner", ["threads", "processes", "dask", "ray"])
def test_nothing_lives_on_with_any_runner(runner: str, tmp_path: Path) -> None:
    kill_in_training(make_toy_repository(tmp_path / "project", runner, steps=200_000))  # it does not end by itself


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed("toy", tmp_path_factory.mktemp("toy") / "project")


@pytest.mark.nightly
def test_the_other_driver_on_a_clone_gives_the_same_lock(toy: Undisturbed, tmp_path: Path) -> None:
    commit(toy.folder)
    clone = tmp_path / "clone"
    assert run_in(tmp_path, "git", "clone", "--quiet", str(toy.folder), str(clone)).returncode == 0
    (clone / "mlflow.db").write_bytes(registry_template().read_bytes())
    done = run_in(clone, "dvc", "repro")
    assert done.returncode == 0, done.stderr
    assert hashes(clone) == toy.hashes
    assert run_in(clone, "git", "status", "--porcelain").stdout == ""
    assert "Nothing changed" in run_in(clone, "mergeflow", "run").stdout
    assert run_in(clone, "git", "status", "--porcelain").stdout == ""


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "kills"), [("toy", 50), ("images", 10)])
def test_killed_all_night_it_ends_with_the_same_bits(kind: str, kills: int, tmp_path: Path) -> None:
    end_with_the_same_bits(kind, undisturbed(kind, tmp_path / "alone"), tmp_path / "project", kills, seed=1)


def end_with_the_same_bits(kind: str, alone: Undisturbed, folder: Path, kills: int, seed: int) -> None:
    PROJECTS[kind](folder)
    done = kill_at_random(folder, kills, alone.seconds, seed, alone.hashes)
    assert not [kill for kill in done if kill.left and not (kill.driver == "dvc" and kill.alone)]
    continued(folder)
    assert ("RUNNING",) not in ask(folder, "SELECT state_type FROM flow_run")
    written = hashes(folder)
    assert written == alone.hashes, (done, {name for name in written if written[name] != alone.hashes.get(name)})
    assert all(wait_for_end(kill.leader) for kill in done)
