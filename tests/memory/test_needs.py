"""Predicted device memory against what the same work takes on the processor, counted by torch's allocator."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
from torch import nn

from mergeflow.evaluation import accuracies
from mergeflow.memory import Workload
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.text.sections import DataSection as Tokens
from mergeflow.modalities.text.sections import ModelSection as Encoder
from mergeflow.modalities.toy.sections import DataSection as Numbers
from mergeflow.modalities.toy.sections import ModelSection as Net
from mergeflow.modalities.vision.sections import DataSection, ModelSection
from mergeflow.modality import Examples, Model, Network
from mergeflow.training import FineTuneSettings, fine_tune
from mergeflow.training.settings import LoraSettings, Regime
from studies.theory.peak_memory import peak_tensor_bytes
from tasks.training import tuned_model

NET, NUMBERS = Net(modality="toy", widths=[64, 256, 96], dtype="float32"), Numbers(inputs=64)
CLIP, IMAGES = ModelSection(architecture="pocket-clip", pretrained="pocket8"), DataSection(image_size=32)
TEXTS, TOKENS = Encoder(modality="text", pretrained="none"), Tokens(tokenizer="none", max_length=24)
SECTIONS: dict[str, tuple[Any, Any]] = {"toy": (NET, NUMBERS), "vision": (CLIP, IMAGES), "text": (TEXTS, TOKENS)}
SIZES = {"dim": 48, "n_layers": 2, "n_heads": 2, "hidden_dim": 96, "vocab_size": 90}
RECORD = {"config": json.dumps({"model_type": "distilbert", **SIZES, "dropout": 0.0, "attention_dropout": 0.0})}
SETTINGS = FineTuneSettings(batch_size=32, steps=4, warmup=0.0)


def workload(name: str, settings: FineTuneSettings) -> Workload:
    modality, (section, data) = MODALITIES.get(name), SECTIONS[name]
    plain = Workload.of(modality, section, RECORD, data, 5)
    assert plain is not None
    return replace(plain, build=lambda: tuned_model(plain.build(), settings, 0, modality.tower(section)))


def measured(work: Workload, settings: FineTuneSettings, judged: int, tasks: int) -> int:
    """The peak of a real run with weights, without the examples."""
    made, whole = work.build(), 2 * settings.batch_size  # two batches in an epoch
    data = [work.blank(made, whole) for _ in range(tasks)]
    modules = [made.module, *(rows.head for rows in data if rows.head is not None)]
    held = {t.data_ptr(): t.nbytes for module in modules for t in (*module.parameters(), *module.buffers())}

    def run() -> None:
        fine_tune(made, data, settings, 0, Path("none"), lambda: accuracies(made, {"a": judge}, judged)["a"])

    judge = replace(work.blank(made, judged), head=data[0].head)  # type: ignore[type-var]
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
    work = workload(modality, settings)
    needs, expected = work.training(settings, judged, tasks), measured(work, settings, judged, tasks)
    assert max(need.total for need in needs) == pytest.approx(expected, rel=0.03)
    assert all(part >= 0 for need in needs for part in vars(need).values())


def test_weights_gradients_and_optimiser_are_what_they_are() -> None:
    need, _ = workload("toy", SETTINGS).training(SETTINGS)
    size = 4 * (64 * 256 + 256 * 96 + 5 * 96 + 5)
    assert (need.weights, need.gradients, need.sums) == (size, size, 3 * size)
    assert need.optimiser == 2 * size + 4 * 4  # a step count for each of four parameters


@pytest.mark.slow
def test_activations_are_linear_in_the_batch() -> None:
    totals = [workload("vision", SETTINGS).judging(rows).total for rows in (16, 32, 48)]
    steps = [after - before for before, after in pairwise(totals)]
    assert steps[0] == pytest.approx(steps[1], rel=0.01)


def weights_of(model: Model, data: Examples) -> int:
    assert data.head is not None
    return sum(t.nbytes for t in (*model.module.state_dict().values(), *data.head.state_dict().values()))


def test_judging() -> None:
    vision = workload("vision", SETTINGS)
    model = vision.build()
    data = vision.blank(model, 64)
    expected = weights_of(model, data) + peak_tensor_bytes(lambda: accuracies(model, {"a": data}, 64))
    assert vision.judging(64).total == pytest.approx(expected, rel=0.03)


def test_a_weight_that_two_layers_share_counts_once() -> None:
    def build() -> Model:
        first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        second.weight = first.weight
        return Network(nn.Sequential(first, second))

    need = Workload(build, workload("toy", SETTINGS).blank).need(lambda model, data: None, 2)
    head = 4 * (5 * 96 + 5)
    assert (need.weights, need.activations) == (36 + head, 0)
