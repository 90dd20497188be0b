"""Predicted device memory of commands and of serving, against what the card of `tests.card` holds while they run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.nn.attention import SDPBackend, sdpa_kernel

from mergeflow.errors import MergeflowError
from mergeflow.evaluation.adamerging import learn_coefficients
from mergeflow.evaluation.memory import (
    estimate_coefficients_memory,
    estimate_perplexity_memory,
    estimate_statistic_memory,
)
from mergeflow.evaluation.statistics import StatisticOrder, write_statistic
from mergeflow.memory import Forecast, answering_need, placed
from mergeflow.merging import make_recipe
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.causal.modality import Blocks, PackedText, perplexity
from mergeflow.modalities.causal.model import build_model
from mergeflow.modalities.heads import load_head
from mergeflow.modalities.served import SERVED, Loaded
from mergeflow.modalities.vision.images import encode_png
from mergeflow.modalities.vision.sections import ModelSection
from mergeflow.search.forecast import estimate_sweep_memory
from mergeflow.search.sweep import run_sweep
from mergeflow.search.sweep_file import make_sweep
from mergeflow.training.arithmetic import arithmetic
from tests.card import card, counted, driver
from tests.evaluation.small import TASKS, shared_world, sweep_values
from tests.evaluation.test_entropy import order, recipe_values
from tests.evaluation.test_statistics import call

pytestmark = pytest.mark.slow

CUDA = torch.device("cuda")
TASK = next(iter(TASKS))
GPT = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 500}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_world(tmp_path_factory)


@pytest.fixture(autouse=True)
def plain() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with sdpa_kernel(SDPBackend.MATH):  # C++ takes the simulated card for `meta`, which has no flash attention
        yield
    torch.set_num_threads(before)


def asked(world: Path, kind: Any, **changes: Any) -> StatisticOrder:
    files = {"expert": "experts", "head": "heads"}
    statistics = {key: str(world / folder / f"{TASK}.safetensors") for key, folder in files.items()}
    values = {"task": str(world / "data" / TASK), "architecture": "pocket-clip", "device": "cuda", **statistics}
    return StatisticOrder(kind, **{**values, **changes})


def total(forecast: Forecast, name: str) -> int:
    (work,) = [work for work in forecast.works if work.name == name]
    return work.need.total


@pytest.mark.parametrize(("kind", "name"), [("fisher", "statistics fisher"), ("gram", "statistics gram")])
def test_statistics(world: Path, tmp_path: Path, kind: str, name: str) -> None:
    wanted = asked(world, kind, samples=32, batch_size=16)
    with driver():
        forecast = estimate_statistic_memory(wanted)
    with card(), arithmetic(), counted() as tally:
        write_statistic(wanted, tmp_path / "out.safetensors")
    assert total(forecast, name) == pytest.approx(tally.peak, rel=0.05)
    assert forecast.works[0].need.sums > 0


def test_adamerging_whatever_the_number_of_tasks(world: Path, tmp_path: Path) -> None:
    wanted = order(world, batch_size=8)
    with driver():
        forecast = estimate_coefficients_memory(wanted, "cuda")
    with card(), arithmetic(), counted() as tally:
        learn_coefficients(make_recipe({**recipe_values(world, steps=2), "device": "cuda"}), wanted, tmp_path / "out")
    assert total(forecast, "adamerge: a step") == pytest.approx(tally.peak, rel=0.05)


def test_a_sweep(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sweep needs is predicted; directions and images that stay on the device find room by themselves."""
    for user in ("merging.execution.direction", "evaluation.accuracy"):
        monkeypatch.setattr(f"mergeflow.{user}.has_room", lambda *_: False)
    methods = {"average": {}, "cart": {"rank_ratio": [0.25, 0.5], "scale": [0.5, 1.0]}}
    wanted = make_sweep(sweep_values(world, device="cuda", methods=methods, batch_size=4))
    with driver():
        forecast = estimate_sweep_memory(wanted)
    with card(), arithmetic(), counted() as tally:
        run_sweep(wanted, tmp_path)
    most = max(work.need.total for work in forecast.works)
    assert [work.name for work in forecast.works] == ["sweep: merging", "sweep: judging"]
    assert 0.97 * tally.peak <= most <= 1.5 * tally.peak  # two workers need not meet at the largest two matrices


def test_perplexity() -> None:
    config, rows = json.dumps(GPT), 4
    with driver():
        forecast = estimate_perplexity_memory(config, rows, 64, "cuda")
    blocks = Blocks(torch.ones(rows, 64, dtype=torch.int32), torch.full((rows,), 64))
    with card(), counted() as tally:
        model = build_model(config)
        model.module.eval().to(CUDA)
        model.module.whole.tie_weights()
        perplexity(model, PackedText("a", blocks, CUDA), rows)
    assert total(forecast, "perplexity") == pytest.approx(tally.peak, rel=0.05)


def test_a_batch_that_cannot_fit_is_refused_with_the_one_that_fits(world: Path, tmp_path: Path) -> None:
    options = ["--device", "cuda", "--batch-size", "4096"]
    with driver(memory=8 * 10**8):
        done = call(world, "gram", TASK, tmp_path / "gram.safetensors", *options)
        assert isinstance(done.exception, MergeflowError)
        assert str(done.exception).startswith("statistics gram needs about ")
        rows = int(str(done.exception).partition("Set --batch-size to ")[2].partition(":")[0])
        estimate_statistic_memory(asked(world, "gram", batch_size=rows)).refuse()
        with pytest.raises(MergeflowError):
            estimate_statistic_memory(asked(world, "gram", batch_size=2 * rows)).refuse()
        assert "examples at once" in done.output
    with driver(memory=7 * 10**8), pytest.raises(MergeflowError, match="Not even one example"):
        estimate_statistic_memory(asked(world, "fisher")).refuse()
    assert not list(tmp_path.iterdir())


def test_a_server_takes_the_card_if_it_has_room(world: Path) -> None:
    modality, section = MODALITIES.get("vision"), ModelSection(architecture="pocket-clip", pretrained="pocket8")
    heads = {task: load_head(world / "heads" / f"{task}.safetensors") for task in TASKS}
    names = {task: head.class_names for task, head in heads.items()}
    model, size = modality.build(section, {}), {"image_size": 32}
    loaded = Loaded(modality, model, heads, names, size, {}, torch.device("cpu"), section)
    need = answering_need(loaded)
    assert need is not None
    with card(memory=7 * 10**8), pytest.warns(UserWarning, match="the model answers on the processor: it needs about"):
        assert placed(loaded).device.type == "cpu"
    image, served = encode_png(Image.new("RGB", (32, 32))), SERVED.get("vision")
    with card(), counted() as tally:
        there = placed(loaded)
        assert there.device.type == "cuda"
        served.answer(there, {"image": [image] * served.rows, "task": [TASK] * served.rows})
    assert need.total == pytest.approx(tally.peak, rel=0.05)
