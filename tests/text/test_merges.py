"""What is done with trained encoders beyond the pipeline's own methods: WUDI, and one small file for all experts."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mergeflow.evaluation import accuracies
from mergeflow.merging import configure, prepare
from mergeflow.merging.compression.compressor import compressors, configure_compressor
from mergeflow.merging.compression.suite_file import compress, extract_task
from mergeflow.modalities.heads import load_head
from mergeflow.modalities.text.modality import build, open_examples
from mergeflow.modalities.text.sections import ModelSection
from mergeflow.modality import Model
from tests.text.small_project import TASKS

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def base(project: Path) -> State:
    return load_file(project / "outputs/base/model.safetensors")


@pytest.fixture(scope="module")
def experts(project: Path) -> dict[str, State]:
    return {task: load_file(project / f"outputs/experts/{task}/model.safetensors") for task in TASKS}


@pytest.fixture(scope="module")
def model(project: Path) -> Model:
    with safe_open(project / "outputs/base/model.safetensors", framework="pt") as file:
        return build(ModelSection(modality="text", pretrained="-"), file.metadata())


def interference(base: State, merged: State, experts: dict[str, State], name: str) -> float:
    """Σ_t ‖(τ − τ_t) τ_tᵀ‖² / ‖τ_t‖² of one matrix."""
    tau, taus = merged[name] - base[name], [expert[name] - base[name] for expert in experts.values()]
    return sum(float(((tau - own) @ own.T).square().sum() / own.square().sum()) for own in taus)


def test_wudi_lowers_the_interference_of_every_matrix_of_the_layers(base: State, experts: dict[str, State]) -> None:
    """Equation 8 of its paper; embeddings, which are tables, are averaged."""
    merged = prepare(configure("wudi", {"steps": 40, "lr": 1e-3}), base, experts).at(1.0)
    summed = prepare(configure("task_arithmetic", {}), base, experts).at(1.0)
    matrices = [name for name, value in base.items() if value.ndim == 2 and ".layer." in name]
    assert len(matrices) == 2 * 6
    for name in matrices:
        assert interference(base, merged, experts, name) < interference(base, summed, experts, name)
    words = "roberta.embeddings.word_embeddings.weight"
    mean = torch.stack([expert[words] for expert in experts.values()]).mean(dim=0)
    torch.testing.assert_close(merged[words], mean)


def figures(project: Path, model: Model, state: State, task: str) -> float:
    head = load_head(project / f"outputs/experts/{task}/head.safetensors")
    examples = open_examples(task, project / f"outputs/data/validation/{task}", "validation", head, torch.device("cpu"))
    model.load(state)
    return accuracies(model, {task: examples}, 64)[task]


@pytest.mark.parametrize("name", sorted(compressors()))
def test_an_expert_comes_back_from_the_file_of_all(
    project: Path, base: State, experts: dict[str, State], model: Model, tmp_path: Path, name: str
) -> None:
    made = compress(configure_compressor(name), base, experts)
    made.write(tmp_path / "suite.safetensors")
    weights = project / "outputs/base/model.safetensors"
    found = extract_task(tmp_path / "suite.safetensors", "mood", weights)
    assert found.keys() == base.keys()
    assert all(found[key].shape == value.shape and found[key].isfinite().all() for key, value in base.items())
    assert figures(project, model, found, "mood") > figures(project, model, experts["mood"], "mood") - 0.25
    size = (tmp_path / "suite.safetensors").stat().st_size
    assert size < len(TASKS) * weights.stat().st_size
