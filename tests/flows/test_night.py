"""Nobody watches: a real server with a login, a pool without commands, alerts that arrive."""

import json
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.flows.kill_driver import make_toy_repository
from tests.flows.prefect_server import Server, prefect_server, wait_for
from tests.flows.runbook import read_blocks
from tests.flows.small_project import ROOT

pytestmark = pytest.mark.slow
LOGIN = "ada:l0velace"
SILENCE = "mergeflow: no nightly run has completed for 26 hours"


@contextmanager
def receiver() -> Iterator[tuple[str, list[Any]]]:
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", received
        server.shutdown()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("night")
    project = make_toy_repository(folder / "project", steps=20)
    shutil.copy(ROOT / "prefect.yaml", project)
    with prefect_server(folder, project, LOGIN) as server:
        pool = ("prefect", "work-pool", "create", "mergeflow", "--type", "process")
        server.run(*pool, "--base-job-template", str(ROOT / "deploy/process.json"))
        server.run("prefect", "--no-prompt", "deploy", "--all")
        yield server


def deployment(server: Server, name: str) -> dict[str, Any]:
    return server.ask("deployments/filter", {"deployments": {"name": {"any_": [name]}}})[0]


def test_a_stranger_is_refused(server: Server) -> None:
    call = urllib.request.Request(f"{server.address}/deployments/filter", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(call, timeout=10)


def test_a_run_that_brings_a_command_is_refused(server: Server, tmp_path: Path) -> None:
    path = f"deployments/{deployment(server, 'mergeflow-gate')['id']}/create_flow_run"
    given = {"job_variables": {"command": f"touch {tmp_path}/made"}, "state": {"type": "SCHEDULED"}}
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.ask(path, given)
    assert refused.value.code in (409, 422), refused.value.read()
    assert "command" in refused.value.read().decode()


@pytest.fixture(scope="module")
def received(server: Server) -> Iterator[list[dict[str, str]]]:
    """What the alerts of the page have sent to a webhook, silence being ten seconds."""
    with receiver() as (address, received):
        (page,) = (block.text for block in read_blocks({"ALERTS": f"json://{address}/hook"}, ROOT / "docs/on-call.md"))
        shutil.copytree(ROOT / "deploy", server.project / "deploy")
        alerts = server.project / "deploy/alerts.yaml"
        alerts.write_text(alerts.read_text().replace("93600", "10"))
        subprocess.run(["bash", "-eu", "-c", page], cwd=server.project, env=server.env, check=True)
        yield received


@pytest.fixture(scope="module")
def worker(server: Server) -> None:
    server.start_worker()


@pytest.mark.usefixtures("worker")
def test_a_failed_run_and_silence_reach_the_webhook(
    server: Server, received: list[dict[str, str]], tmp_path: Path
) -> None:
    server.run("prefect", "deployment", "run", "nightly/mergeflow-nightly", "--param", f"root={tmp_path}")
    wait_for(lambda: {"mergeflow: nightly is Failed", SILENCE} <= set(titles(received)), 120)
    failure = titles(received)["mergeflow: nightly is Failed"]
    assert f"{tmp_path} is not in a project folder" in failure


def titles(received: list[dict[str, str]]) -> dict[str, str]:
    return {message["title"]: message["message"] for message in received}


@pytest.mark.usefixtures("worker")
def test_missed_nights_run_once(server: Server) -> None:
    name, before = "mergeflow-nightly", datetime.now(UTC) - timedelta(days=4)
    missed = {"start_time": before.isoformat(), "min_runs": 4, "max_runs": 4}
    server.ask(f"deployments/{deployment(server, name)['id']}/schedule", missed)
    wait_for(lambda: len(server.runs(name, "CANCELLED")) == 3, 120)
    assert {run["state_name"] for run in server.runs(name, "CANCELLED")} == {"Missed"}
    assert [run["auto_scheduled"] for run in server.runs(name, "PENDING", "RUNNING", "COMPLETED")] == [True]
    tomorrow = [run["expected_start_time"] for run in server.runs(name, "SCHEDULED")]
    assert min(tomorrow) > datetime.now(UTC).isoformat()
