"""What merge methods take from examples, on texts: Fisher information, Gram matrices, entropies; and the commands."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import Result
from safetensors.torch import load_file

from mergeflow.checkpoints import write_checkpoint
from mergeflow.commands.statistics import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.adamerging import entropies, entropy_gradient
from mergeflow.evaluation.statistics import diagonal_fisher
from mergeflow.merging.files.vectors import extract
from mergeflow.modalities.catalog import open_recorded
from mergeflow.modalities.classification import Subset
from mergeflow.modalities.heads import load_head
from mergeflow.modality import Examples, Model
from tests.command import invoke
from tests.text.small_project import TASKS

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(project: Path) -> Model:
    _, model = open_recorded(project / "outputs/base/model.safetensors", CPU)
    model.module.eval()
    return model


def examples_of(project: Path, task: str, count: int) -> Examples:
    modality, _ = open_recorded(project / "outputs/base/model.safetensors", CPU)
    head = load_head(project / f"outputs/experts/{task}/head.safetensors")
    whole = modality.open(task, project / f"outputs/data/validation/{task}", "validation", head, CPU)
    return Subset.first(whole, count)


def gradients(model: Model, values: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
    named = dict(model.module.named_parameters())
    for value in values:
        gradients_of_value = torch.autograd.grad(value, list(named.values()), retain_graph=True, allow_unused=True)
        yield {name: gradient for name, gradient in zip(named, gradients_of_value, strict=True) if gradient is not None}


@pytest.mark.slow
@pytest.mark.parametrize("labels", ["sampled", "all"])
def test_the_fisher_information_of_numbers_is_a_normal_distributions(project: Path, model: Model, labels: Any) -> None:
    near = examples_of(project, "near", 4)
    estimate = diagonal_fisher(model, near, labels=labels)
    model.module.requires_grad_(True)
    answers = near.scores(model, torch.arange(4))[:, 1]
    rows = gradients(model, answers)
    squares = [{name: gradient.double().square() for name, gradient in row.items()} for row in rows]
    for name in squares[0]:
        expected = torch.stack([square[name] for square in squares]).mean(dim=0).float()
        torch.testing.assert_close(estimate[name], expected, rtol=1e-3, atol=1e-6)


def test_the_entropy_is_moved_by_classes_alone(project: Path, model: Model) -> None:
    tasks = {task: examples_of(project, task, 8) for task in TASKS}
    state = model.state()
    loss, slope = entropy_gradient(model, tasks, state, batch_size=8)
    _, of_classes = entropy_gradient(model, {task: tasks[task] for task in ("mood", "same")}, state, batch_size=8)
    assert all(torch.allclose(slope[name], of_classes[name], atol=1e-7) for name in slope)
    assert entropies(model, tasks, state)["near"] == pytest.approx(np.log(2))
    assert loss > np.log(2)


def call(project: Path, *words: str) -> Result:
    base = str(project / "outputs/base/model.safetensors")
    return invoke(add_commands, *words, "--architecture", base, obj=lambda text: text)


def recipe_of(project: Path, method: str, **more: Any) -> dict[str, Any]:
    experts = {task: str(project / f"outputs/experts/{task}/model.safetensors") for task in TASKS}
    return {"method": method, "base": str(project / "outputs/base/model.safetensors"), "experts": experts, **more}


@pytest.mark.parametrize(("kind", "method"), [("fisher", "fisher"), ("gram", "regmean")])
def test_statistics_of_texts_from_the_command_to_a_merge(project: Path, tmp_path: Path, kind: str, method: str) -> None:
    from mergeflow.merging import load_recipe, merge

    files = {task: tmp_path / f"{task}.safetensors" for task in TASKS}
    for task, out in files.items():
        expert = project / f"outputs/experts/{task}"
        places = ["--task", str(project / f"outputs/data/train/{task}"), "--head", str(expert / "head.safetensors")]
        asked = [str(expert / "model.safetensors"), *places, "--out", str(out), "--samples", "4"]
        done = call(project, "statistics", kind, *asked)
        assert done.exit_code == 0, done.output
        assert "4 examples of train" in done.output
    data = {kind: {task: str(path) for task, path in files.items()}}
    recipe = recipe_of(project, method, data=data, out=str(tmp_path / "merged.safetensors"))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    made = load_file(merge(load_recipe(tmp_path / "recipe.yaml")).path)
    assert made.keys() == load_file(project / "outputs/base/model.safetensors").keys()
    if kind == "gram":
        gram = load_file(files["mood"])["roberta.encoder.layer.0.attention.self.query.weight"]
        assert gram.shape == (32, 32)
        assert torch.linalg.eigvalsh(gram.double()).min() > -1e-5


def test_statistics_of_differences_are_those_of_the_whole_expert(project: Path, tmp_path: Path) -> None:
    """A task vector was measured as if its differences were weights; an adapter was refused."""
    base = project / "outputs/base/model.safetensors"
    name, factors = "roberta.encoder.layer.0.attention.self.query", [torch.randn(2, 32), torch.randn(32, 2)]
    tuned = load_file(base)
    tuned[f"{name}.weight"] += 4 * factors[1] @ factors[0]
    write_checkpoint(tmp_path / "whole.safetensors", tuned)
    write_checkpoint(tmp_path / "bare.safetensors", {key.removeprefix("roberta."): tuned[key] for key in tuned})
    extract(base, tmp_path / "whole.safetensors", tmp_path / "vector.safetensors")
    (tmp_path / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["query"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(settings))
    adapter = {f"base_model.model.{name}.lora_{side}.weight": each for side, each in zip("AB", factors, strict=True)}
    write_checkpoint(tmp_path / "adapter/adapter_model.safetensors", adapter)
    made = []
    for expert in ("whole.safetensors", "bare.safetensors", "vector.safetensors", "adapter"):
        task = ["--task", str(project / "outputs/data/train/mood"), "--samples", "4"]
        asked = [str(tmp_path / expert), *task, "--out", str(tmp_path / "gram.safetensors"), "--force"]
        done = call(project, "statistics", "gram", *asked)
        assert done.exit_code == 0, done.output
        made.append(load_file(tmp_path / "gram.safetensors"))
    for name, gram in made[0].items():
        for other in made[1:]:
            torch.testing.assert_close(other[name], gram, rtol=1e-4, atol=1e-5)


def test_a_base_that_does_not_say_what_it_is(project: Path) -> None:
    with pytest.raises(MergeflowError, match="does not say what kind of model it is"):
        open_recorded(project / "outputs/experts/mood/model.safetensors", CPU)
