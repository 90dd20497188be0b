"""Opening the registry: where it is, quiet, whole or not at all, one writer at a time."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mergeflow.errors import MergeflowError
from registry.locks import file_lock
from registry.quiet import mlflow
from registry.store import connect

ROOT = Path(__file__).parents[2]
SCRIPT = """
import warnings, sys
warnings.simplefilter("default")
from registry.store import connect
import registry.lookup
store = connect(project_root=sys.argv[1])
registry.lookup.current(store, "nothing")
"""


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")} | {"PYTHONPATH": str(ROOT)}


def test_the_first_start_says_nothing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path], env=clean_environment(), cwd=tmp_path, capture_output=True, text=True
    )
    noise = [line for line in done.stderr.splitlines() if "Deprecat" not in line and not line.startswith("  ")]
    assert (done.returncode, done.stdout, noise) == (0, "", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mergeflow", "mlflow.db"]


def test_telemetry_is_off():
    from mlflow.telemetry.utils import is_telemetry_disabled

    assert is_telemetry_disabled()


def test_the_environment_wins(tmp_path, template, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{template}")
    store = connect(f"sqlite:///{tmp_path / 'other.db'}", tmp_path, experiment="template")
    assert store.uri.endswith(str(template))
    assert not (tmp_path / "other.db").exists()


def test_addresses_of_no_known_kind(tmp_path, monkeypatch):
    with pytest.raises(MergeflowError, match=r"sqlite:///FILE"):
        connect(str(tmp_path / "mlruns"), tmp_path)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with pytest.raises(MergeflowError, match="Start that server"):
        connect("http://127.0.0.1:9", tmp_path)


def test_passwords_are_not_printed(tmp_path):
    with pytest.raises(MergeflowError) as error:
        connect("mysql://ada:hunter2@host/db", tmp_path)
    assert "hunter2" not in str(error.value)


def test_active_leaves_no_trace(store):
    before = (mlflow.get_tracking_uri(), os.environ.get("MLFLOW_TRACKING_URI"))
    with store.active():
        assert mlflow.get_tracking_uri() == store.uri
    assert (mlflow.get_tracking_uri(), os.environ.get("MLFLOW_TRACKING_URI")) == before


def test_a_half_made_database_is_not_taken_for_one(tmp_path, template):
    (tmp_path / "mlflow.db.new-dead").write_bytes(template.read_bytes()[:5000])
    connect(project_root=tmp_path)
    assert not list(tmp_path.glob("*.new-*"))


def test_a_deleted_experiment_comes_back(store, tmp_path):
    store.client.delete_experiment(store.experiment_id)
    assert connect(project_root=tmp_path).experiment_id == store.experiment_id


def test_lock_waits_then_says_who(tmp_path):
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with file_lock(tmp_path, "model a/b", 1):
            inside.set()
            leave.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait(10)
    start = time.monotonic()
    with pytest.raises(MergeflowError, match="held by another process"), file_lock(tmp_path, "model a/b", 0.2):
        pass
    assert time.monotonic() - start < 5
    with file_lock(tmp_path, "model a_b", 0.2):  # another name, whatever its file is called
        pass
    leave.set()
    holder.join()
    with file_lock(tmp_path, "model a/b", 1):
        pass
