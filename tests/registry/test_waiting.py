"""A registry that does not answer: who asks is told what for, and a question ends by itself."""

import time
from pathlib import Path
from threading import Thread
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
import typer
from typer.testing import CliRunner

from mergeflow.errors import MergeflowError
from registry.commands import add_commands
from tasks.project import files


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


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("words", [("list",), ("show",), ("history",), ("lineage",)])
def test_a_server_without_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    calls = []

    def fail(environment: dict[str, str], start: object) -> list[bytes]:
        calls.append(environment["PATH_INFO"])
        time.sleep(0.2)
        start("500 Internal Server Error", [("Content-Type", "text/plain")])  # type: ignore[operator]
        return [b"no database"]

    monkeypatch.setattr(WSGIRequestHandler, "log_message", lambda *_: None)
    with make_server("127.0.0.1", 0, fail) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address.replace("//", "//ada:s3cret@"))
        error, printed, seconds = ask(tmp_path, *words)
        server.shutdown()
    assert isinstance(error, MergeflowError), error
    assert f"the registry at {address} cannot be opened" in str(error)
    assert f"Waiting for the registry at {address} (get_experiment_by_name): no answer for 0.3 s." in printed
    assert "s3cret" not in printed + str(error)
    assert len(calls) == 3
    assert seconds < 10
