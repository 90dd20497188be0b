"""Opening the registry: where it is, quiet, whole or not at all, one writer at a time."""

import base64
import os
import shutil
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mergeflow.errors import MergeflowError
from registry.artifacts import input_example
from registry.gates import GateSettings
from registry.promotion import promote, register
from registry.store import Store, connect, file_lock, mlflow
from registry.versions import load, show

ROOT = Path(__file__).parents[2]
SCRIPT = """
import warnings, sys
warnings.simplefilter("default")
from registry.store import Store, connect
import registry.versions
store = connect(project_root=sys.argv[1])
registry.versions.current(store, "nothing")
"""


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW")} | {"PYTHONPATH": str(ROOT)}


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "address",
    [
        "mysql://ada:hunter2@host/db",
        "mysql://ada:hunter2#@host/db",
        "http://ada:hunter2@127.0.0.1:9",
        "postgresql://ada:hunter2@127.0.0.1:9/db",
        "postgresql://127.0.0.1:9/db?user=ada&password=hunter2",
    ],
)
def test_passwords_are_not_printed(tmp_path, monkeypatch, address, caplog, capfd):
    for name, value in (("MAX_RETRIES", "0"), ("TIMEOUT", "2")):
        monkeypatch.setenv(f"MLFLOW_HTTP_REQUEST_{name}", value)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.setattr("mlflow.store.db.utils.MAX_RETRY_COUNT", 2)  # of ten, which take 100 seconds
    with pytest.raises(MergeflowError) as error:
        connect(project_root=tmp_path)
    cause = error.value.__cause__
    for text in (str(error.value), str(cause) if address.startswith("http") else "", caplog.text, *capfd.readouterr()):
        assert "hunter2" not in text


def test_a_login_in_the_address_is_given_to_the_server(tmp_path, monkeypatch):
    """It goes where MLflow looks for it, and the address that is told and linked has none."""
    asked = []

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Authorization"])
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    for name in ("USERNAME", "PASSWORD"):
        monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(MergeflowError, match=f"the registry at http://127.0.0.1:{server.server_port} cannot"):
            connect(f"http://ada:hunter%402@127.0.0.1:{server.server_port}", tmp_path)
        server.shutdown()
    assert asked[0] == f"Basic {base64.b64encode(b'ada:hunter@2').decode()}"


def test_active_leaves_no_trace(store):
    before = (mlflow.get_tracking_uri(), os.environ.get("MLFLOW_TRACKING_URI"))
    with store.active():
        assert mlflow.get_tracking_uri() == store.uri
    assert (mlflow.get_tracking_uri(), os.environ.get("MLFLOW_TRACKING_URI")) == before


def test_a_damaged_database_is_named_with_the_way_out(tmp_path):
    (tmp_path / "mlflow.db").write_text("garbage\n")
    with pytest.raises(MergeflowError, match=r"mlflow\.db cannot be opened: .*mergeflow run") as error:
        connect(project_root=tmp_path)
    assert "\n" not in str(error.value)
    assert (tmp_path / "mlflow.db").read_text() == "garbage\n"


@pytest.mark.slow
def test_a_moved_project_takes_its_files_along(store, make_candidate, tmp_path):
    run = store.client.create_run(store.experiment_id).info.run_id
    register(store, "merged", make_candidate(1, run_id=run))
    promote(store, "merged", 1, GateSettings())
    now = tmp_path / "elsewhere 100%"
    now.mkdir()
    for name in ("mlflow.db", "mlartifacts"):
        (tmp_path / name).rename(now / name)
    moved = connect(project_root=now)
    assert load(moved, "merged").predict(input_example(make_candidate(1).files)).shape == (1, 2)
    assert [file.path for file in moved.client.list_artifacts(run)] == ["decisions"]
    assert not register(moved, "merged", make_candidate(1)).new
    assert register(moved, "merged", make_candidate(2)).new
    assert not (tmp_path / "mlartifacts").exists()


def test_a_copy_writes_into_its_own_folder(store, make_candidate, tmp_path):
    register(store, "merged", make_candidate(1))
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copyfile(tmp_path / "mlflow.db", bare / "mlflow.db")
    assert not register(connect(project_root=bare), "merged", make_candidate(1)).new  # its files are at the old place
    whole = tmp_path / "whole"
    whole.mkdir()
    shutil.copyfile(tmp_path / "mlflow.db", whole / "mlflow.db")
    shutil.copytree(tmp_path / "mlartifacts", whole / "mlartifacts")
    before = sorted((tmp_path / "mlartifacts").rglob("*"))
    register(connect(project_root=whole), "merged", make_candidate(2))
    assert sorted((tmp_path / "mlartifacts").rglob("*")) == before
    assert Path(show(connect(project_root=whole), "merged", 1)["source"].removeprefix("file://")).is_relative_to(whole)


@pytest.mark.slow
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


def excludes(first: Store, other: Store) -> bool:
    with first.lock("model merged"):
        try:
            with other.lock("model merged", 0.1):
                return False
        except MergeflowError:
            return True


def test_projects_with_one_registry_keep_out_of_each_other_s_way(store, tmp_path, template, monkeypatch):
    clones = [tmp_path / name for name in ("one", "two")]
    shared = f"sqlite:///{tmp_path / 'mlflow.db'}"
    first, two = (connect(shared, clone) for clone in clones)
    assert excludes(first, two)
    assert excludes(store, two)  # the project whose own registry it is
    monkeypatch.chdir(tmp_path)
    assert excludes(first, connect("sqlite:///mlflow.db", clones[1]))
    for clone in clones:
        clone.mkdir(exist_ok=True)
        shutil.copyfile(template, clone / "mlflow.db")
    assert not excludes(*(connect(project_root=clone) for clone in clones))
    assert first.scratch == clones[0] / ".mergeflow" / first.scratch.name != connect(project_root=clones[0]).scratch


def test_projects_with_one_server_keep_out_of_each_other_s_way(tmp_path, monkeypatch):
    monkeypatch.setattr("registry.store._experiment_id", lambda *_: "1")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))

    def opened(uri: str, clone: str) -> Store:
        return connect(uri, tmp_path / clone)

    first = opened("http://mlflow:5000", "one")
    assert excludes(first, opened("http://ada:secret@mlflow:5000/", "two"))
    assert not excludes(first, opened("http://mlflow:5001", "one"))
    assert "secret" not in "".join(str(path) for path in tmp_path.rglob("*"))
