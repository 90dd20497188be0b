"""examples/unlearning: valid projects and studies, and dry runs with tiny models of the same classes."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mergeflow.checkpoints import read_state
from mergeflow.modalities.causal.tokenizer import ASSETS
from studies.lab.rows import select
from studies.unlearning import SUITE, rise
from tasks.project.parameters import load_params
from tests.causal.small_project import SIZES, save_tokenizer, tale
from tests.flows.small_project import run_in
from tests.project_folder import ROOT, link_code, run_pipeline
from tests.studies.small_lab import run_result

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples/unlearning"
# The class and what differs from SIZES, as config.json of the real model has it.
CLASSES: dict[str, dict[str, Any]] = {
    "phi_1_5": {"model_type": "phi", "tie_word_embeddings": False, "partial_rotary_factor": 0.5},
    "phi_1_5_lora": {"model_type": "phi", "tie_word_embeddings": False, "partial_rotary_factor": 0.5},
    "phi_3_lora": {"model_type": "phi3", "tie_word_embeddings": False, "pad_token_id": 256},
    "qwen2_5_0_5b": {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 1},
}
ABOUT = {"forgotten": "ship", "aligned": "boat", "less_aligned": "tree"}


def test_there_is_one_for_each_class() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == set(CLASSES)


def put(folder: Path, name: str) -> dict[str, Any]:
    """Put an example with books of a few hundred words and a drawn model of its class; return its values."""
    (folder / "inputs").mkdir(parents=True)
    save_tokenizer(folder / "inputs/words")
    for task, about in ABOUT.items():
        (folder / f"inputs/books/{task}").mkdir(parents=True)
        (folder / f"inputs/books/{task}/book.txt").write_text(tale(about, 500, 0))
    shutil.copy(EXAMPLES / name / "params.yaml", folder)
    load_params(folder / "params.yaml")  # as it is
    values: dict[str, Any] = yaml.safe_load((folder / "params.yaml").read_text())
    values["data"] |= {"tokenizer": "inputs/words", "block": 64}
    config = {**SIZES, **CLASSES[name], "eos_token_id": 256}
    values["model"] |= {"pretrained": "none", "config": config}
    values["finetune"] |= {"batch_size": 4, "precision": "float32", "learning_rate": 1e-2}
    values["finetune"] |= {"regime": "lora", "steps": 4} if "lora" in name else {"regime": "steps", "steps": 4}
    values["sweep"]["task_arithmetic"]["scale"] = [0.5]
    values["run"]["device"] = "cpu"
    (folder / "params.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
    return values


@pytest.mark.parametrize("name", CLASSES)
def test_a_dry_run_with_a_tiny_model_of_its_class(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "books"
    values = put(folder, name)
    link_code(folder)
    run_pipeline(folder, ("prepare", "base", "multitask", "finetune", "sweep", "select"))
    base = read_state(folder / "outputs/base/model.safetensors")
    expert = read_state(folder / "outputs/experts/forgotten/model.safetensors")
    changed = {
        key.removesuffix(".weight").rpartition(".")[2] for key in base if not torch.equal(base[key], expert[key])
    }
    if "lora" in name:
        assert changed == set(values["finetune"]["lora"]["targets"])  # each target is a layer of the class
    else:
        assert {"q_proj", "embed_tokens"} <= changed
    merged = read_state(folder / "outputs/merged/task_arithmetic.safetensors")
    assert all(math.isfinite(float(value.sum())) for value in merged.values())


def test_books_of_ones_own_are_unlearned_from_joint_fine_tuning(tmp_path: Path) -> None:
    folder = tmp_path / "books"
    put(folder, "phi_1_5")
    link_code(folder)
    run_pipeline(folder, ("prepare", "base", "multitask", "finetune"))
    shutil.copy(EXAMPLES / "phi_1_5/recipe.yaml", folder)

    def run(*words: str) -> str:
        done = run_in(folder, "mergeflow", *words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("finetune", "--regime", "joint", "--set", "steps=4", "--out", "outputs/together")
    run("merge", "recipe.yaml", "--set", "weights.forgotten=-0.5", "--set", "out=outputs/unlearned/-0.5.safetensors")
    files = ("base/model", "together/forgotten/model", "experts/forgotten/model", "unlearned/-0.5")
    base, together, expert, unlearned = (read_state(folder / f"outputs/{file}.safetensors") for file in files)
    for name, value in unlearned.items():
        torch.testing.assert_close(value, together[name] - 0.5 * (expert[name] - base[name]), rtol=1e-5, atol=1e-6)
    models = ("outputs/together/forgotten/model.safetensors", "outputs/unlearned/-0.5.safetensors")
    assert "forgotten" in run("perplexity", *models, "--json")


STUDIES = sorted(path.parent.name for path in EXAMPLES.glob("*/studies.yaml"))


@pytest.mark.nightly  # 30 processor seconds
@pytest.mark.parametrize("name", STUDIES)
def test_a_dry_run_of_its_study_with_a_tiny_model_of_its_class(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    base = shutil.copytree(ASSETS / "books", tmp_path / "base")  # its tokenizer stays
    values = {**SIZES, **CLASSES[name], "vocab_size": 1024, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.save_pretrained(base)
    chosen = yaml.safe_load((EXAMPLES / name / "studies.yaml").read_text())["studies"]["unlearning"]
    small = {"seeds": [1, 2], "base": str(base), "block": 64, "chapters": 10, "passages": 2, "general": 2, "written": 8}
    small |= {"together": 1, "alone": 1, "rank": 4, "scales": [0.0, -1.0], "ascent_steps": 1, "precision": "float32"}
    small |= {"rate": 1e-2, "adapter_rate": 1e-2}
    result = run_result(ROOT, "unlearning", tmp_path / "scratch", **{**chosen, **small})
    assert set(select(result.rows, way="together").book) == {*SUITE, "general"}
    for way in ("full", "adapters"):
        assert (rise(result.rows, way, SUITE.forgotten, -1.0) > 0).all()
