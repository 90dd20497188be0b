"""Training on a card: every regime ends where the processor's does, killed or not.

On the card of `tests.card` it ends with the processor's bits; on a real one, where there is one, within float
tolerance, and `deterministic` keeps every bit, kills too.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from mergeflow.checkpoints import read_state, write_checkpoint
from mergeflow.modalities import classification
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.modality import Model
from mergeflow.training import FineTuneSettings, IterativeRun, LinearisedModel, LoraModel, LoraSettings, fine_tune
from mergeflow.training.settings import Regime
from tests.card import card, cuda, driver, on, on_cards
from tests.training.test_fine_tune import Killed, kill_at
from tests.training.test_heads import SETTINGS, data, network

REGIMES = [regime for regime in get_args(Regime) if regime != "iterative"]  # a class of its own, tested below
VARIANTS: list[dict[str, Any]] = [{}, {"optimiser": "sgd", "momentum": 0.9}, {"accumulate": 2}]
IMAGES = FineTuneSettings(steps=6, batch_size=8, learning_rate=1e-3, save_every=2, deterministic=True)
KINDS: list[dict[str, Any]] = [{}, {"precision": "bfloat16"}, {"precision": "bfloat16", "compile": True}]


EQUAL, NEAR = {"rtol": 0.0, "atol": 0.0}, {"rtol": 1e-4, "atol": 1e-5}


def opened(regime: str, device: str) -> tuple[Model, list[Any]]:
    """A model and its tasks on a device; inputs stay on the processor, as they do on disk."""
    base = network()
    base.module.to(device)
    model: Model = LoraModel.of(base, LoraSettings(rank=2, targets=["0"])) if regime == "lora" else base
    model = LinearisedModel.of(base) if regime == "linearised" else model
    tasks = [data("a"), data("bb", trained=False)] if regime == "joint" else [data("a")]
    return model, [
        replace(examples, labels=examples.labels.to(device), head=examples.head.to(device)) for examples in tasks
    ]


def train(folder: Path, settings: FineTuneSettings, device: str, killed: bool = False) -> Any:
    folder.mkdir()
    if killed:
        model, tasks = opened(settings.regime, device)
        with pytest.raises(Killed):
            fine_tune(model, tasks, settings, 0, folder / "saved.pt", lambda: 0.5, kill_at(3))
    model, tasks = opened(settings.regime, device)
    tuned = fine_tune(model, tasks, settings, 0, folder / "saved.pt", lambda: 0.5)
    assert all(p.device.type == device for p in model.module.parameters())
    heads = [{k: v.cpu() for k, v in examples.head.state_dict().items()} for examples in tasks]
    return {k: v.cpu() for k, v in model.state().items()}, heads, tuned.trajectory.as_json()


def same(actual: Any, expected: Any, real: bool = False) -> None:
    torch.testing.assert_close(actual[:2], expected[:2], **(NEAR if real else EQUAL))
    assert real or actual[2:] == expected[2:]


@on_cards
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime(tmp_path: Path, regime: str, changes: dict[str, Any], real: bool) -> None:
    settings = SETTINGS.model_copy(update={"regime": regime, "epochs": 2, **changes})
    expected = train(tmp_path / "cpu", settings, "cpu")
    with on(real):
        same(train(tmp_path / "cuda", settings, "cuda"), expected, real)


@pytest.mark.parametrize("regime", ["steps", "lora", "linearised", "joint"])
def test_a_killed_run_resumes_to_the_same_bits(tmp_path: Path, regime: str) -> None:
    settings = SETTINGS.model_copy(update={"regime": regime})
    with card():
        whole = train(tmp_path / "whole", settings, "cuda")
        same(train(tmp_path / "killed", settings, "cuda", killed=True), whole)


@on_cards
def test_rounds_of_merging_and_tuning(tmp_path: Path, real: bool) -> None:
    write_checkpoint(tmp_path / "base.safetensors", network().state())
    rounds = {"rounds": 2, "optimiser": "kept"}
    settings = FineTuneSettings.model_validate({**SETTINGS.model_dump(), "regime": "iterative", "iterative": rounds})

    def merged(device: str) -> list[dict[str, Tensor]]:
        run = IterativeRun(tmp_path / device, tmp_path / "base.safetensors", ("a",), settings, 0)
        for number in (1, 2):
            model, (examples,) = opened("iterative", device)
            run.tune(number, model, examples, lambda: 0.5)
            run.merge(number)
        return [read_state(run.merged(2))]

    expected = merged("cpu")
    with on(real):
        same(merged("cuda"), expected, real)


def faked(module: nn.Module, mode: FakeTensorMode) -> None:
    """Make every parameter and buffer a fake tensor on `cuda`: it knows its shape, type and device alone."""
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, value in tensors.items():
                if value is not None:
                    fake = mode.from_tensor(value).detach().to("cuda")
                    tensors[name] = nn.Parameter(fake, value.requires_grad) if tensors is part._parameters else fake


@pytest.mark.parametrize("regime", ["steps", "lora", "linearised"])
def test_bfloat16(regime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: autocast asks C++ for the device, and there the card of `tests.card` is `meta`."""
    monkeypatch.setattr(classification, "carry", Tensor.to)  # fake tensors have no streams
    model, seen = cast(Model, image_model(load_clip("pocket-clip"))), list[torch.dtype]()
    if regime == "lora":
        model = LoraModel.of(model, LoraSettings(rank=2, targets=["c_fc", "attn"]))
    model = LinearisedModel.of(model, "visual") if regime == "linearised" else model
    head = Head(torch.randn(3, 128), 1.0, ["x", "y", "z"])
    for part in model.module.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with driver(), FakeTensorMode() as mode:
        faked(model.module, mode)
        faked(head, mode)
        pixels = torch.zeros(9, 32, 32, 3, dtype=torch.uint8, device="cuda")
        examples = Classification("a", pixels, torch.zeros(9, dtype=torch.int64, device="cuda"), head)
        with torch.autocast("cuda", torch.bfloat16):
            loss = examples.loss(model, torch.arange(4))
    assert (loss.device.type, loss.dtype) == ("cuda", torch.float32)
    assert set(seen) == {torch.bfloat16}


def on_images(path: Path, changes: dict[str, Any], lora: bool = False, killed: bool = False) -> dict[str, torch.Tensor]:
    """Tune pocket-clip, random weights, on random images; return its state."""

    def open_model() -> tuple[Any, Classification]:
        torch.manual_seed(0)
        clip = load_clip("pocket-clip", device="cuda")
        model: Any = image_model(clip)
        if lora:
            model = LoraModel.of(model, LoraSettings(rank=2, targets=["c_fc", "attn"]))
        pixels = torch.randint(0, 256, (32, clip.image_size, clip.image_size, 3), dtype=torch.uint8)
        head = Head(torch.randn(4, clip.model.visual.output_dim), 10.0, list("abcd")).to("cuda")
        return model, Classification("a", pixels, (torch.arange(32) % 4).to("cuda"), head)

    settings = IMAGES.model_copy(update={"regime": "lora" if lora else "steps", **changes})
    if killed:
        model, examples = open_model()
        with pytest.raises(Killed):
            fine_tune(model, [examples], settings, 0, path, lambda: 0.0, kill_at(3))
    model, examples = open_model()
    fine_tune(model, [examples], settings, 0, path, lambda: 0.0)
    return {name: value.cpu() for name, value in model.state().items()}


@cuda
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice, once
@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_deterministic_runs_on_a_real_one_have_the_same_bits(
    tmp_path: Path, changes: dict[str, Any], lora: bool
) -> None:
    first = on_images(tmp_path / "first.pt", changes, lora)
    again = on_images(tmp_path / "again.pt", changes, lora)
    killed = on_images(tmp_path / "killed.pt", changes, lora, killed=True)
    torch.testing.assert_close(again, first, **EQUAL)
    torch.testing.assert_close(killed, first, **EQUAL)
