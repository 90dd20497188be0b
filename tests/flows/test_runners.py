"""Task runners and clusters that are not there."""

import re
import sys

import pytest

from flows import runners
from flows.runners import cluster, task_runner
from mergeflow.errors import MergeflowError
from tasks.project.sections import RunSection
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
