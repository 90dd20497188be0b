"""Task runners and clusters that are not there."""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.task_runners import ThreadPoolTaskRunner

from flows import pipeline, runners
from flows.ephemeral_server import embedded_server
from flows.runners import cluster, task_runner
from mergeflow.errors import MergeflowError
from tasks.project.sections import RunSection
from tasks.project.stage import Stage
from tests.flows.hosts import Hosts, machines
from tests.loopback import free_port


@pytest.mark.parametrize("name", ["dask", "ray"])
def test_a_runner_without_its_package_is_refused_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, f"prefect_{name}", None)
    advice = f"run `pip install '/path/to/mergeflow[{name}]'`"
    line = f"run.runner is '{name}', which needs the package prefect-{name}: {advice}"
    with pytest.raises(MergeflowError, match=re.escape(line)):
        task_runner(name, 2)


@pytest.mark.parametrize(("name", "package"), [("dask", "distributed"), ("ray", "ray")])
def test_a_cluster_without_its_package_is_refused_too(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MergeflowError, match=re.escape(f"which needs the package {package}: run `pip install")):
        cluster(name, 2)


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", address)
    monkeypatch.setattr(runners, "SILENCE", 0.5)
    with pytest.raises(MergeflowError, match=f"the Dask scheduler at {address} does not answer"), cluster("dask", 2):
        pass


def test_a_store_is_refused_where_the_stages_stay() -> None:
    with pytest.raises(ValueError, match="store is for the runners dask and ray"):
        RunSection(runner="threads", store="s3://bucket/fleet")
    with pytest.raises(ValueError, match="store"):
        RunSection(runner="dask", store="s3://key:secret@host/bucket")


@pytest.mark.slow
def test_a_cluster_is_sent_as_many_stages_as_params_yaml_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = {name: Stage(name, None, "module", (), (), (name,)) for name in "abcdef"}
    most: list[int] = []

    def place(runner: Any, _root: Path, address: str, *_: Any) -> Any:
        return runner.submit(task(cache_policy=NO_CACHE)(lambda name: most.append(be_at_work(name))), {"name": address})

    monkeypatch.setattr(pipeline, "submit", place)
    monkeypatch.setattr(pipeline, "record_outputs", lambda *_: None)

    @flow
    def run() -> None:
        with ThreadPoolTaskRunner(max_workers=6) as runner:  # a cluster of six
            pipeline._run_group(tmp_path, runner, list(stages), stages, None, workers=2)

    with embedded_server(tmp_path):
        run()
    assert len(most) == 6
    assert max(most) == 2


AT_WORK: list[int] = []


def be_at_work(_argument: Any) -> int:
    """Return how many calls are at work at once."""
    AT_WORK.append(1)
    time.sleep(0.4)
    most = len(AT_WORK)
    AT_WORK.pop()
    return most


@pytest.mark.slow
@pytest.mark.parametrize(("device", "at_once"), [(True, 1), (False, 2)])
def test_a_device_has_one_stage_at_a_time(monkeypatch: pytest.MonkeyPatch, device: bool, at_once: int) -> None:
    from distributed import LocalCluster

    function = (be_at_work.__module__, be_at_work.__name__)
    monkeypatch.setitem(sys.modules, be_at_work.__module__, sys.modules[__name__])
    shape = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with LocalCluster(**shape, resources={"GPU": 1}) as workers:
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", workers.scheduler_address)
        with cluster("dask", 2) as machines, ThreadPoolExecutor(2) as threads:
            assert machines.has_devices()
            calls = [threads.submit(machines.run, function, number, device, lambda: None) for number in range(2)]
            assert max(call.result() for call in calls) == at_once


@pytest.mark.slow
@pytest.mark.nightly
def test_ray_starts_here_beside_that_of_others_and_gives_a_device_to_stages_that_take_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = runners._ray
    options = ray(2)[2] | {"init_kwargs": ray(2)[2]["init_kwargs"] | {"num_gpus": 1}}
    monkeypatch.setattr(runners, "_ray", lambda _workers: ("", "", options))
    others = Hosts(tmp_path / "hosts", tmp_path / "driver")
    with machines("ray", others, free_port(), []), cluster("ray", 2) as here:
        assert here.has_devices()
        devices = [here.run(("os", "getenv"), "CUDA_VISIBLE_DEVICES", taken, lambda: None) for taken in (True, False)]
    assert devices[0] == "0"
    assert not devices[1]
