"""Real servers on loopback: MLflow's own on PostgreSQL with proxied artifacts, and one that serves the champion."""

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from registry.gates import GateSettings
from registry.logging import log_pipeline
from registry.lookup import compare, current, load, show
from registry.promotion import Force, promote, register, rollback
from registry.store import connect

from .test_logging import CHILDREN, a_record
from .test_real_model import picture, real, rows

__all__ = ["real"]
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(command: list[str], port: int, log: Path, **environment: str) -> Iterator[str]:
    """Run a Python program that listens on the port until the block ends; its address."""
    # `mlflow models serve` looks for uvicorn on the PATH, where an environment that is not activated is missing.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    python_path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PATH": path, "PYTHONPATH": python_path, **environment}
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=env,
            cwd=log.parent,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def stop(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_up(address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + 180
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"no answer from {address} in 180 s:\n{log.read_text()}")


def post(address: str, body: object) -> tuple[int, dict]:
    data = json.dumps(body).encode()
    call = urllib.request.Request(f"{address}/invocations", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_a_tracking_server_on_postgres(postgres, real, tmp_path):
    subprocess.run(
        [
            "psql",
            "-q",
            "-h",
            postgres.partition("host=")[2],
            "-U",
            "mergeflow",
            "postgres",
            "-c",
            "CREATE DATABASE served",
        ],
        check=True,
    )
    database, port = postgres.replace("/postgres?", "/served?"), free_port()
    command = ["-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", database, "--artifacts-destination", str(tmp_path / "files")]
    quick = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with server(command, port, tmp_path / "server.log", **quick) as address:
        store = connect(address, tmp_path, lock_uri=database)
        assert store.artifact_folder is None
        logged = log_pipeline(store, a_record(tmp_path), CHILDREN)
        assert not log_pipeline(store, a_record(tmp_path), CHILDREN).created
        for number, fingerprint in enumerate(("first", "second"), start=1):
            candidate = type(real)(real.files, real.evidence, fingerprint, real.metrics, run_id=logged.run_id)
            assert register(store, "merged", candidate).new
            assert register(store, "merged", candidate).version == str(number)
        assert promote(store, "merged", 1, GateSettings()).changed
        refused = promote(store, "merged", 2, GateSettings())  # no better: the gates say no
        assert (refused.champion, refused.changed) == ("1", False)
        assert promote(store, "merged", 2, GateSettings(), force=Force("ada", "to test the rollback")).changed
        assert rollback(store, "merged").version == "1"
        assert show(store, "merged", "champion")["accuracy"] == dict(real.evidence.accuracy)
        assert compare(store, "merged", 1, 2)["accuracy"]["digits"]["change"] == 0.0
        assert current(store, "merged").previous is None
        answer = load(store, "merged").predict(rows((picture(1), "digits")))
        assert answer["label"][0] in ("zero", "one", "two")
        with served_champion(address, tmp_path) as scoring:
            check_scoring(scoring, answer["label"][0])


@contextmanager
def served_champion(tracking: str, folder: Path) -> Iterator[str]:
    port = free_port()
    command = ["-m", "mlflow", "models", "serve", "-m", "models:/merged@champion", "--env-manager", "local"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with server(command, port, folder / "serve.log", MLFLOW_TRACKING_URI=tracking) as address:
        yield address


def check_scoring(address: str, label: str) -> None:
    def record(image: bytes, task: str) -> dict[str, object]:
        return {"dataframe_records": [{"image": base64.b64encode(image).decode(), "task": task}]}

    status, answer = post(address, record(picture(1), "digits"))
    assert (status, answer["predictions"][0]["label"]) == (200, label)
    status, answer = post(address, record(picture(1), "digit"))
    assert status == 400
    assert "did you mean 'digits'" in answer["message"]
    assert post(address, record(b"junk", "digits"))[0] == 400
    assert post(address, {"dataframe_records": [{"task": "digits"}]})[0] == 400


def test_the_local_champion_over_http(store, real, tmp_path):
    register(store, "merged", real)
    promote(store, "merged", 1, GateSettings())
    label = load(store, "merged").predict(rows((picture(1), "digits")))["label"][0]
    port = free_port()
    script = "import sys; from registry import serving, store; "
    script += "serving.serve(store.connect(project_root=sys.argv[1]), 'merged', port=int(sys.argv[2]))"
    with server(["-c", script, str(tmp_path), str(port)], port, tmp_path / "serve.log") as address:
        check_scoring(address, label)
    assert (tmp_path / "serve.log").read_text() == ""
