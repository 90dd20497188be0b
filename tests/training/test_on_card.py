"""Training on the card of `tests.card`: every regime ends with the processor's bits, killed or not."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.modality import Model
from mergeflow.training import FineTuneSettings, IterativeRun, LinearisedModel, LoraModel, LoraSettings, fine_tune
from mergeflow.training.settings import Regime
from tests.card import OnCard, card
from tests.training.test_fine_tune import Killed, kill_at
from tests.training.test_heads import SETTINGS, data, network

# The linearisation's forward-mode derivative wraps tensors in C++, where a card without a card cannot follow; and the
# iterative regime is a class of its own. Both have a test of their own below.
REGIMES = [regime for regime in get_args(Regime) if regime not in ("linearised", "iterative")]
VARIANTS: list[dict[str, Any]] = [{}, {"optimiser": "sgd", "momentum": 0.9}, {"accumulate": 2}]


def opened(regime: str, device: str) -> tuple[Model, list[Any]]:
    """A model and its tasks on a device; inputs stay on the processor, as they do on disk."""
    base = network()
    base.module.to(device)
    model = LoraModel.of(base, LoraSettings(rank=2, targets=["0"])) if regime == "lora" else base
    tasks = [data("a"), data("bb", trained=False)] if regime == "joint" else [data("a")]
    return model, [replace(one, labels=one.labels.to(device), head=one.head.to(device)) for one in tasks]


def train(folder: Path, settings: FineTuneSettings, device: str, killed: bool = False) -> Any:
    folder.mkdir()
    if killed:
        model, tasks = opened(settings.regime, device)
        with pytest.raises(Killed):
            fine_tune(model, tasks, settings, 0, folder / "saved.pt", lambda: 0.5, kill_at(3))
    model, tasks = opened(settings.regime, device)
    found = fine_tune(model, tasks, settings, 0, folder / "saved.pt", lambda: 0.5)
    kind = OnCard if device == "cuda" else torch.Tensor
    assert all(isinstance(p, kind) for p in model.module.parameters())
    heads = [{k: v.cpu() for k, v in one.head.state_dict().items()} for one in tasks]
    return {k: v.cpu() for k, v in model.state().items()}, heads, found.trajectory.as_json()


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found[:2], expected[:2], rtol=0, atol=0)
    assert found[2] == expected[2]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime(tmp_path: Path, regime: str, changes: dict[str, Any]) -> None:
    settings = SETTINGS.model_copy(update={"regime": regime, "epochs": 2, **changes})
    expected = train(tmp_path / "cpu", settings, "cpu")
    with card():
        same(train(tmp_path / "cuda", settings, "cuda"), expected)


@pytest.mark.parametrize("regime", ["steps", "lora", "joint"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, regime: str) -> None:
    settings = SETTINGS.model_copy(update={"regime": regime})
    with card():
        whole = train(tmp_path / "whole", settings, "cuda")
        same(train(tmp_path / "killed", settings, "cuda", killed=True), whole)


def test_rounds_of_merging_and_tuning(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base.safetensors", network().state())
    rounds = {"rounds": 2, "optimiser": "kept"}
    settings = FineTuneSettings.model_validate({**SETTINGS.model_dump(), "regime": "iterative", "iterative": rounds})

    def merged(device: str) -> bytes:
        run = IterativeRun(tmp_path / device, tmp_path / "base.safetensors", ("a",), settings, 0)
        for number in (1, 2):
            model, (one,) = opened("iterative", device)
            run.tune(number, model, one, lambda: 0.5)
            run.merge(number)
        return run.merged(2).read_bytes()

    expected = merged("cpu")
    with card():
        assert merged("cuda") == expected


def test_the_linearisation_leaves_nothing_on_the_processor() -> None:
    base = network()
    base.module.to("meta")
    model = LinearisedModel.of(base)
    model.module(torch.empty(4, 6, device="meta")).square().mean().backward()
    gradients = [p.grad for p in model.module.parameters() if p.requires_grad]
    assert gradients
    assert all(gradient is not None and gradient.is_meta for gradient in gradients)
