"""Commands that work inside a project folder: the registry's, and recipes that name what only a project knows."""

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from flows.references import resolve_reference
from flows.status import publish_report
from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from tests.flows.small_project import run_in

pytestmark = pytest.mark.slow


def test_the_registry_answers(finished: tuple[Path, Any]) -> None:
    folder = finished[0]
    listed = run_in(folder, "mergeflow", "registry", "list")
    assert "@champion" in listed.stdout
    tree = json.loads(run_in(folder, "mergeflow", "registry", "lineage", "--json").stdout)
    assert [expert["task"] for expert in tree["experts"]] == ["blue", "red"]
    assert tree["missing"] == []
    refused = run_in(folder, "mergeflow", "registry", "rollback")
    assert refused.returncode == 2
    assert "no earlier champion" in refused.stderr


def test_a_recipe_may_name_a_registered_model_and_files_that_dvc_keeps(project: Path) -> None:
    expert, added = project / "outputs/experts/red/model.safetensors", project / "inputs/kept/blue.safetensors"
    added.parent.mkdir()
    shutil.copy(project / "outputs/experts/blue/model.safetensors", added)
    assert run_in(project, "dvc", "add", "--quiet", "inputs/kept").returncode == 0
    recipe = {
        "method": "task_arithmetic",
        "args": {"scale": 0.0},
        "base": "models:/mergeflow-pocket8@champion",
        "experts": {"red": str(expert.relative_to(project)), "blue": str(added.relative_to(project))},
        "out": "merged.safetensors",
    }
    (project / "recipe.yaml").write_text(json.dumps(recipe))
    expert.unlink()
    shutil.rmtree(added.parent)
    done = run_in(project, "mergeflow", "merge", "recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert expert.exists()
    assert added.exists()
    winner = json.loads((project / "outputs/registration.json").read_text())["method"]
    with (
        open_checkpoint(project / "merged.safetensors") as merged,
        open_checkpoint(project / f"outputs/merged/{winner}.safetensors") as champion,
    ):
        assert all((merged[name] == champion[name]).all() for name in champion)
    same = run_in(project, "mergeflow", "diff", "models:/mergeflow-pocket8@champion", "merged.safetensors")
    assert same.returncode == 0, same.stderr


@pytest.mark.parametrize("path", ["models:/", "models:/name", "models:/../x", "models:/@champion"])
def test_a_reference_without_a_version_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(MergeflowError, match="names no version"):
        resolve_reference(tmp_path, path)


def test_a_sweep_is_logged_trial_by_trial(project: Path) -> None:
    tasks = ("red", "blue")
    sweep = {
        "base": "outputs/base/model.safetensors",
        "experts": {task: f"outputs/experts/{task}/model.safetensors" for task in tasks},
        "model": {"architecture": "pocket-clip"},
        "tasks": {
            task: {"data": f"outputs/data/validation/{task}", "head": f"outputs/base/heads/{task}.safetensors"}
            for task in tasks
        },
        "methods": {"task_arithmetic": {"scale": [0.1, 0.5]}, "average": {}},
    }
    (project / "sweep.yaml").write_text(json.dumps(sweep))
    done = run_in(project, "mergeflow", "sweep", "sweep.yaml", "--log")
    assert done.returncode == 0, done.stderr
    assert "Logged in MLflow as run" in done.stdout
    run_id = done.stdout.rsplit("run ", 1)[1].strip(". \n")
    with sqlite3.connect(project / "mlflow.db") as database:
        children = database.execute(
            "select count(*) from tags where key = 'mlflow.parentRunId' and value = ?", (run_id,)
        ).fetchone()
    database.close()
    assert children == (3,)
    assert run_in(project, "mergeflow", "check", "sweeps/sweep/winner.yaml").returncode == 0


def test_the_report_of_a_project_whose_registry_is_elsewhere_stays_on_disk(project: Path) -> None:
    """After `dvc pull` on another machine, for example."""
    (project / "mlflow.db").unlink()
    report = project / "outputs/report.html"
    report.unlink(missing_ok=True)
    publish_report(project)
    assert report.exists()


def test_outside_a_project_the_registry_is_not_offered(tmp_path: Path) -> None:
    assert run_in(tmp_path, "mergeflow", "merge", "--help").returncode == 0
    assert run_in(tmp_path, "mergeflow", "registry", "list").returncode != 0
