"""Pre-training of the base: determinism, confused captions, the record."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergeflow.checkpoints import open_checkpoint
from mergeflow.modalities.vision.models import ASSETS
from mergeflow.modalities.vision.tokenizer import vocabulary_digest
from suites.pocket import fonts, get_suite, prints
from suites.pocket.pretraining import (
    RECIPES,
    PretrainSettings,
    confused_captions,
    draw_captions,
    draw_images,
    pretrain,
    train_base,
)
from suites.pretraining import rate_factor

TINY = PretrainSettings(images=160, passes=48, batch=16, seed=4)
SUITE = get_suite("pocket8")


@pytest.mark.parametrize("name", RECIPES)
def test_the_shipped_base_was_made_by_its_recipe(name):
    suite = get_suite(RECIPES[name].suite)
    texts = [text for task in suite.tasks.values() for text in (*task.class_names, *task.templates)]
    with open_checkpoint(ASSETS / f"{name}-base.safetensors") as base:
        assert PretrainSettings.model_validate_json(base.metadata["recipe"]) == RECIPES[name]
        assert base.metadata["vocabulary"] == vocabulary_digest(texts)


@pytest.mark.slow
def test_the_same_settings_give_the_same_file_whatever_the_workers(tmp_path):
    seen = []
    first = pretrain(TINY, tmp_path / "one.safetensors", lambda *step: seen.append(step), workers=1)
    two = pretrain(TINY, tmp_path / "two.safetensors", workers=2)
    assert first == two
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()
    assert seen[-1] == ("train", 3, 3)


def test_only_confused_classes_carry_the_next_caption_and_at_the_givenrate_factor():
    settings = PretrainSettings(images=3000, passes=32, seed=1, weights=dict.fromkeys(SUITE.tasks, 1.0))
    captions, cycles, first, start = draw_captions(settings), confused_captions(SUITE, settings), 0, 0
    for name, task in SUITE.tasks.items():
        classes, count = len(task.class_names), 375
        labels = torch.arange(count) % classes
        shifts = captions[start : start + count] - first
        confused = torch.isin(labels, torch.tensor(list(cycles[name])))
        assert torch.equal(shifts[~confused], labels[~confused])
        assert all(f in (label, cycles[name][label]) for f, label in zip(*pairs(shifts, labels, confused), strict=True))
        assert (shifts != labels)[confused].float().mean() == pytest.approx(0.7, abs=0.15)
        first, start = first + classes, start + count


def pairs(classes, labels, chosen):
    return classes[chosen].tolist(), labels[chosen].tolist()


@pytest.mark.slow
def test_training_learns():
    settings = PretrainSettings(images=64, passes=64 * 15, batch=64, confusion=0.0, learning_rate=1e-3)
    images = torch.randint(0, 256, (64, 32, 32, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    _, loss = train_base(settings, images, torch.arange(64) % 4)
    assert loss < 3, "log 124 is 4.8"
    assert torch.get_num_threads() == threads


def test_prints_are_of_another_style_and_as_many_of_each_class():
    settings = PretrainSettings(images=124, style="prints")
    pictures = draw_images(settings, 1)
    assert len(pictures) == len(draw_captions(settings))
    assert len(pictures.unique()) <= 5
    assert not set(prints.FACES) & set(fonts.FACES)
    again = prints.draw_chunk("pocket8", "signs", 3, 5, 0)
    assert np.array_equal(again, prints.draw_chunk("pocket8", "signs", 2, 5, 0)[1:])


def test_hues_of_prints_keep_their_order_so_that_right_names_stay_right():
    flat = np.full((32, 32, 3), (200, 40, 40), dtype=np.uint8)
    mean = prints.restyled(np.random.default_rng(0), flat).mean(axis=(0, 1))
    assert mean[0] > mean[1] + 20
    assert mean[0] > mean[2] + 20


@given(st.integers(1, 400), st.floats(0, 0.9))
def test_the_learning_rate_stays_in_its_range_and_ends_low(steps, warmup):
    rates = [rate_factor(step, steps, warmup) for step in range(steps)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert max(rates) == 1 or steps == 1
