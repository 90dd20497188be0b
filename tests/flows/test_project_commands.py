"""Commands that work inside a project folder: the registry's, and recipes that name what only a project knows."""

import json
from pathlib import Path
from typing import Any

import pytest

from mergeflow.checkpoints import open_checkpoint
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


def test_a_recipe_may_name_a_registered_model_and_a_file_that_dvc_keeps(project: Path) -> None:
    expert = project / "outputs/experts/red/image_encoder.safetensors"
    recipe = {
        "method": "task_arithmetic",
        "args": {"scale": 0.0},
        "base": "models:/mergeflow-pocket8@champion",
        "experts": {"red": "outputs/experts/red"},
        "out": "merged.safetensors",
    }
    recipe["experts"] = {"red": str(expert.relative_to(project))}
    (project / "recipe.yaml").write_text(json.dumps(recipe))
    expert.unlink()
    done = run_in(project, "mergeflow", "merge", "recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert expert.exists()
    winner = json.loads((project / "outputs/registration.json").read_text())["method"]
    with (
        open_checkpoint(project / "merged.safetensors") as merged,
        open_checkpoint(project / f"outputs/merged/{winner}.safetensors") as champion,
    ):
        assert all((merged[name] == champion[name]).all() for name in champion)


def test_outside_a_project_the_registry_is_not_offered(tmp_path: Path) -> None:
    assert run_in(tmp_path, "mergeflow", "merge", "--help").returncode == 0
    assert run_in(tmp_path, "mergeflow", "registry", "list").returncode != 0
