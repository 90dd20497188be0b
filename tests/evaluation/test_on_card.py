"""Evaluation, scorers and estimates on the card of `tests.card` agree with the processor within rounding."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint
from mergeflow.data import load_split
from mergeflow.estimates.entropy import entropies, entropy_gradient, learn_coefficients
from mergeflow.estimates.expert_statistics import StatisticOrder, write_statistic
from mergeflow.evaluation.accuracy import accuracies, losses
from mergeflow.evaluation.scoring import CandidateScorer
from mergeflow.merging import configure, make_recipe
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.models import image_model, load_clip
from tests.card import card
from tests.evaluation.small import TASKS, load_head
from tests.evaluation.test_entropy import order, recipe_values


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def opened(world: Path, device: str) -> tuple[Any, dict[str, Any]]:
    tasks = {}
    for task in TASKS:
        split = load_split(world / "data" / task, "validation")
        head = load_head(world / "heads" / f"{task}.safetensors").to(device)
        tasks[task] = Classification(
            task, torch.from_numpy(split.images), torch.from_numpy(split.labels.copy()).to(device), head
        )
    return image_model(load_clip("pocket-clip", device=device)), tasks


def both(find: Any) -> None:
    expected = find("cpu")
    with card():
        found = find("cuda")
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_accuracies_losses_and_entropies(world: Path) -> None:
    def find(device: str) -> Any:
        model, tasks = opened(world, device)
        state = dict(open_checkpoint(world / "experts/red.safetensors"))
        model.load(state)
        found, gradients = entropy_gradient(model, tasks, state, 4)
        plain = {name: value.cpu() for name, value in gradients.items()}
        return accuracies(model, tasks, 4), losses(model, tasks, 4), entropies(model, tasks, state, 4), found, plain

    both(find)


@pytest.mark.parametrize("method", ["average", "cart"])
def test_a_scorer(world: Path, method: str) -> None:
    experts = {task: dict(open_checkpoint(world / f"experts/{task}.safetensors")) for task in TASKS}

    def find(device: str) -> Any:
        model, tasks = opened(world, device)
        base = dict(open_checkpoint(world / "base.safetensors"))
        return CandidateScorer(model, tasks, base, experts, device=device).candidate(configure(method))

    both(find)


@pytest.mark.parametrize("kind", ["fisher", "gram"])
def test_statistics(world: Path, tmp_path: Path, kind: Any) -> None:
    def find(device: str) -> Any:
        asked = StatisticOrder(
            kind,
            str(world / "experts/red.safetensors"),
            str(world / "data/red"),
            "pocket-clip",
            str(world / "heads/red.safetensors"),
            samples=4,
            device=device,
        )
        write_statistic(asked, tmp_path / f"{device}.safetensors")
        return {name: value.clone() for name, value in open_checkpoint(tmp_path / f"{device}.safetensors").items()}

    both(find)


def test_adamerging(world: Path, tmp_path: Path) -> None:
    def find(device: str) -> Any:
        recipe = make_recipe({**recipe_values(world, steps=2), "device": device})
        found = learn_coefficients(recipe, order(world, batch_size=4), tmp_path / device)
        return found.coefficients, found.losses

    both(find)
