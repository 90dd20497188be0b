"""kill -9 of a run, by either driver: nothing of it lives on, and the next run ends with the undisturbed bits."""

import sqlite3
from pathlib import Path

import pytest

from tests.flows.kill_driver import hashes, kill_at_random, make_repository, session, start, strike, wait_for
from tests.flows.small_project import prefect_home, run_in

pytestmark = pytest.mark.slow
GONE = 15.0  # seconds; on a busy machine. Before, the server lived for ever.


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy project after `mergeflow run`, with everything that git should know committed."""
    folder = make_repository(tmp_path_factory.mktemp("toy") / "project")
    done = run_in(folder, "mergeflow", "run")
    assert (done.returncode, done.stderr) == (0, "")
    who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    for command in (("add", "--all"), (*who, "commit", "--quiet", "--message", "a run")):
        assert run_in(folder, "git", *command).returncode == 0
    return folder


def test_the_run_and_its_tasks_are_in_prefects_database(undisturbed: Path) -> None:
    with sqlite3.connect(f"file:{prefect_home()}/prefect.db?mode=ro", uri=True) as database:
        flows = database.execute("SELECT state_type FROM flow_run").fetchall()
        tasks = dict(database.execute("SELECT name, state_type FROM task_run").fetchall())
    assert ("COMPLETED",) in flows
    assert {"base", "finetune@left", "sweep@average", "evaluate"} <= set(tasks)
    assert set(tasks.values()) == {"COMPLETED"}


@pytest.mark.parametrize("runner", ["threads", pytest.param("processes", marks=pytest.mark.nightly)])
def test_nothing_lives_on_after_a_run_that_was_killed_alone(runner: str, tmp_path: Path) -> None:
    folder = make_repository(tmp_path / "project", runner, steps=200_000)  # it does not end by itself
    process = start(folder, "flow")
    try:
        training = wait_for(lambda: [*(folder / ".mergeflow/progress").glob("finetune*")] or process.poll(), 200)
        assert training
        assert process.poll() is None
        strike(process, alone=True)
        assert wait_for(lambda: not session(process.pid), GONE), session(process.pid)
    finally:
        strike(process, alone=False)


def test_the_other_driver_on_a_clone_gives_the_same_lock(undisturbed: Path, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    assert run_in(tmp_path, "git", "clone", "--quiet", str(undisturbed), str(clone)).returncode == 0
    done = run_in(clone, "dvc", "repro")
    assert done.returncode == 0, done.stderr
    assert hashes(clone) == hashes(undisturbed)
    assert run_in(clone, "git", "status", "--porcelain").stdout == ""
    assert "Nothing changed" in run_in(clone, "mergeflow", "run").stdout
    assert run_in(clone, "git", "status", "--porcelain").stdout == ""


@pytest.mark.parametrize(
    ("kills", "span", "seed"), [(3, 12.0, 5), pytest.param(50, 25.0, 1, marks=pytest.mark.nightly)]
)
def test_killed_at_random_moments_it_ends_with_the_same_bits(
    kills: int, span: float, seed: int, undisturbed: Path, tmp_path: Path
) -> None:
    folder = make_repository(tmp_path / "project")
    done = kill_at_random(folder, kills, span, seed)
    print(*done, sep="\n")
    last = run_in(folder, "mergeflow", "run")
    assert last.returncode == 0, last.stderr
    assert hashes(folder) == hashes(undisturbed), done
