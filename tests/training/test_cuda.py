"""Training on a CUDA device: each regime ends where the processor's does; `deterministic` keeps every bit, kills too.

Where there is no device these tests are skipped; `test_on_card.py` walks the same ways on a simulated one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.training import FineTuneSettings, IterativeRun, LoraModel, LoraSettings, fine_tune
from tests.training.test_fine_tune import Killed, kill_at
from tests.training.test_heads import SETTINGS, network
from tests.training.test_on_card import REGIMES, VARIANTS, opened

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
IMAGES = FineTuneSettings(steps=6, batch_size=8, learning_rate=1e-3, save_every=2, deterministic=True)
KINDS: list[dict[str, Any]] = [{}, {"precision": "bfloat16"}, {"precision": "bfloat16", "compile": True}]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("regime", REGIMES)
def test_every_regime_ends_where_the_processor_s_does(tmp_path: Path, regime: str, changes: dict[str, Any]) -> None:
    settings = SETTINGS.model_copy(update={"regime": regime, "epochs": 2, **changes})
    ends = []
    for device in ("cpu", "cuda"):
        model, tasks = opened(settings.regime, device)
        fine_tune(model, tasks, settings, 0, tmp_path / f"{device}.pt", lambda: 0.5)
        heads = [{name: value.cpu() for name, value in examples.head.state_dict().items()} for examples in tasks]
        ends.append([{name: value.cpu() for name, value in model.state().items()}, *heads])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)


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


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")  # the compiler's advice, once
@pytest.mark.parametrize("changes", KINDS, ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_deterministic_runs_killed_or_not_have_the_same_bits(
    tmp_path: Path, changes: dict[str, Any], lora: bool
) -> None:
    first = on_images(tmp_path / "first.pt", changes, lora)
    again = on_images(tmp_path / "again.pt", changes, lora)
    killed = on_images(tmp_path / "killed.pt", changes, lora, killed=True)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    torch.testing.assert_close(killed, first, rtol=0, atol=0)


def test_rounds_of_merging_and_tuning(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base.safetensors", network().state())
    settings = FineTuneSettings.model_validate({
        **SETTINGS.model_dump(), "regime": "iterative", "iterative": {"rounds": 2, "optimiser": "kept"},
    })  # fmt: skip
    ends = []
    for device in ("cpu", "cuda"):
        run = IterativeRun(tmp_path / device, tmp_path / "base.safetensors", ("a",), settings, 0)
        for number in (1, 2):
            model, (examples,) = opened("iterative", device)
            run.tune(number, model, examples, lambda: 0.5)
            run.merge(number)
        with open_checkpoint(run.merged(2)) as state:
            ends.append(dict(state))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)
