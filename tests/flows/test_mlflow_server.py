"""The pipeline against a real MLflow server on PostgreSQL: logged, registered, promoted, loaded, served over HTTP."""

import base64
import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flows.dvc_commands import record_outputs, stages_to_run
from flows.status import publish_report
from tasks.project.graph import load_graph
from tasks.running.runner import run_stage
from tests.flows.small_project import environment
from tests.loopback import free_port, mlflow_server, post, server
from tests.postgres import POSTGRES, postgres_server
from tests.project_folder import change_params

pytestmark = pytest.mark.slow
MODEL = "mergeflow-pocket8"


@dataclass(frozen=True)
class Served:
    """A project whose registry is a server: its folder, the server's address and where it keeps files."""

    project: Path
    address: str
    files: Path


@pytest.fixture(scope="module")
def served(finished: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The small project after its later stages ran again and found the server's registry empty."""
    if not POSTGRES:
        pytest.skip("Debian's package postgresql is not installed")
    folder = tmp_path_factory.mktemp("served")
    project = Path(shutil.copytree(finished[0], folder / "project", symlinks=True))
    change_params(project, {"sweep.task_arithmetic.scale": [0.3, 0.4]})
    with (
        postgres_server() as database,
        mlflow_server(folder, database) as address,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("MLFLOW_TRACKING_URI", address)
        patch.setenv("MERGEFLOW_LOCK_URI", database)
        run_stale(project)
        record = json.loads((project / "outputs/registration.json").read_text())
        assert (record["version"], record["aliases"]) == ("1", ["champion"])
        yield Served(project, address, folder / "files")


def run_stale(project: Path) -> None:
    """Do what `mergeflow run` does, without Prefect, whose server costs seconds."""
    stages = load_graph(project)
    todo = stages_to_run(project, stages)
    assert todo[-1] == "register"
    for address in todo:
        run_stage(project, stages[address])
        record_outputs(project, [address])
    publish_report(project)


def test_the_run_its_experts_and_methods_are_logged_with_plots_and_report(served: Served) -> None:
    from registry.store import connect

    store = connect(project_root=served.project)
    runs = store.client.search_runs([store.experiment_id])
    kinds = sorted(run.data.tags["mergeflow.kind"] for run in runs)
    assert kinds == ["expert", "expert", "method", "method", "method", "pipeline"]
    (parent,) = (run for run in runs if run.data.tags["mergeflow.kind"] == "pipeline")
    top = {file.path for file in store.client.list_artifacts(parent.info.run_id)}
    assert {"figures", "series", "results", "report.html"} <= top
    figures = {file.path for file in store.client.list_artifacts(parent.info.run_id, "figures")}
    assert "figures/accuracy.svg" in figures
    assert parent.data.metrics["test/cart/mean"] > 0


def test_weights_are_uploaded_once_per_version_and_never_for_a_trial(served: Served) -> None:
    from registry.logging import log_sweep
    from registry.store import connect

    def weights() -> list[str]:
        return sorted(path.name for path in served.files.rglob("*.safetensors"))

    once = ["000.safetensors", "001.safetensors", "model.safetensors", "scores.safetensors"]  # heads by number
    assert weights() == once
    run_stage(served.project, load_graph(served.project)["register"], force=True)
    rows = json.loads((served.project / "outputs/sweeps/task_arithmetic.json").read_text())["candidates"]
    assert len(rows) == 2
    store = connect(project_root=served.project)
    folder = served.project / "sweeps/grid"
    folder.mkdir(parents=True)
    for name in ("trials.parquet", "winner.yaml"):
        (folder / name).write_text("")
    common = {"method": "task_arithmetic", "objective": 0.5}
    trials = [{**common, **row, "trial": number} for number, row in enumerate(rows)]
    log_sweep(store, "grid", trials, folder)
    assert weights() == once
    assert len(store.client.search_logged_models([store.experiment_id])) == 1


def an_answer(served: Served) -> tuple[bytes, str]:
    """An image of the project and the champion's label of it, loaded as whoever knows only MLflow loads it."""
    from registry.store import mlflow

    image = next((served.project / "inputs/red/test/red_centre").glob("*.png")).read_bytes()
    model = mlflow.pyfunc.load_model(f"models:/{MODEL}@champion")
    return image, model.predict(pd.DataFrame({"image": [image], "task": ["red"]}))["label"][0]


def test_the_champion_is_loaded_and_classifies(served: Served) -> None:
    assert an_answer(served)[1] in ("red centre", "red corner", "red_centre", "red_corner")


@pytest.mark.nightly
def test_the_champion_classifies_over_http(served: Served, tmp_path: Path) -> None:
    """By day tests/registry/test_servers.py asks a served champion, which no project has made."""
    image, label = an_answer(served)
    port = free_port()
    command = ["-m", "mlflow", "models", "serve", "-m", f"models:/{MODEL}@champion", "--env-manager", "local"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    quiet = {key: value for key, value in environment().items() if key in ("OMP_NUM_THREADS", "DO_NOT_TRACK")}
    with server(command, port, tmp_path / "serve.log", MLFLOW_TRACKING_URI=served.address, **quiet) as scoring:
        encoded = base64.b64encode(image).decode()
        status, answer = post(scoring, {"dataframe_records": [{"image": encoded, "task": "red"}]})
        assert (status, answer["predictions"][0]["label"]) == (200, label)
        for bad, words in (
            ({"dataframe_records": [{"image": encoded, "task": "rde"}]}, "did you mean 'red'"),
            ({"dataframe_records": [{"image": "AAAA", "task": "red"}]}, "image"),
            ({"dataframe_records": [{"task": "red"}]}, "image"),
            ({"rows": []}, ""),
            (b"{", ""),
        ):
            status, answer = post(scoring, bad)
            assert status == 400
            assert words in json.dumps(answer)
