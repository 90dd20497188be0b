"""Predicted device memory against what the same work takes on the processor, counted by torch's allocator."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from mergeflow.evaluation import accuracies
from mergeflow.evaluation.adamerging import entropy_gradient
from mergeflow.evaluation.statistics import diagonal_fisher, input_grams
from mergeflow.memory import blank_model, judging_need, tallied, training_needs, without_values
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.text.sections import DataSection as Tokens
from mergeflow.modalities.text.sections import ModelSection as Encoder
from mergeflow.modalities.toy.sections import DataSection as Numbers
from mergeflow.modalities.toy.sections import ModelSection as Net
from mergeflow.modalities.vision.sections import DataSection, ModelSection
from mergeflow.modality import Examples, Model
from mergeflow.training import FineTuneSettings, fine_tune
from mergeflow.training.settings import LoraSettings, Regime
from studies.theory.peak_memory import peak_tensor_bytes
from tasks.training import tuned_model

NET, NUMBERS = Net(modality="toy", widths=[64, 256, 96], dtype="float32"), Numbers(inputs=64)
CLIP, IMAGES = ModelSection(architecture="pocket-clip", pretrained="pocket8"), DataSection(image_size=32)
TEXTS, TOKENS = Encoder(modality="text", pretrained="none"), Tokens(tokenizer="none", max_length=24)
SECTIONS: dict[str, tuple[Any, Any]] = {"toy": (NET, NUMBERS), "vision": (CLIP, IMAGES), "text": (TEXTS, TOKENS)}
RECORD = {
    "config": json.dumps(
        {
            "model_type": "distilbert",
            "dim": 48,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 96,
            "vocab_size": 90,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        }
    )
}
SETTINGS = FineTuneSettings(batch_size=32, steps=4, warmup=0.0)


def blank(modality: str) -> Callable[[int], Examples]:
    make = MODALITIES.get(modality).blank
    assert make is not None
    plain, sections = MODALITIES.get(modality).build(SECTIONS[modality][0], RECORD), SECTIONS[modality]
    return lambda count: make(plain, *sections, count, 5)


def model(modality: str, settings: FineTuneSettings) -> Model:
    found = MODALITIES.get(modality)
    return tuned_model(found.build(SECTIONS[modality][0], RECORD), settings, 0, found.tower)


def measured(modality: str, settings: FineTuneSettings, judged: int, tasks: int) -> int:
    """The peak of a real run with weights, without the examples."""
    made, whole = model(modality, settings), 2 * settings.batch_size  # two batches in an epoch
    data = [blank(modality)(whole) for _ in range(tasks)]
    modules = [made.module, *(one.head for one in data if one.head is not None)]
    held = {t.data_ptr(): t.nbytes for one in modules for t in (*one.parameters(), *one.buffers())}

    def run() -> None:
        fine_tune(made, data, settings, 0, Path("none"), lambda: accuracies(made, {"a": judge}, judged)["a"])

    judge = replace(blank(modality)(judged), head=data[0].head)  # type: ignore[type-var]
    return peak_tensor_bytes(run) + sum(held.values())


TRAINED: list[tuple[str, dict[str, Any], int]] = [
    *(("toy", {"regime": regime}, 8) for regime in get_args(Regime) if regime not in ("lora", "iterative")),
    ("toy", {"regime": "lora", "lora": LoraSettings(rank=4, targets=["0"])}, 8),
    ("toy", {"optimiser": "sgd", "momentum": 0.9}, 8),
    ("toy", {"accumulate": 4}, 8),
    ("toy", {}, 4096),  # the validation is the peak
    ("vision", {}, 8),
    ("text", {}, 8),
    ("vision", {"precision": "bfloat16", "accumulate": 2}, 8),
]


@pytest.mark.slow
@pytest.mark.parametrize(("modality", "changes", "judged"), TRAINED, ids=str)
def test_training(modality: str, changes: dict[str, Any], judged: int) -> None:
    settings = SETTINGS.model_copy(update={"epochs": 2, **changes})
    tasks = 2 if settings.regime == "joint" else 1
    needs = training_needs(
        blank_model(lambda: model(modality, settings)), blank(modality), settings,
        judged=judged, tasks=tasks, cuda=False,
    )  # fmt: skip
    expected = measured(modality, settings, judged, tasks)
    assert max(need.total for need in needs) == pytest.approx(expected, rel=0.03)
    assert all(part >= 0 for need in needs for part in vars(need).values())


def test_weights_gradients_and_optimiser_are_what_they_are() -> None:
    need, _ = training_needs(model("toy", SETTINGS), blank("toy"), SETTINGS, cuda=False)
    size = 4 * (64 * 256 + 256 * 96 + 5 * 96 + 5)
    assert (need.weights, need.gradients, need.sums) == (size, size, 3 * size)
    assert need.optimiser == 2 * size + 4 * 4  # a step count for each of four parameters


@pytest.mark.slow
def test_activations_are_linear_in_the_batch() -> None:
    found = [judging_need(model("vision", SETTINGS), blank("vision"), judged=rows) for rows in (16, 32, 48)]
    steps = [b.total - a.total for a, b in pairwise(found)]
    assert steps[0] == pytest.approx(steps[1], rel=0.01)


def test_bfloat16_on_a_card_takes_less_than_float32_and_more_than_on_the_processor() -> None:
    """CUDA's autocast computes layer norms in float32, the processor's does not."""

    def peak(precision: str, cuda: bool) -> int:
        layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU())]
        net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), *layers)
        with tallied(cuda) as tally, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            without_values(net)(torch.empty(512, 64)).sum().backward()
        return tally.peak

    assert peak("bfloat16", False) < peak("bfloat16", True) < 0.9 * peak("float32", True)


@pytest.mark.parametrize(("precision", "copies"), [("float32", 1), ("bfloat16", 0)])
def test_a_card_s_attention_in_float32_leaves_a_copy_behind(precision: str, copies: int) -> None:
    """As an H100 did with ViT-L/14: one copy of each block's attention in float32, none in bfloat16."""

    def held(cuda: bool) -> int:
        dtype = getattr(torch, precision)
        net = nn.MultiheadAttention(64, 4, batch_first=True).to(dtype)
        with tallied(cuda) as tally:
            without_values(net)
            tokens, before = torch.empty(8, 16, 64, dtype=dtype, requires_grad=True), tally.held
            kept = net(tokens, tokens, tokens, need_weights=False)
            del tokens
            assert kept
            return tally.held - before

    size = 8 * 16 * 64 * getattr(torch, precision).itemsize
    assert held(cuda=True) - held(cuda=False) == copies * size


def entropy(made: Model, data: Examples) -> None:
    entropy_gradient(made, {"a": data}, {name: value.clone() for name, value in made.state().items()}, 8)


def fisher(made: Model, data: Examples) -> None:
    diagonal_fisher(made, data)


def grams(made: Model, data: Examples) -> None:
    input_grams(made, data, batch_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("work", [entropy, fisher, grams])
def test_statistics_and_adamerging(work: Callable[[Model, Examples], None]) -> None:
    plain, make = model("vision", SETTINGS), blank("vision")
    weights = sum(value.nbytes for value in plain.module.state_dict().values())
    expected = weights + peak_tensor_bytes(lambda: work(plain, make(8)))
    made = blank_model(lambda: model("vision", SETTINGS))
    with tallied(cuda=False) as tally:
        without_values(made.module)
        work(made, without_values(make(8)))
    assert tally.peak == pytest.approx(expected, rel=0.05)


def test_judging() -> None:
    made, data = model("vision", SETTINGS), blank("vision")(64)
    weights = sum(t.nbytes for t in (*made.module.state_dict().values(), *data.head.state_dict().values()))  # type: ignore[union-attr]
    expected = peak_tensor_bytes(lambda: accuracies(made, {"a": data}, 64)) + weights
    found = judging_need(blank_model(lambda: model("vision", SETTINGS)), blank("vision"), judged=64, cuda=False)
    assert found.total == pytest.approx(expected, rel=0.03)


def test_shared_parameters_stay_shared_and_a_card_rounds_up() -> None:
    first = nn.Linear(3, 3, bias=False)
    second = nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    with tallied(cuda=True) as tally:
        made = without_values(nn.Sequential(first, second))
        assert made[0].weight is made[1].weight
        assert isinstance(made[0].weight, nn.Parameter)
        assert tally.held == 512
        found: list[Tensor] = without_values([torch.ones(2)])
        assert tally.held == 1024
        assert found[0].shape == (2,)
        del found
        assert tally.held == 512
