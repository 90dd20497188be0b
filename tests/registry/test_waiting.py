"""A registry that does not answer: who asks is told what for, and a question ends by itself."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
import typer
from typer.testing import CliRunner

from mergeflow.errors import MergeflowError
from registry.commands import add_commands
from registry.store import connect
from tasks.project import files
from tests.loopback import mlflow_server
from tests.postgres import POSTGRES, postgres_server


def ask(root: Path, *words: str) -> tuple[BaseException | None, str, float]:
    """Run a command of the registry's; what it raised, what it printed on stderr, and its seconds."""
    app, started = typer.Typer(), time.monotonic()
    add_commands(app, root)
    done = CliRunner().invoke(app, ["registry", *words, "--model", "merged"])
    return done.exception, done.stderr, time.monotonic() - started


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE", 0.3)
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0.2")


@contextmanager
def answering(status: str, seconds: float = 0.0) -> Iterator[tuple[str, list[str]]]:
    """Run a server that gives every request the same status; its address, and the paths that were asked for."""
    paths: list[str] = []

    def answer(environment: dict[str, str], start: Any) -> list[bytes]:
        paths.append(environment["PATH_INFO"])
        time.sleep(seconds)
        start(status, [("Content-Type", "text/plain")])
        return [b"no database"]

    with make_server("127.0.0.1", 0, answer, handler_class=Quiet) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", paths
        server.shutdown()


class Quiet(WSGIRequestHandler):
    """Logs nothing."""

    def log_message(self, *_: object) -> None:
        pass


def test_who_is_refused_is_told_to_log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with answering("401 Unauthorized") as (address, _):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        error, _, _ = ask(tmp_path, "list")
    assert "error code 401" in str(error)
    assert "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in str(error)
    assert "Start that server" not in str(error)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("words", [("list",), ("lineage",)])
def test_a_server_without_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    with answering("500 Internal Server Error", 0.2) as (address, paths):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address.replace("//", "//ada:s3cret@"))
        error, printed, seconds = ask(tmp_path, *words)
    assert isinstance(error, MergeflowError), error
    assert f"the registry at {address} cannot be opened" in str(error)
    assert f"Waiting for the registry at {address} (get_experiment_by_name): no answer for 0.3 s." in printed
    assert "s3cret" not in printed + str(error)
    assert len(paths) == 3
    assert seconds < 10


@pytest.mark.nightly
@pytest.mark.skipif(not POSTGRES, reason="Debian's package postgresql is not installed")
def test_postgres_is_stopped_behind_a_running_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("psycopg2", reason="psycopg2, MLflow's driver for PostgreSQL, is not installed")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    monkeypatch.setattr(files, "PATIENCE", 1.0)
    with ExitStack() as servers:
        database = servers.enter_context(postgres_server())
        address = servers.enter_context(mlflow_server(tmp_path, database))
        connect(address, tmp_path)
        folder = Path(database.partition("host=")[2])
        os.kill(int((folder / "data/postmaster.pid").read_text().split()[0]), signal.SIGQUIT)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        for words in (("list",), ("promote", "1")):
            if words[0] == "promote":
                monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # its own patience is four minutes
            error, printed, seconds = ask(tmp_path, *words)
            assert isinstance(error, MergeflowError), error
            assert "cannot be opened" in str(error)
            assert f"Waiting for the registry at {address} (get_experiment_by_name): no answer" in printed
            assert seconds < 60
