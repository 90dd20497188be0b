"""Heads that are trained beside the model: in every regime, over kills and rounds; frozen ones stay as they are."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mergeflow.checkpoints import write_checkpoint
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, IterativeRun, LinearisedModel, LoraModel, LoraSettings, fine_tune

SETTINGS = FineTuneSettings(steps=6, batch_size=4, learning_rate=1e-2, warmup=0.0, save_every=2)


def network() -> Network:
    torch.manual_seed(0)
    return Network(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))


def data(task: str = "a", trained: bool = True) -> Classification:
    generator = torch.Generator().manual_seed(len(task))
    inputs, labels = torch.randn(10, 6, generator=generator), torch.arange(10) % 3
    weight = torch.randn(3, 5, generator=generator)
    return Classification(task, inputs, labels, Head(weight, 1.0, ["x", "y", "z"], torch.zeros(3), trained))


def weights(examples: Classification) -> torch.Tensor:
    assert examples.head is not None
    return torch.cat([p.detach().flatten() for p in examples.head.parameters()])


def test_model_and_head_are_those_of_plain_torch(tmp_path: Path) -> None:
    model, examples = network(), data()
    plain, head = copy.deepcopy(model.module), copy.deepcopy(examples.head)
    assert head is not None
    plainly = {"optimiser": "sgd", "schedule": "constant", "weight_decay": 0.0, "gradient_clip": 0.0}
    settings = SETTINGS.model_copy(update={**plainly, "batch_size": 10})
    fine_tune(model, [examples], settings, 0, tmp_path / "saved.pt", lambda: 0.5)
    optimiser = torch.optim.SGD([*plain.parameters(), *head.parameters()], lr=1e-2)
    for _ in range(6):
        optimiser.zero_grad()
        nn.functional.cross_entropy(head(plain(examples.inputs[:])), examples.labels).backward()
        optimiser.step()
    expected = torch.cat([p.detach().flatten() for p in head.parameters()])
    torch.testing.assert_close(weights(examples), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state(), Network(plain).state(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("regime", ["steps", "lora", "linearised", "joint"])
def test_trained_heads_move_and_frozen_ones_do_not(tmp_path: Path, regime: str) -> None:
    base = network()
    model = {
        "lora": lambda: LoraModel.of(base, LoraSettings(rank=2, targets=["0"])),
        "linearised": lambda: LinearisedModel.of(base),
    }.get(regime, lambda: base)()
    tasks = [data("a"), data("bb", trained=False)] if regime == "joint" else [data("a")]
    before = [weights(examples).clone() for examples in tasks]
    settings = SETTINGS.model_copy(update={"regime": regime})
    fine_tune(model, tasks, settings, 0, tmp_path / "saved.pt", lambda: 0.5)
    assert not torch.equal(weights(tasks[0]), before[0])
    assert all(torch.equal(weights(examples), was) for examples, was in zip(tasks[1:], before[1:], strict=True))


def test_each_round_goes_on_with_the_head_of_the_round_before(tmp_path: Path) -> None:
    """With one task the average is its own model: two rounds without a reset are one run."""
    write_checkpoint(tmp_path / "base.safetensors", network().state())
    rounds = {"rounds": 2, "optimiser": "kept"}
    settings = FineTuneSettings.model_validate({**SETTINGS.model_dump(), "regime": "iterative", "iterative": rounds})
    run = IterativeRun(tmp_path / "rounds", tmp_path / "base.safetensors", ("a",), settings, 0)
    for number in (1, 2):
        run.tune(number, network(), data(), lambda: 0.5)
        run.merge(number)
    run.load_head(2, loaded := data())
    fine_tune(network(), [tuned := data()], SETTINGS, 0, tmp_path / "saved.pt", lambda: 0.5)
    torch.testing.assert_close(weights(loaded), weights(tuned), rtol=1e-6, atol=1e-7)
    run.load_head(2, frozen := replace(data(trained=False)))
    assert torch.equal(weights(frozen), weights(data(trained=False)))


def test_load_is_the_inverse_of_state() -> None:
    other = {name: value + 1 for name, value in network().state().items()}
    for model in (LoraModel.of(network(), LoraSettings(rank=2, targets=["0"])), LinearisedModel.of(network())):
        model.load(other)
        assert all(torch.equal(value, other[name]) for name, value in model.state().items())
