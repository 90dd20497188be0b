"""Servers on loopback for tests: started as their users start them, asked over HTTP, stopped whatever happens."""

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

from tests.guard import guarded

ROOT = Path(__file__).parents[1]


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
            guarded([sys.executable, *command]),
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
    end = time.monotonic() + 400
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2)
            return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"no answer from {address} in 400 s:\n{log.read_text()}")


def post(address: str, body: object) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    call = urllib.request.Request(f"{address}/invocations", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(call, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@contextmanager
def mlflow_server(folder: Path, database: str) -> Iterator[str]:
    """Run MLflow's server on a database, with proxied artifacts in `folder`/files; its address."""
    port = free_port()
    command = ["-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--backend-store-uri", database, "--artifacts-destination", str(folder / "files")]
    with server(command, port, folder / "server.log", MLFLOW_SERVER_ENABLE_JOB_EXECUTION="false") as address:
        yield address
