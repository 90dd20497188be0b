"""A real Prefect server on loopback, with PostgreSQL where it is installed, and workers that are started and killed."""

import base64
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.flows.forked import run_forked
from tests.flows.small_project import environment
from tests.guard import end_below, guarded
from tests.loopback import free_port
from tests.postgres import POSTGRES, postgres_server

LEASES = "prefect.server.concurrency.lease_storage.filesystem"


@dataclass
class Server:
    """A running server: its address, and the environment of whoever works with it in the project folder."""

    address: str
    project: Path
    env: dict[str, str]
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def run(self, *command: str, timeout: float = 300) -> str:
        """Run a command in the project folder; it must succeed. Return what it printed."""
        done = run_forked(self.project, command, self.env, timeout)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    def ask(self, path: str, question: dict[str, Any]) -> Any:
        """Post a question to the server's API and return the answer."""
        data = json.dumps(question).encode()
        headers = {"Content-Type": "application/json"}
        if login := self.env.get("PREFECT_API_AUTH_STRING"):
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        call = urllib.request.Request(f"{self.address}/{path}", data, headers)
        with urllib.request.urlopen(call, timeout=60) as answer:
            return json.loads(answer.read() or "null")

    def runs(self, deployment: str, *states: str) -> list[dict[str, Any]]:
        """Return the runs of a deployment that are in one of the states, in the order in which they started."""
        rows: list[dict[str, Any]] = self.ask(
            "flow_runs/filter",
            {
                "deployments": {"name": {"any_": [deployment]}},
                "flow_runs": {"state": {"type": {"any_": list(states)}}},
                "sort": "START_TIME_ASC",
            },
        )
        return rows

    def start_worker(self) -> "subprocess.Popen[bytes]":
        return self.start("prefect", "worker", "start", "--pool", "mergeflow", "--limit", "1")

    def start(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self.project.parent / f"background{len(self.started)}.log").open("w") as sink:
            process = subprocess.Popen(
                guarded(command), cwd=self.project, env=self.env, stdout=sink, stderr=sink, start_new_session=True
            )
        self.started.append(process)
        return process

    def kill(self, process: "subprocess.Popen[bytes]") -> None:
        """Kill a process, such as a worker, and those below it, such as its runs, without a chance to say good-bye."""
        end_below(process.pid)
        process.kill()
        process.wait()


@contextmanager
def prefect_server(folder: Path, project: Path, login: str = "") -> Iterator[Server]:
    """Run a server until the block ends; then stop it and every worker.

    Args:
        login: USER:PASSWORD that it asks for; empty: it asks for none.
    """
    port = free_port()
    address = f"http://127.0.0.1:{port}/api"
    env = {**environment(), "PREFECT_HOME": str(folder), "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    env |= {"PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES}
    with postgres_server() if POSTGRES else nullcontext("") as database, (folder / "server.log").open("w") as sink:
        if database:
            env["PREFECT_API_DATABASE_CONNECTION_URL"] = database.replace("postgresql:", "postgresql+asyncpg:")
        command = ["prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
        served = env | ({"PREFECT_SERVER_API_AUTH_STRING": login} if login else {})
        process = subprocess.Popen(
            guarded(command), cwd=folder, env=served, stdout=sink, stderr=sink, start_new_session=True
        )
        client = {**env, "PREFECT_API_URL": address, "MERGEFLOW_PROJECT": str(project)}
        client["PREFECT_WORKER_QUERY_SECONDS"] = "1"
        if login:
            client["PREFECT_API_AUTH_STRING"] = login
        server = Server(address, project, client)
        try:
            wait_for(lambda: _is_up(address, process, folder / "server.log"), 180)
            yield server
        finally:
            for started in server.started:
                server.kill(started)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_for(condition: Callable[[], Any], seconds: float, every: float = 0.5) -> Any:
    """Ask until the answer is true, and return it; fail after `seconds`."""
    end = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < end, f"nothing after {seconds} s"
        time.sleep(every)


def _is_up(address: str, process: "subprocess.Popen[bytes]", log: Path) -> bool:
    assert process.poll() is None, log.read_text()
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2):
            return True
    except OSError:
        return False
