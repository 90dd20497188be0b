"""Real servers on loopback: MLflow's own on PostgreSQL with proxied artifacts, and one that serves the champion."""

import base64
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from registry.gates import GateSettings
from registry.logging import log_pipeline
from registry.promotion import Force, promote, register, rollback
from registry.store import connect
from registry.versions import compare, current, load, show
from tests.loopback import free_port, mlflow_server, post, server

from .test_logging import CHILDREN, a_record
from .test_real_model import picture, real, rows

__all__ = ["real"]
pytestmark = pytest.mark.slow


@pytest.mark.nightly
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
    database = postgres.replace("/postgres?", "/served?")
    with mlflow_server(tmp_path, database) as address:
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
    assert post(address, {"rows": []})[0] == 400
    assert post(address, b"{")[0] == 400


def test_the_local_champion_over_http(store, real, tmp_path):
    register(store, "merged", real)
    promote(store, "merged", 1, GateSettings())
    label = load(store, "merged").predict(rows((picture(1), "digits")))["label"][0]
    port = free_port()
    script = "import sys; from registry import serving, store; "
    script += "serving.serve(store.connect(project_root=sys.argv[1]), 'merged', port=int(sys.argv[2]))"
    with server(["-c", script, str(tmp_path), str(port)], port, tmp_path / "serve.log") as address:
        check_scoring(address, label)
    lines = (tmp_path / "serve.log").read_text().splitlines()
    assert lines[-1].split()[2:5] == ["POST", "/invocations", "400"]
    assert all(line.endswith(" ms") for line in lines)
