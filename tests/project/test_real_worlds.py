"""Worlds of real data, reduced: what `inputs/make.py` fetches is trained on, merged and judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from mergeflow import layout
from mergeflow.checkpoints import read_state
from tasks.project.new import new_project
from tests.project_folder import PIPELINE, run_pipeline

TASKS = ("supersense", "isa", "section")


@pytest.mark.real
@pytest.mark.nightly
def test_the_pipeline_runs_on_a_real_encoder_and_real_texts(tmp_path: Path) -> None:
    root = new_project(tmp_path / "news", "text", "real-texts")
    done = subprocess.run([sys.executable, "inputs/make.py"], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    values = yaml.safe_load((root / "params.yaml").read_text())
    made = {path.name for path in (root / "inputs").iterdir() if path.is_dir()}
    assert made == {*values["tasks"], "minilm", "packages"}
    values["tasks"] = {task: f"{values['tasks'][task]}?fraction=0.3" for task in TASKS}
    values["finetune"] |= {"steps": 40, "save_every": 40}
    values["sweep"] = {"average": {"scale": [1.0]}, "task_arithmetic": {"scale": [0.4, 0.7]}}
    (root / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    run_pipeline(root, PIPELINE)
    means = {row["name"]: row["mean"] for row in json.loads((root / layout.TEST).read_text())["rows"]}
    assert means["base"] + 0.02 < means["individual"]
    assert means["base"] - 0.02 < means["task_arithmetic"] < means["individual"]
    merge_with_a_foreign_expert(root)


def merge_with_a_foreign_expert(root: Path) -> None:
    """Merge the trained experts with a published one, which has a pooler and names without the base's prefix."""
    subprocess.run([sys.executable, "inputs/make.py", "--foreign"], cwd=root, check=True)
    recipe = yaml.safe_load((root / "nine.yaml").read_text())
    recipe |= {"method": "task_arithmetic", "args": {"scale": 0.5}}
    recipe["experts"] = {name: recipe["experts"][name] for name in (*TASKS, "operations")}
    (root / "nine.yaml").write_text(yaml.safe_dump(recipe))
    subprocess.run([sys.executable, "-m", "mergeflow.cli", "merge", "nine.yaml"], cwd=root, check=True)
    base, merged = read_state(root / "outputs/base/model.safetensors"), read_state(root / "outputs/nine.safetensors")
    trained = [read_state(root / recipe["experts"][task]) for task in TASKS]
    foreign = read_state(root / "inputs/operations/model.safetensors")
    assert set(merged) == set(base)
    for name, start in base.items():
        changes = [state[name] - start for state in trained] + [foreign[name.removeprefix("bert.")] - start]
        torch.testing.assert_close(merged[name], start + 0.5 * sum(changes), rtol=1e-4, atol=1e-5)
