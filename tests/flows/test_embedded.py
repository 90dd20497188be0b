"""The Prefect server inside a run's process: what it records, whom it makes way for, what it says of a bad database."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.small_project import ROOT, run_in

# As `mergeflow study` does for two projects: two flows in one process, one after the other.
TWICE = """
import threading
from pathlib import Path
from flows.ephemeral_server import embedded_server, is_server_chosen

for name in ("first", "second"):
    with embedded_server(Path("home")):
        from prefect import flow, get_run_logger, task

        @task
        def double(number):
            get_run_logger().info("doubled %s", number)
            return 2 * number

        @flow(name=name)
        def sums():
            return sum(future.result() for future in double.map([1, 2, 3]))

        assert sums() == 12
        assert not is_server_chosen()
with embedded_server(Path("home")):
    pass  # a run that fails at once, before Prefect's services have started
assert "prefect-server" not in [thread.name for thread in threading.enumerate()]
"""
CHOSEN = """
from pathlib import Path
from flows.ephemeral_server import embedded_server, is_server_chosen

with embedded_server(Path("unused")):
    print(is_server_chosen(), Path("unused").exists())
"""


def script(folder: Path, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code with a Prefect home of its own, as far as `variables` name one."""
    plain = {"PYTHONPATH": str(ROOT), "PREFECT_HOME": str(folder / "home")}
    return run_in(folder, sys.executable, "-c", code, **plain | variables)


@pytest.mark.nightly
def test_each_run_leaves_its_states_and_its_log_and_no_server(tmp_path: Path) -> None:
    """By day tests/flows/test_kills.py reads what two runs of a project have left."""
    done = script(tmp_path, TWICE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with sqlite3.connect(f"file:{tmp_path}/home/prefect.db?mode=ro", uri=True) as database:
        flows = database.execute("SELECT flow.name, state_type FROM flow_run JOIN flow ON flow.id = flow_id").fetchall()
        tasks = database.execute("SELECT state_type, count(*) FROM task_run GROUP BY state_type").fetchall()
        lines = database.execute(
            "SELECT message, count(*) FROM log WHERE message LIKE 'doubled%' GROUP BY 1"
        ).fetchall()
    assert sorted(flows) == [("first", "COMPLETED"), ("second", "COMPLETED")]
    assert tasks == [("COMPLETED", 6)]
    assert sorted(lines) == [("doubled 1", 2), ("doubled 2", 2), ("doubled 3", 2)]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["environment", "profile"])
def test_a_server_that_a_person_chose_is_used(place: str, tmp_path: Path) -> None:
    address = "http://127.0.0.1:9/api"  # nothing is asked of it here
    profile = tmp_path / "theirs"
    profile.mkdir()
    (profile / "profiles.toml").write_text(
        f'active = "theirs"\n[profiles.theirs]\nPREFECT_API_URL = {json.dumps(address)}\n'
    )
    chosen = {"PREFECT_API_URL": address} if place == "environment" else {"PREFECT_HOME": str(profile)}
    done = script(tmp_path, CHOSEN, **chosen)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


@pytest.mark.slow
def test_a_damaged_database_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/prefect.db").write_text("not a database, but long enough to be read as one")
    done = script(tmp_path, CHOSEN)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "mergeflow.errors.MergeflowError: Prefect's own server does not start"
    )
    assert "file is not a database" in done.stderr.splitlines()[-1]
    assert "home: if it is damaged or a newer Prefect made it, move it away" in done.stderr.splitlines()[-1]
