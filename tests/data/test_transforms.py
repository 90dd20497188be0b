"""Transforms: pure, composable, the same split as their source, and refused with the way out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mergeflow.data import load_split
from mergeflow.data.address import open_source, parse_address
from mergeflow.data.prepare import prepare_task
from mergeflow.data.task import Example, Place, RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.preparation import TRANSFORMS, image_decoding

COUNTS = {"train": 400, "validation": 60, "test": 100}
DIGITS = tuple(str(digit) for digit in range(10))


def grey(number: int) -> Image.Image:
    """A picture of 9 x 9 grey pixels, another one for every number."""
    pixels = np.random.default_rng(number).integers(1, 256, (9, 9), np.uint8)
    return Image.fromarray(pixels).convert("RGB")


def digits(counts: Mapping[str, int] = COUNTS) -> RawTask:
    def draw(split: str) -> Iterator[Example]:
        for row in range(counts[split]):
            yield Example(grey(1000 * [*COUNTS].index(split) + row), f"{split}/{row:05d}.png", row % 10)

    return RawTask("digits", DIGITS, ["a {}"], {split: (lambda split=split: draw(split)) for split in counts})  # type: ignore[misc]


def derived(query: str, counts: Mapping[str, int] = COUNTS, seed: int = 0) -> RawTask:
    openers = {"drawn": lambda task, place, seed, root: digits(counts)}
    return open_source("digits", f"drawn:x{query}", openers, TRANSFORMS, seed)


def prepared(folder: Path, query: str, counts: Mapping[str, int] = COUNTS, **options: Any) -> dict[str, Any]:
    return prepare_task(derived(query, counts), folder, image_decoding(9), **options)


STEPS = st.one_of(
    st.floats(-360, 360).map(lambda angle: f"rotate={angle:.3f}"),
    st.integers(0, 10**6).map(lambda seed: f"shuffle_labels={seed}"),
    st.floats(0.01, 1).map(lambda share: f"fraction={share:.3f}"),
    st.sampled_from(["classes=0-3", "classes=1,3-4", "classes=0,1"]),
)


def one_choice_of_classes(steps: list[str]) -> bool:
    return sum(step.startswith("classes") for step in steps) <= 1


@pytest.mark.slow
@settings(max_examples=40)
@given(st.lists(STEPS, max_size=4).filter(one_choice_of_classes), st.permutations(range(40)), st.integers(0, 3))
def test_a_transform_is_a_pure_function_of_example_split_row_and_seed(
    steps: list[str], order: list[int], seed: int
) -> None:
    raw = derived("?" + "&".join(steps) if steps else "")

    def outcome(row: int) -> tuple[int, bytes] | None:
        example: Example | None = Example(grey(row), f"{row}.png", row % 10)
        for transform in raw.transforms:
            example = example and transform.apply(example, Place("train", row, seed))
        if example is None:
            return None
        decoded = image_decoding(9).decode(example, "here")
        assert decoded.digest == image_decoding(9).decode(Example(grey(row), "", 0), "here").digest  # of the source
        return example.label, decoded.arrays["images"].tobytes()

    first = [outcome(row) for row in range(40)]
    again = {row: outcome(row) for row in order}
    assert first == [again[row] for row in range(40)]
    names = raw.derived_names or ()
    assert all(span is None or 0 <= span[0] < len(names) for span in first)


def test_rows_threads_and_other_examples_change_nothing(tmp_path: Path) -> None:
    query = "?rotate=30&shuffle_labels=3&fraction=.6"
    for name, workers in (("one", 1), ("two", 3)):
        prepared(tmp_path / name, query, workers=workers)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes(), file.name
    fewer = {"train": 200, "validation": 60, "test": 100}
    prepared(tmp_path / "fewer", query, fewer)
    whole, part = load_split(tmp_path / "one", "train"), load_split(tmp_path / "fewer", "train")
    assert np.array_equal(whole.images[: len(part)], part.images)
    assert np.array_equal(whole.labels[: len(part)], part.labels)


def test_no_transform_and_the_neutral_ones_agree(tmp_path: Path) -> None:
    plain = prepared(tmp_path / "plain", "")
    neutral = prepared(tmp_path / "neutral", "?rotate=0&classes=0-9&fraction=1")
    for split in COUNTS:
        assert plain["splits"][split]["arrays"] == neutral["splits"][split]["arrays"]
    assert neutral["transforms"] == ["rotate=0", "classes=0-9", "fraction=1"]
    assert neutral["source"] == "drawn:x?rotate=0&classes=0-9&fraction=1"


def test_classes_are_numbered_from_0_and_compose(tmp_path: Path) -> None:
    twice = prepared(tmp_path / "twice", "?classes=4-9&classes=1,3-5")  # of 4..9 those at 1, 3, 4, 5
    once = prepared(tmp_path / "once", "?classes=5,7-9")
    assert twice["class_names"] == once["class_names"] == ["5", "7", "8", "9"]
    assert twice["splits"]["train"]["arrays"] == once["splits"]["train"]["arrays"]
    assert once["splits"]["test"]["per_class"] == [10] * 4
    assert once["splits"]["test"]["left_out"] == 60
    assert np.array_equal(load_split(tmp_path / "once", "test").images[0], grey(2005))


def test_fraction_thins_training_alone_and_a_smaller_one_is_a_part(tmp_path: Path) -> None:
    sets = {}
    for share in (0.2, 0.5, 1):
        manifest = prepared(tmp_path / str(share), f"?fraction={share}")
        assert [manifest["splits"][split]["count"] for split in ("validation", "test")] == [60, 100]
        sets[share] = {image.tobytes() for image in load_split(tmp_path / str(share), "train").images}
        assert abs(len(sets[share]) - share * 400) <= 3 * np.sqrt(share * (1 - share) * 400)
    assert sets[0.2] < sets[0.5] < sets[1]


def test_shuffled_labels_say_nothing_about_the_picture_and_have_a_seed_of_their_own(tmp_path: Path) -> None:
    for name, labels_seed, seed in (("a", 7, 0), ("b", 7, 5), ("c", 8, 0)):
        prepared(tmp_path / name, f"?shuffle_labels={labels_seed}", seed=seed)
    labels = {name: load_split(tmp_path / name, "train").labels for name in "abc"}
    assert np.array_equal(labels["a"], labels["b"])
    assert not np.array_equal(labels["a"], labels["c"])
    agreeing = int((labels["a"] == np.arange(400) % 10).sum())
    assert abs(agreeing - 40) <= 3 * np.sqrt(400 * 0.1 * 0.9)
    assert np.bincount(labels["a"], minlength=10).min() >= 20


@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_colour_agrees_with_parity_as_often_as_asked(ratio: float, tmp_path: Path) -> None:
    manifest = prepared(tmp_path, f"?colour={ratio}", {"train": 800, "validation": 60, "test": 100})
    assert manifest["class_names"] == ["even number", "odd number"]
    train = load_split(tmp_path, "train")
    assert np.array_equal(train.labels, np.arange(800) % 2)
    assert not train.images[..., 2].any()
    red = train.images[..., 0].any(axis=(1, 2))
    assert np.array_equal(red, ~train.images[..., 1].any(axis=(1, 2)))
    for parity, share in ((1, ratio), (0, 1 - ratio)):
        reds = red[train.labels == parity]
        assert abs(reds.sum() - share * len(reds)) <= 3 * np.sqrt(share * (1 - share) * len(reds))
    brightness = np.asarray(grey(0).convert("L"))
    assert np.array_equal(train.images[0].max(axis=2), brightness)


def test_colour_reads_the_number_in_the_name_after_classes_were_renumbered(tmp_path: Path) -> None:
    prepared(tmp_path, "?classes=5-9&colour=1")
    assert np.array_equal(load_split(tmp_path, "test").labels[:5], [1, 0, 1, 0, 1])  # 5, 6, 7, 8, 9


def test_rotation_is_bilinear_counter_clockwise_and_keeps_the_size(tmp_path: Path) -> None:
    prepared(tmp_path / "45", "?rotate=45")
    prepared(tmp_path / "90", "?rotate=60&rotate=30&fraction=1")
    turned = load_split(tmp_path / "45", "test").images[3]
    assert np.array_equal(turned, np.asarray(grey(2003).rotate(45, Image.Resampling.BILINEAR)))
    composed = grey(2003).rotate(60, Image.Resampling.BILINEAR).rotate(30, Image.Resampling.BILINEAR)
    assert np.array_equal(load_split(tmp_path / "90", "test").images[3], np.asarray(composed))


@pytest.mark.parametrize("query", ["?classes=0-4", "?rotate=45", "?colour=.9", "?fraction=.5"])
def test_a_derived_task_has_the_splits_of_its_source(query: str, tmp_path: Path) -> None:
    """Carving comes first: what one derived task tests, another never trains on."""
    for name, asked in (("derived", query), ("source", "")):
        prepared(tmp_path / name, asked, {"train": 400})
    for split in COUNTS:
        tables = (pq.read_table(tmp_path / name / f"{split}.parquet") for name in ("derived", "source"))
        derived_paths, paths = ({row["image"]["path"] for row in table.to_pylist()} for table in tables)
        assert derived_paths <= paths


@pytest.mark.parametrize(("value", "whole"), [("join", 460), ("drop", 400)])
def test_validation_is_carved_anew_with_or_without_the_sources_own(value: str, whole: int, tmp_path: Path) -> None:
    splits = prepared(tmp_path / "new", f"?validation={value}")["splits"]
    counts = {split: splits[split]["count"] for split in COUNTS}
    carved = 10 * (whole // 100)  # of each of ten classes
    assert counts == {"train": whole - carved, "validation": carved, "test": COUNTS["test"]}
    without = {split: count for split, count in COUNTS.items() if split != "validation"}
    assert prepared(tmp_path / "none", f"?validation={value}", without)["splits"]["train"]["count"] == 360
    manifest = prepared(tmp_path / "drop", "?validation=drop")
    assert manifest["ignored_splits"] == ["validation"]


def test_a_colour_hides_no_copy(tmp_path: Path) -> None:
    raw = digits()
    train = [Example(grey(2000 + row), f"copy{row}", row % 10) for row in range(40)]
    copied = replace(raw, splits={**raw.splits, "train": lambda: iter([*raw.splits["train"](), *train])})
    opened = open_source("x", "drawn:x?colour=.5", {"drawn": lambda *_: copied}, TRANSFORMS)
    splits = prepare_task(opened, tmp_path, image_decoding(9))["splits"]
    assert splits["train"]["duplicates_removed"] == {"test": 40}


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("?rotat=4", "unknown transform 'rotat': did you mean 'rotate'"),
        ("?rotate=", "found ''; expected an angle in degrees from -360 to 360"),
        ("?rotate=400", "found '400'; expected an angle"),
        ("?rotate=nan", "found 'nan'"),
        ("?classes=5-12", "found 5-12; the task has the labels 0 .'0'. to 9 .'9'."),
        ("?classes=7-3", "found 7-3;.* a range goes upwards"),
        ("?classes=a", "found 'a'; expected labels from 0 to 9, such as 0-4 or 0,9"),
        ("?classes=3", "one class only .'3'."),
        ("?colour=1.2", "found '1.2'; expected P.red . odd., a number from 0 to 1"),
        ("?fraction=0", "found '0'; expected a fraction above 0 and at most 1"),
        ("?shuffle_labels=-1", "found '-1'; expected a seed"),
        ("?conflicts=no", "found 'no'; expected 'keep'"),
        ("?validation=yes", "found 'yes'; expected 'join' or 'drop'"),
        ("?colour=.5&colour=.5", "found 'even number', 'odd number'; expected classes that name a number"),
        ("?rotat=4&fraction=2", "(?s)unknown transform 'rotat'.*found '2'"),
        ("?fraction=.0001", "none of the 400 examples of split 'train' is left by the transforms of drawn:x"),
    ],
)
def test_wrong_transforms_are_refused_with_the_nearest_or_the_range(query: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match=message) as caught:
        prepared(tmp_path, query)
    assert "task 'digits'" in str(caught.value)


@given(st.text("xyz/:?&=%3F@#.", min_size=1), st.lists(st.tuples(st.text("ab"), st.text("c=1,")), max_size=3))
def test_addresses_are_cut_and_put_together(place: str, transforms: list[tuple[str, str]]) -> None:
    place = place.replace("%3F", "")
    query = "&".join(f"{name}={value}" for name, value in transforms)
    text = f"kind:{place.replace('?', '%3F')}" + (f"?{query}" if transforms else "")
    address = parse_address(text)
    if place.startswith("//"):  # a URI: kinds are not protocols
        assert address.kind == ""
    else:
        assert (address.kind, address.place, list(address.transforms)) == ("kind", place, transforms)


def test_the_disk_need_not_hold_what_transforms_leave_out(tmp_path: Path) -> None:
    counts = {"train": 10**12}
    with pytest.raises(MergeflowError, match="no space left on the disk"):
        prepare_task(replace(digits(), counts=counts), tmp_path, image_decoding(9))
    thinned = replace(digits(), counts=counts, transforms=derived("?fraction=.5").transforms)
    assert prepare_task(thinned, tmp_path, image_decoding(9))["splits"]["test"]["count"] == 100
