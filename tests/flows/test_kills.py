"""kill -9 of a run, by either driver: nothing of it lives on, and the next run ends with the undisturbed bits.

The night's part, 60 kills in a quarter of an hour: `pytest -s -n 0 tests/flows/test_kills.py -m nightly`.
"""

import json
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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
from tests.flows.small_project import registry_template, run_in

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Undisturbed:
    """A project after a run that was left alone: its folder, its hashes, and the seconds that the run took."""

    folder: Path
    hashes: dict[str, str]
    seconds: float


def undisturbed(kind: str, folder: Path) -> Undisturbed:
    PROJECTS[kind](folder)
    begin = time.monotonic()
    done = run_in(folder, "env", "--unset=PREFECT_HOME", "mergeflow", "run")
    assert (done.returncode, done.stderr) == (0, "")
    return Undisturbed(folder, hashes(folder), time.monotonic() - begin)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed("toy", tmp_path_factory.mktemp("toy") / "project")


def ask(folder: Path, question: str) -> set[tuple[Any, ...]]:
    with sqlite3.connect(f"file:{folder}/.mergeflow/prefect/prefect.db?mode=ro", uri=True) as database:
        return set(database.execute(question).fetchall())


def test_the_run_its_tasks_its_log_and_its_artifacts_are_in_prefects_database(toy: Undisturbed) -> None:
    assert ask(toy.folder, "SELECT state_type FROM flow_run") == {("COMPLETED",)}
    tasks = dict(ask(toy.folder, "SELECT name, state_type FROM task_run"))
    assert {"base", "finetune@left", "sweep@average", "evaluate", "register"} <= set(tasks)
    assert set(tasks.values()) == {"COMPLETED"}
    assert ("evaluate has run",) in ask(toy.folder, "SELECT message FROM log")
    assert {("results",), ("decision",), ("report",)} <= ask(toy.folder, "SELECT key FROM artifact")


@pytest.mark.parametrize(
    "runner", ["threads", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("processes", "dask", "ray"))]
)
def test_nothing_lives_on_after_a_run_that_was_killed_alone(runner: str, tmp_path: Path) -> None:
    folder = make_toy_repository(tmp_path / "project", runner, steps=200_000)  # it does not end by itself
    process = start(folder, "flow")
    try:
        assert wait_for(lambda: [*(folder / ".mergeflow/progress").glob("finetune*")] or process.poll(), 200)
        assert process.poll() is None
        strike(process, alone=True)
        assert wait_for_end(process.pid), session(process.pid)
    finally:
        strike(process, alone=False)


@pytest.mark.nightly
def test_the_other_driver_on_a_clone_gives_the_same_lock(toy: Undisturbed, tmp_path: Path) -> None:
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("add", "--all"), (*who, "commit", "--quiet", "--message", "a run")):
        assert run_in(toy.folder, "git", *command).returncode == 0
    clone = tmp_path / "clone"
    assert run_in(tmp_path, "git", "clone", "--quiet", str(toy.folder), str(clone)).returncode == 0
    (clone / "mlflow.db").write_bytes(registry_template().read_bytes())
    done = run_in(clone, "dvc", "repro")
    assert done.returncode == 0, done.stderr
    assert hashes(clone) == toy.hashes
    assert run_in(clone, "git", "status", "--porcelain").stdout == ""
    assert "Nothing changed" in run_in(clone, "mergeflow", "run").stdout
    assert run_in(clone, "git", "status", "--porcelain").stdout == ""


def test_killed_at_random_moments_it_ends_with_the_same_bits(toy: Undisturbed, tmp_path: Path) -> None:
    end_with_the_same_bits("toy", toy, tmp_path / "project", kills=2, seed=5)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "kills"), [("toy", 50), ("images", 10)])
def test_killed_all_night_it_ends_with_the_same_bits(kind: str, kills: int, tmp_path: Path) -> None:
    end_with_the_same_bits(kind, undisturbed(kind, tmp_path / "alone"), tmp_path / "project", kills, seed=1)


def end_with_the_same_bits(kind: str, alone: Undisturbed, folder: Path, kills: int, seed: int) -> None:
    PROJECTS[kind](folder)
    done = kill_at_random(folder, kills, alone.seconds, seed, alone.hashes)
    assert not [kill for kill in done if kill.left and not (kill.driver == "dvc" and kill.alone)]
    last = run_in(folder, "env", "--unset=PREFECT_HOME", "mergeflow", "run")
    assert (last.returncode, last.stderr) == (0, "")
    assert ask(folder, "SELECT state_type FROM flow_run") <= {("COMPLETED",), ("CRASHED",)}
    found = hashes(folder)
    assert found == alone.hashes, (done, {name for name in found if found[name] != alone.hashes.get(name)})
    registered = json.loads((folder / "outputs/registration.json").read_text())
    assert (registered["version"], registered["aliases"]) == ("1", ["champion"])
    assert all(wait_for_end(kill.leader) for kill in done)
