"""Prefect for real: server, workers, the deployments of prefect.yaml, a schedule, kills, limits, other task runners."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import prefect
import pytest
import yaml

from mergeflow.cli import QUIET
from tests.flows.kill_driver import make_toy_repository
from tests.flows.prefect_server import Server, prefect_server, wait_for
from tests.flows.small_project import ROOT
from tests.project_folder import change_params

pytestmark = pytest.mark.slow
STEPS = 800  # of fine-tuning: enough to be killed in, with the state saved a hundred times
SLOT = """
import time
from pathlib import Path
import tasks.running.devices
tasks.running.devices.device_names = lambda wanted: ["cuda:0"]  # as on a machine with a GPU
import flows.pipeline
from flows.pipeline import gpu_slot
from tasks.project.graph import load_graph
stage = load_graph(Path("."))["base"]
"""
DIE = """
import os, signal
with gpu_slot(Path("."), stage):
    os.kill(os.getpid(), signal.SIGKILL)
"""
TURNS = """
import threading
from mergeflow.errors import MergeflowError

def hold():
    with gpu_slot(Path("."), stage):
        begin = time.monotonic()
        time.sleep(0.5)
        spans.append((begin, time.monotonic()))

flows.pipeline.LIMIT = "tpu"
try:
    hold()
except MergeflowError as error:
    print(error)
flows.pipeline.LIMIT = "gpu"
spans = []
threads = [threading.Thread(target=hold) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
first, second = sorted(spans)
assert first[1] <= second[0], spans
with gpu_slot(Path("."), stage):
    flows.pipeline.running_code = lambda: {"host": "box"}  # which has a limit of its own
    with gpu_slot(Path("."), stage):
        pass
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the pool, the limit and the deployments of a small project, made by the documented commands."""
    folder = tmp_path_factory.mktemp("prefect")
    project = make_toy_repository(folder / "project", steps=STEPS, save_every=8)
    # A third task may cost the other two some accuracy.
    change_params(project, {"sweep": {"task_arithmetic": {"scale": [0.3, 0.5]}}, "registry.tolerance": 0.5})
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    deployments["deployments"][0]["schedules"] = [{"interval": 15}]  # seconds, not every night
    (project / "prefect.yaml").write_text(yaml.safe_dump(deployments))
    with prefect_server(folder, project) as server:
        server.run("prefect", "work-pool", "create", "mergeflow", "--type", "process")
        server.run("prefect", "global-concurrency-limit", "create", "gpu", "--limit", "1")
        server.run("prefect", "--no-prompt", "deploy", "--all")
        yield server


@pytest.fixture(scope="module")
def dead_holder(server: Server) -> None:
    """What held the GPU's slot was killed: the slot comes back while other tests run."""
    server.start(sys.executable, "-c", SLOT + DIE)


@dataclass(frozen=True)
class Story:
    """What was seen of a scheduled run that was killed, and of the next one.

    Attributes:
        killed: the server's word of the killed run, after the next one.
        following: the server's word of the next run.
        ran: stage: when it had run, before the kill.
    """

    killed: dict[str, Any]
    following: dict[str, Any]
    ran: dict[str, float]


@pytest.fixture(scope="module")
def story(server: Server) -> Story:
    """A scheduled run is killed in fine-tuning, its worker too; a new worker takes the next scheduled run."""
    project = server.project
    worker = server.start_worker()
    wait_for(lambda: list((project / ".mergeflow/scratch").glob("finetune@*/*/training/*")), 300, every=0.01)
    server.kill(worker)
    assert not (project / "outputs/experts/left").exists() or not (project / "outputs/experts/right").exists()
    ran = {name: started(project, name) for name in ("prepare@left", "prepare@right", "base")}
    [killed] = server.runs("mergeflow-nightly", "RUNNING")
    server.start_worker()
    wait_for(lambda: [run for run in under_way(server) if run["id"] != killed["id"]], 400)
    server.ask(f"deployments/{killed['deployment_id']}/pause_deployment", {})  # at once; the command takes seconds
    following = wait_for(lambda: server.runs("mergeflow-nightly", "COMPLETED", "FAILED"), 400)[0]
    wait_for(lambda: not under_way(server), 400)
    [killed] = [run for run in server.runs("mergeflow-nightly", "RUNNING", "CRASHED") if run["id"] == killed["id"]]
    return Story(killed, following, ran)


def under_way(server: Server) -> list[dict[str, Any]]:
    return server.runs("mergeflow-nightly", "PENDING", "RUNNING")


def started(project: Path, stage: str) -> float:
    record = json.loads((project / f".mergeflow/records/{stage}.json").read_text())
    return float(record["started"])


def made(project: Path) -> dict[str, bytes]:
    """Experts and sweeps: what the runners fan out."""
    files = [path for name in ("experts", "sweeps") for path in (project / "outputs" / name).rglob("*")]
    return {str(path.relative_to(project)): path.read_bytes() for path in files if path.is_file()}


def test_the_schedule_started_both_runs(story: Story) -> None:
    for run in (story.killed, story.following):
        assert run["auto_scheduled"]
        assert run["created_by"]["type"] == "SCHEDULE"


def test_a_killed_run_is_reported_and_the_next_one_continues_its_work(server: Server, story: Story) -> None:
    assert (story.killed["state_type"], story.following["state_type"]) == ("CRASHED", "COMPLETED")
    assert {name: started(server.project, name) for name in story.ran} == story.ran
    assert json.loads(server.run("dvc", "status", "--json")) == {"code": ["always changed"]}
    assert not list((server.project / ".mergeflow/runs").iterdir())


def test_the_run_shows_table_decision_report_and_log(server: Server, story: Story) -> None:
    run = {"flow_runs": {"id": {"any_": [story.following["id"]]}}}
    artifacts = {artifact["key"]: artifact["data"] for artifact in server.ask("artifacts/filter", run)}
    assert "| left |" in artifacts["results"]
    assert "**task_arithmetic**" in artifacts["results"]
    assert "mergeflow-pocket8 version 1: passed the gates" in artifacts["decision"]
    assert (server.project / "outputs/report.html").as_uri() in artifacts["report"]
    asked = {"logs": {"flow_run_id": {"any_": [story.following["id"]]}}, "limit": 200}
    messages = [line["message"] for line in server.ask("logs/filter", asked)]
    assert "base is up to date" in messages
    assert "select has run" in messages
    assert any("was killed; this one continues its work" in message for message in messages)


@pytest.mark.nightly
@pytest.mark.usefixtures("dead_holder")
@pytest.mark.parametrize("runner", ["dask", "ray"])
def test_every_runner_makes_the_same_bits(server: Server, story: Story, tmp_path: Path, runner: str) -> None:
    folder = tmp_path / "project"
    shutil.copytree(server.project, folder, symlinks=True)
    before = made(folder)
    for name in ("experts", "sweeps"):
        shutil.rmtree(folder / "outputs" / name)
    change_params(folder, {"run.runner": runner})
    code = "from flows.pipeline import pipeline; print(pipeline('.', targets=['finetune', 'sweep']))"
    done = run_python(server, folder, f"if __name__ == '__main__':\n    {code}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert made(folder) == before


@pytest.mark.nightly
def test_a_new_task_and_the_gate_by_deployment(server: Server, story: Story) -> None:
    given = ("--param", "source=toy:clouds,classes=2", "--param", "name=third")
    server.run("prefect", "deployment", "run", "add-task/mergeflow-add-task", *given)
    server.run("prefect", "deployment", "run", "gate/mergeflow-gate", "--param", "version=1", "--watch")
    assert server.runs("mergeflow-add-task", "COMPLETED")
    assert server.runs("mergeflow-gate", "COMPLETED")
    assert "third" in yaml.safe_load((server.project / "params.yaml").read_text())["tasks"]


def test_nothing_reports_home() -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    for deployment in deployments:
        assert deployment["work_pool"]["job_variables"]["env"] == QUIET


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_the_server_takes_the_pools_for_containers(server: Server, kind: str) -> None:
    template = ROOT / f"deploy/{kind}.json"
    server.run("prefect", "work-pool", "create", kind, "--type", kind, "--base-job-template", str(template))
    ours = json.loads(template.read_text())
    assert server.ask("work_pools/filter", {"work_pools": {"name": {"any_": [kind]}}})[0]["base_job_template"] == ours
    written = json.loads(next(Path(prefect.__path__[0]).rglob("aggregate-worker-metadata.json")).read_text())
    default = written[f"prefect-{kind}"][kind]["default_base_job_configuration"]
    assert set(ours["job_configuration"]) <= set(default["job_configuration"])


@pytest.mark.nightly
@pytest.mark.usefixtures("dead_holder")
def test_gpu_slots_are_strict(server: Server, story: Story) -> None:
    """A missing limit is an error; two stages take turns; the slot of a holder that was killed comes back.

    A machine with a limit of its own does not wait for the others.
    """
    server.run("prefect", "global-concurrency-limit", "create", "gpu@box", "--limit", "1")
    done = run_python(server, server.project, SLOT + TURNS)
    assert done.returncode == 0, done.stderr
    assert "prefect global-concurrency-limit create tpu --limit 1" in done.stdout


def run_python(server: Server, folder: Path, code: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(code)
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=server.env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
