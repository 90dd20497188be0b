"""Worlds of real data, reduced: what `inputs/make.py` fetches is trained on, merged and judged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModel, AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

from mergeflow import layout
from mergeflow.checkpoints import read_state
from mergeflow.modalities.text.modality import Group, TokenBatch, load_encoder
from tasks.project.new import new_project
from tasks.project.parameters import load_params, load_study_params
from tasks.project.study_graph import check_study_options
from tests.project_folder import PIPELINE, change_params, run_pipeline

TEXTS, PICTURES = ("supersense", "isa", "section"), ("digits", "scans", "greek")


def make_inputs(root: Path, *words: str) -> None:
    done = subprocess.run(
        [sys.executable, "inputs/make.py", *words], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def means_on_test(root: Path, tasks: dict[str, str], steps: int, scales: list[float]) -> dict[str, float]:
    """Run the pipeline with fewer tasks, steps and candidates; return each model's mean on test."""
    sweep = {"average": {"scale": [1.0]}, "task_arithmetic": {"scale": scales}}
    change_params(root, {"tasks": tasks, "sweep": sweep, "finetune.steps": steps, "finetune.save_every": steps})
    run_pipeline(root, PIPELINE)
    return {row["name"]: row["mean"] for row in json.loads((root / layout.TEST).read_text())["rows"]}


@pytest.mark.real
@pytest.mark.nightly
def test_the_pipeline_runs_on_a_real_encoder_and_real_texts(tmp_path: Path) -> None:
    root = new_project(tmp_path / "news", "text", "real-texts")
    make_inputs(root)
    sources = yaml.safe_load((root / "params.yaml").read_text())["tasks"]
    folders = {path.name for path in (root / "inputs").iterdir() if path.is_dir()}
    assert folders == {*sources, "minilm", "packages"}
    means = means_on_test(root, {task: f"{sources[task]}?fraction=0.3" for task in TEXTS}, 40, [0.4, 0.7])
    assert means["base"] + 0.02 < means["individual"]
    assert means["base"] - 0.02 < means["task_arithmetic"] < means["individual"]
    merge_with_a_foreign_expert(root)
    load_as_people_save_it(root / "inputs/minilm", tmp_path)


@pytest.mark.real
@pytest.mark.nightly
def test_the_pipeline_runs_on_real_pictures_and_a_base_made_for_them(tmp_path: Path) -> None:
    root = new_project(tmp_path / "pictures", "vision", "real-pictures")
    make_inputs(root)
    sources = yaml.safe_load((root / "params.yaml").read_text())["tasks"]
    means = means_on_test(root, {task: sources[task] for task in PICTURES}, 300, [0.2, 0.3])
    assert means["base"] + 0.02 < means["individual"]
    assert means["base"] - 0.02 < means["task_arithmetic"] < means["individual"]


@pytest.mark.real
@pytest.mark.nightly
def test_the_pipeline_runs_on_a_real_language_model_and_real_books(tmp_path: Path) -> None:
    root = new_project(tmp_path / "books", "causal", "real-books")
    make_inputs(root)
    sources = yaml.safe_load((root / "params.yaml").read_text())["tasks"]
    means = means_on_test(root, {task: sources[task] for task in ("persuasion", "bible")}, 8, [0.5])
    assert means["zero_shot"] + 0.003 < means["individual"]
    assert means["zero_shot"] < means["task_arithmetic"]
    (study,) = check_study_options(
        root, load_study_params(root / "studies/params.yaml", load_params(root / "params.yaml"))
    )
    assert study.name == "unlearning"
    assert "(Moise Tshombe)" in (root / "inputs/brown/train/003.txt").read_text()[:60], "tokens joined as people write"


def merge_with_a_foreign_expert(root: Path) -> None:
    """Merge the trained experts with a published one, which has a pooler and names without the base's prefix."""
    make_inputs(root, "--foreign")
    recipe = yaml.safe_load((root / "nine.yaml").read_text())
    recipe |= {"method": "task_arithmetic", "args": {"scale": 0.5}}
    recipe["experts"] = {name: recipe["experts"][name] for name in (*TEXTS, "operations")}
    (root / "nine.yaml").write_text(yaml.safe_dump(recipe))
    subprocess.run([sys.executable, "-m", "mergeflow.cli", "merge", "nine.yaml"], cwd=root, check=True)
    base, merged = read_state(root / "outputs/base/model.safetensors"), read_state(root / "outputs/nine.safetensors")
    trained = [read_state(root / recipe["experts"][task]) for task in TEXTS]
    foreign = read_state(root / "inputs/operations/model.safetensors")
    assert set(merged) == set(base)
    for name, start in base.items():
        changes = [state[name] - start for state in trained] + [foreign[name.removeprefix("bert.")] - start]
        torch.testing.assert_close(merged[name], start + 0.5 * sum(changes), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def load_as_people_save_it(folder: Path, scratch: Path) -> None:
    """Load the encoder from half precision, and from under a tied head of pre-training and a classifier's head."""
    texts = AutoTokenizer.from_pretrained(folder)(
        ["a cat", "the grain of wood is fine"], padding=True, return_tensors="pt"
    )
    batch = TokenBatch((Group(texts["input_ids"], texts["attention_mask"].bool(), None),), None)
    features = load_encoder(str(folder), scratch, "mean")[0](batch)
    forms = {
        "float16": AutoModel.from_pretrained(folder, dtype=torch.float16),
        "bfloat16": AutoModel.from_pretrained(folder, dtype=torch.bfloat16),
        "masked": AutoModelForMaskedLM.from_pretrained(folder),
        "classifier": AutoModelForSequenceClassification.from_pretrained(folder),
    }
    for name, model in forms.items():
        model.save_pretrained(scratch / name)
        loaded = load_encoder(str(scratch / name), scratch, "mean")[0]
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
        rounding = {"float16": 1e-3, "bfloat16": 1e-2}.get(name, 1e-6)
        torch.testing.assert_close(loaded(batch), features, rtol=0, atol=rounding * float(features.abs().max()))
