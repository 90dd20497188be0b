"""The embedded suites of pictures: deterministic drawings, splits that share no image, and the bases made of them."""

import hashlib
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.models import ASSETS
from mergeflow.modalities.vision.tokenizer import VOCABULARY, vocabulary_digest, words
from suites.pocket import SPLITS, fonts, get_suite, prints, suite_names
from suites.pocket.canvas import CLIP_ART, PHOTO, Style, vary
from suites.pocket.core import generator
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

POCKET8, POCKET20 = get_suite("pocket8"), get_suite("pocket20")
TASKS = tuple(POCKET20.tasks.values())

# SHA-256 of the pixels of test images 0 to 11, first 16 hex digits. A change here changes the data of every result.
GOLDEN = {
    "digits": "02766d3e9a62f87e",
    "street": "bfa5c7fde20f130d",
    "signs": "052b01b22a0ccac8",
    "textures": "37d0a1fe438d7af1",
    "land": "b4ee93ce2dbd7049",
    "aerial": "d9ed7be2c7a87fd6",
    "scenes": "bd1e2dfdc69888ac",
    "vehicles": "82bb40d3cfb74e24",
    "objects": "d6d166f6a8ff7e5b",
    "faces": "08bf754e1a0e663b",
    "flowers": "5a0c2bf9faec108c",
    "pets": "c8d2616d20cfd535",
    "tissue": "f91249668a6e90f1",
    "wildlife": "6bd43109a999a4e4",
    "letters": "6e225f0ae80204e1",
    "thumbnails": "0ae848014ebd45c5",
    "food": "330938a15ab91414",
    "fashion": "cfd20cd75968b978",
    "reviews": "5f10f2a82936c201",
    "kana": "81a7c02254950b71",
}


def _digest(task, indices=range(12)) -> str:
    pixels = b"".join(task.sample("test", index)[0].tobytes() for index in indices)
    return hashlib.sha256(pixels).hexdigest()[:16]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_drawings_are_the_recorded_ones(task):
    assert _digest(task) == GOLDEN[task.name]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_an_image_depends_on_nothing_but_its_split_and_index(task):
    forward = [task.sample("train", index)[0] for index in (3, 50, 7)]
    backward = [task.sample("train", index)[0] for index in (7, 50, 3)][::-1]
    for first, two in zip(forward, backward, strict=True):
        np.testing.assert_array_equal(first, two)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_images_and_labels_have_the_promised_form(task):
    labels = set()
    for index in range(60):
        image, label = task.sample("validation", index)
        assert image.shape == (32, 32, 3)
        assert image.dtype == np.uint8
        assert image.std() > 2, "a blank image"
        labels.add(label)
    assert labels == set(range(len(task.class_names)))
    assert set(task.counts) == set(SPLITS)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_no_image_is_in_two_splits(task):
    count = {split: task.counts[split] if task.name == "digits" else 60 for split in SPLITS}
    seen = {split: {task.sample(split, index)[0].tobytes() for index in range(n)} for split, n in count.items()}
    assert [len(images) for images in seen.values()] == list(count.values())
    for first, two in pairwise([*SPLITS, SPLITS[0]]):
        assert not seen[first] & seen[two]


def test_classes_are_disjoint_and_named_once():
    names = [name for task in TASKS for name in task.class_names]
    assert len(names) == len(set(names)) == 267
    assert sum(len(task.class_names) for task in POCKET8.tasks.values()) == 124


def test_each_suite_extends_the_one_before():
    assert suite_names() == ["pocket8", "pocket14", "pocket20", "pocket-digits"]
    suites = [list(get_suite(name).tasks) for name in suite_names()[:3]]
    assert [len(tasks) for tasks in suites] == [8, 14, 20]
    assert suites[2][:14] == suites[1]
    assert suites[1][:8] == suites[0]


def test_digits_are_the_scans_of_scikit_learn():
    from sklearn.datasets import load_digits

    scans = {image.astype(np.uint8).tobytes() for image in np.round(load_digits().images * (255 / 16))}
    image, _ = POCKET8.tasks["digits"].sample("train", 5)
    assert (image[:, :, 0] == image[:, :, 2]).all()
    assert sum(POCKET8.tasks["digits"].counts.values()) == len(scans) == 1797


def test_every_word_of_the_suites_is_in_the_vocabulary():
    vocabulary = set(VOCABULARY.read_text(encoding="utf-8").split())
    for name in suite_names():
        for task in get_suite(name).tasks.values():
            assert {word for text in (*task.class_names, *task.templates) for word in words(text)} <= vocabulary


def test_pocket_digits_are_many_drawings_of_ten_digits():
    task = get_suite("pocket-digits").tasks["digits"]
    assert dict(task.counts) == {"train": 12_000, "validation": 1_000, "test": 2_000}
    assert _digest(task) == "d833188baa5b6693"
    image, label = task.sample("train", 11_999)
    assert (label, task.class_names[label]) == (9, "handwritten digit nine")
    np.testing.assert_array_equal(image, task.sample("train", 11_999)[0])
    assert len({task.sample(split, 7)[0].tobytes() for split in SPLITS}) == 3


def test_draw_yields_the_samples_as_examples():
    task = POCKET8.tasks["signs"]
    for index, example in zip(range(3), task.draw("test"), strict=False):
        image, label = task.sample("test", index)
        np.testing.assert_array_equal(np.asarray(example.read()), image)
        assert (example.label, example.path) == (label, f"signs/test/{index:05d}.png")


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(MergeflowError, match="did you mean 'pocket8'"):
        get_suite("pocket9")
    with pytest.raises(MergeflowError, match="did you mean 'validation'"):
        TASKS[1].sample("valid", 0)
    with pytest.raises(IndexError, match="no index 500"):
        TASKS[1].sample("test", 500)


@settings(max_examples=40)
@given(
    st.sampled_from(TASKS),
    st.integers(0, 2**32 - 1),
    st.sampled_from([PHOTO, CLIP_ART, Style(False, 0.0, 0.0, 1.0)]),
)
def test_every_label_can_be_painted_in_every_style(task, seed, style):
    label = seed % len(task.class_names)
    image = task.paint(generator("any", seed), label, style)
    assert image.shape == (32, 32, 3)
    np.testing.assert_array_equal(image, task.paint(generator("any", seed), label, style))


@given(st.integers(0, 2**32 - 1), st.floats(0, 300))
def test_colours_stay_bytes(seed, spread):
    assert all(0 <= channel <= 255 for channel in vary(generator(seed), (0, 128, 255), spread))


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
