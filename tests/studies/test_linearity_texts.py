"""Study `linearity_texts` on a tiny T5, its identities on broken inputs, and published checkpoints of T5's classes."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from pydantic import ValidationError
from safetensors.torch import save_file

from mergeflow.checkpoints import read_state
from studies.lab.linearity import TunedModels
from studies.lab.rows import select
from studies.linearity_texts import EDITS, Options, TextWorld, distance_in_places, draw_answers, feature_rows, new_model
from tests.linearity.checkpoints import WORDS, noisy, texts, word_tokenizer
from tests.studies.small_lab import ROOT, check_two_processes, link_choices, run_result

SHORT = {"learning_rate": 0.003, "steps": 3, "batch_size": 8}
WORLD: dict[str, Any] = {
    "width": 16,
    "blocks": 1,
    "heads": 2,
    "inner": 16,
    "symbols": 6,
    "train": 64,
    "test": 32,
    "tasks": ["repeated", "reversed", "sorted"],
    "pretrain": SHORT,
    "tune": SHORT,
}
SMALL: dict[str, Any] = {"seeds": [0], "world": WORLD, "texts": 32, "scale": 0.4, "scales": [0.4]}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    result = run_result(ROOT, "linearity_texts", tmp_path_factory.mktemp("texts"), **SMALL)
    assert set(result.draw()) == {"edits"}
    return result.rows


@pytest.mark.nightly
def test_two_seeds_at_once_write_no_file_of_each_other(tmp_path: Path) -> None:
    check_two_processes("linearity_texts", tmp_path, **{**SMALL, "seeds": [0, 1]})


def test_the_whole_study_on_a_tiny_model(rows: pd.DataFrame) -> None:
    edits = select(rows, part="edits")
    assert set(edits.layer) == {"encoder.block.0", "decoder.block.0"}
    assert len(edits) == (2 * 1 + 2 * 2) * 2, "one pair in two readings, two tasks in two equations; two blocks"


def test_identities_hold_for_the_code_as_it_is(rows: pd.DataFrame) -> None:
    assert set(select(rows, part="vectors").type) == {"float32", "bfloat16"}
    assert select(rows, part="vectors").places.max() <= 1
    assert select(rows, part="features").apart.max() < 1e-5
    assert select(rows, part="samples").apart.max() < 1e-6


def test_what_does_not_hold_is_found() -> None:
    first, other = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.5, 4.0])}
    assert distance_in_places(first, other, {"w": torch.tensor([1.5, 4.1])})["places"] > 1e4

    class Leaky:
        """Features of a text that depend on the texts beside it."""

        def __len__(self) -> int:
            return 32

        def features(self, model: Any, rows: torch.Tensor, layers: list[str]) -> dict[str, torch.Tensor]:
            return {layer: torch.ones(len(rows), 2) * len(rows) for layer in layers}

    model = new_model(TextWorld.model_validate(WORLD), 0)
    rows = feature_rows(TunedModels(model, model.state(), {}, {"leaky": Leaky()}), 0)
    assert min(row["apart"] for row in rows) > 1


def test_answers_are_the_edited_questions() -> None:
    world = TextWorld.model_validate(WORLD)
    expected = {"repeated": [2, 5, 3, 4], "reversed": [4, 3, 5, 2], "sorted": [2, 3, 4, 5], "shifted": [3, 6, 4, 5]}
    expected |= {"rotated": [5, 3, 4, 2], "swapped": [5, 2, 4, 3], "halved": [2, 3]}
    assert {task: edit([2, 5, 3, 4], 6) for task, edit in EDITS.items()} == expected
    assert EDITS["shifted"]([7], 6) == [2], "the last symbol is followed by the first"
    drawn = draw_answers(world, "halved", 16, 1)
    model = new_model(world, 0)
    assert drawn.scores(model, torch.arange(16)).shape == (16,)
    torch.testing.assert_close(
        drawn.log_p(model, torch.arange(2)).exp().sum(1), torch.ones(int((drawn.labels[:2] >= 0).sum()))
    )
    surprise = -drawn.log_p(model, torch.arange(16)).gather(1, drawn.labels[drawn.labels >= 0][:, None]).mean()
    torch.testing.assert_close(drawn.loss(model, torch.arange(16)), surprise)


def published(folder: Path, config: dict[str, Any], count: int) -> dict[str, Any]:
    """Write a T5 of random weights with a tokenizer, and experts beside it, as transformers saves them."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    options: Any = {"vocab_size": len(WORDS) + 2, "decoder_start_token_id": 0, **config}
    whole: Any = T5ForConditionalGeneration(T5Config(**options))
    whole.save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    texts(folder)
    names = [f"task_{n}" for n in range(count)]
    for number, name in enumerate(names, start=1):
        tensors = read_state(folder / "base/model.safetensors")
        changed = noisy({key: value for key, value in whole.state_dict().items() if key in tensors}, number, 0.02)
        save_file(changed, folder / f"{name}.safetensors")
    experts = {name: f"{name}.safetensors" for name in names}
    return {"base": "base", "experts": experts, "texts": dict.fromkeys(names, "text:lines.txt")}


@pytest.mark.slow
def test_published_checkpoints_take_the_place_of_the_world(tmp_path: Path) -> None:
    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    asked = published(tmp_path, size, 2)
    options = {**SMALL, "world": None, "checkpoints": asked}
    rows = run_result(link_choices(tmp_path), "linearity_texts", tmp_path / "work", **options).rows
    assert set(select(rows, part="edits").layer) == {
        f"{stack}.block.{n}" for stack in ("encoder", "decoder") for n in (0, 1)
    }
    assert not len(select(rows, part="experts")), "texts without answers"
    assert select(rows, part="features").apart.max() < 1e-5, "T5's dropout is off where features are looked at"


def test_choices_that_contradict_each_other_are_refused() -> None:
    both = {
        **SMALL,
        "checkpoints": {"base": "b", "experts": {"a": "1", "c": "2"}, "texts": {"a": "text:1", "c": "text:2"}},
    }
    with pytest.raises(ValidationError, match="either `world` or `checkpoints`"):
        Options.model_validate(both)
    both["checkpoints"]["texts"].pop("c")
    with pytest.raises(ValidationError, match="expected the same tasks"):
        Options.model_validate(both)
    with pytest.raises(ValidationError, match="did you mean 'reversed'"):
        Options.model_validate({**SMALL, "world": {**WORLD, "tasks": ["repeated", "revers", "sorted"]}})


@pytest.mark.nightly
def test_the_example_of_t5_runs_at_the_real_size(tmp_path: Path) -> None:
    """T5-base with random weights, two of the six experts and one λ: some 8 GB and a few minutes."""
    example = yaml.safe_load((ROOT / "examples/linearity/studies.yaml").read_text())["studies"]["linearity_texts"]
    size = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
    asked = published(tmp_path, size, 2)
    short = {**example, "checkpoints": asked, "texts": 32, "scales": [0.4]}
    rows = run_result(link_choices(tmp_path), "linearity_texts", tmp_path / "work", world=None, **short).rows
    edits = select(rows, part="edits")
    assert set(edits.depth) == set(range(24))
    assert np.isfinite(edits[["distance", "coef", "error"]]).all().all()
    assert select(rows, part="features").apart.max() < 1e-5
