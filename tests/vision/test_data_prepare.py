"""Preparation: standard splits, no leaks, determinism, errors for people."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from mergeflow.data import load_manifest, load_split
from mergeflow.data.prepare import prepare_task
from mergeflow.data.task import Example, RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.images import encode_png
from mergeflow.modalities.vision.preparation import image_decoding, open_images

TEMPLATES = ("a photo of a {}.",)


def picture(seed: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def drawn_task(images: int = 40, classes: int = 4, seeds: dict[str, range] | None = None, **fields: object) -> RawTask:
    """A task of drawn pictures: equal seeds are equal pictures, with the label seed % classes."""
    seeds = seeds or {"train": range(images)}

    def draw(split: str) -> Iterator[Example]:
        for row, seed in enumerate(seeds[split]):
            yield Example(picture(seed), f"{split}/{row:05d}.png", seed % classes)

    splits = {split: (lambda split=split: draw(split)) for split in seeds}
    return RawTask("drawn", [f"class {c}" for c in range(classes)], TEMPLATES, splits, **fields)  # type: ignore[arg-type]


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_it_writes_and_reads_back_every_pixel(tmp_path: Path) -> None:
    raw = drawn_task(seeds={"train": range(12), "validation": range(100, 104), "test": range(200, 208)})
    manifest = prepare_task(raw, tmp_path, image_decoding(8))
    assert manifest == load_manifest(tmp_path)
    counts = {split: record["count"] for split, record in manifest["splits"].items()}
    assert counts == {"train": 12, "validation": 4, "test": 8}
    split = load_split(tmp_path, "test", verify=True)
    assert split.images.dtype == np.uint8
    assert split.labels.tolist() == [0, 1, 2, 3] * 2
    assert all(np.array_equal(split.images[i], np.asarray(picture(200 + i))) for i in range(8))
    assert (split.class_names[1], split.templates) == ("class 1", list(TEMPLATES))


def test_two_preparations_are_byte_identical_whatever_the_threads(tmp_path: Path) -> None:
    for name, workers in (("one", 1), ("two", 3)):
        prepare_task(drawn_task(100), tmp_path / name, image_decoding(6), workers=workers)
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "two")


def test_missing_splits_are_carved_stratified_and_disjoint(tmp_path: Path) -> None:
    manifest = prepare_task(drawn_task(400), tmp_path, image_decoding(4))
    splits = manifest["splits"]
    assert [splits[s]["per_class"] for s in ("train", "validation", "test")] == [[80] * 4, [10] * 4, [10] * 4]
    assert [splits[s]["carved_from"] for s in ("train", "validation", "test")] == [None, "train", "train"]
    parts = [{image.tobytes() for image in load_split(tmp_path, s).images} for s in splits]
    assert len(set.union(*parts)) == 400


def test_the_seed_chooses_and_a_source_with_splits_ignores_it(tmp_path: Path) -> None:
    carved = [prepare_task(drawn_task(80), tmp_path / str(s), image_decoding(4), seed=s)["splits"] for s in (1, 2)]
    assert carved[0]["test"]["content_sha256"] != carved[1]["test"]["content_sha256"]
    whole = drawn_task(seeds={"train": range(8), "validation": range(8, 12), "test": range(12, 16)})
    digests = [prepare_task(whole, tmp_path / f"w{s}", image_decoding(4), seed=s)["splits"] for s in (1, 2)]
    assert digests[0] == digests[1]


def test_carving_keeps_an_image_on_its_side_when_others_join(tmp_path: Path) -> None:
    for count in (200, 240):
        prepare_task(drawn_task(count), tmp_path / str(count), image_decoding(8))
    few, many = load_split(tmp_path / "200", "test"), load_split(tmp_path / "240", "train")
    moved = {image.tobytes() for image in few.images} & {image.tobytes() for image in many.images}
    assert len(moved) <= len(few) // 2  # a reshuffle would move about nine in ten


def test_a_picture_is_never_in_two_splits_and_removals_are_counted(tmp_path: Path) -> None:
    seeds = {"train": range(40), "validation": range(30, 50), "test": range(45, 65)}
    splits = prepare_task(drawn_task(seeds=seeds), tmp_path, image_decoding(8))["splits"]
    assert splits["test"] | {"count": 20, "duplicates_removed": {}} == splits["test"]
    assert splits["validation"] | {"count": 15, "duplicates_removed": {"test": 5}} == splits["validation"]
    assert splits["train"] | {"count": 30, "duplicates_removed": {"validation": 10}} == splits["train"]
    parts = {s: {image.tobytes() for image in load_split(tmp_path, s).images} for s in splits}
    assert not parts["train"] & parts["validation"]
    assert not parts["train"] & parts["test"]
    assert not parts["validation"] & parts["test"]


def test_duplicates_within_train_do_not_leak_through_carving(tmp_path: Path) -> None:
    doubled = drawn_task(seeds={"train": [*range(200), *range(200)]})  # type: ignore[dict-item]
    splits = prepare_task(doubled, tmp_path, image_decoding(8))["splits"]
    parts = {s: {image.tobytes() for image in load_split(tmp_path, s).images} for s in splits}
    assert len(set.union(*parts.values())) == sum(len(part) for part in parts.values())
    assert splits["train"]["repeats_within"] == splits["train"]["count"] - len(parts["train"]) > 0
    assert sum(splits["train"]["duplicates_removed"].values()) > 0


def test_the_same_picture_in_another_file_format_is_a_duplicate(tmp_path: Path) -> None:
    png = Example(encode_png(picture(1)), "a.png", 0)
    train = [png, Example(picture(2), "b", 0), Example(picture(4), "e", 1)]
    test = [Example(picture(1), "d", 0), Example(picture(5), "f", 1)]
    splits = {"train": train, "validation": [Example(picture(3), "c", 0)], "test": test}
    raw = RawTask("formats", ["one", "two"], TEMPLATES, {split: partial(iter, rows) for split, rows in splits.items()})
    assert prepare_task(raw, tmp_path, image_decoding(4))["splits"]["train"]["duplicates_removed"] == {"test": 1}


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pixels=hnp.arrays(np.uint8, st.tuples(st.integers(3, 6), st.integers(1, 5), st.integers(1, 5), st.just(3))),
    labels=st.lists(st.integers(0, 2), min_size=6, max_size=6),
)
def test_any_images_and_labels_survive_parquet(
    pixels: np.ndarray, labels: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("any")
    rows = [(Image.fromarray(p), label) for p, label in zip(pixels, labels, strict=False)]

    def train() -> Iterator[Example]:
        yield from (Example(picture(900 + c, (7, 7)), f"extra{c}", c) for c in range(3))
        yield from (Example(image, f"{row}.png", label) for row, (image, label) in enumerate(rows))

    test = [Example(picture(2 + c, (7, 7)), f"t{c}", c) for c in range(3)]
    others = {"validation": partial(iter, [Example(picture(1, (7, 7)), "v", 0)]), "test": partial(iter, test)}
    names = ["naïve", "数字", 'quote"d']
    raw = RawTask("any", names, TEMPLATES, {"train": train, **others}, keeps_conflicts=True)
    prepare_task(raw, folder, image_decoding(3))
    again = open_images("any", f"parquet:{folder}?conflicts=keep")
    assert list(again.class_names) == list(raw.class_names)
    read = list(again.splits["train"]())
    assert [example.label for example in read] == [0, 1, 2, *(label for _, label in rows)]
    assert [example.path for example in read[3:]] == [f"{row}.png" for row in range(len(rows))]
    prepare_task(again, folder / "again", image_decoding(3))
    for split in ("train", "test"):
        first, second = load_split(folder, split), load_split(folder / "again", split)
        assert np.array_equal(first.images, second.images)
        assert (folder / f"{split}.parquet").read_bytes() == (folder / "again" / f"{split}.parquet").read_bytes()


def test_progress_counts_every_image(tmp_path: Path) -> None:
    calls: list[tuple[str, int, int | None]] = []
    prepare_task(drawn_task(400), tmp_path, image_decoding(4), progress=lambda *call: calls.append(call))
    last = {split: (done, total) for split, done, total in calls}
    assert last == {"test": (40, 40), "validation": (40, 40), "train": (320, 320)}


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        ({"train": range(0)}, "split 'train' of the source is empty"),
        ({"train": range(4)}, "the source has no split 'test', and too few examples to take one from train"),
        ({"train": range(8), "validation": range(0), "test": range(9, 12)}, "split 'validation' of the source is"),
        ({"train": range(2), "validation": range(5, 7), "test": range(9, 12)}, "2 of 4 classes have no training ex"),
        ({"train": range(8), "validation": range(20, 24), "test": range(8)}, "all 8 examples of split 'train'"),
    ],
)
def test_empty_tasks_splits_and_classes_are_refused(seeds: dict[str, range], message: str, tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match=message):
        prepare_task(drawn_task(seeds=seeds), tmp_path, image_decoding(4))


@pytest.mark.parametrize("carved", [True, False])
@pytest.mark.parametrize("label", [-1, 2])
def test_a_label_outside_the_class_names_is_refused(label: int, carved: bool, tmp_path: Path) -> None:
    def draw() -> Iterator[Example]:
        yield Example(picture(1), "good.png", 0)
        yield Example(picture(2), "bad.png", label)

    splits = {"train": draw} if carved else {"train": draw, "validation": draw, "test": draw}
    with pytest.raises(MergeflowError, match=rf"row 1.*label {label} is outside the class names \(0 to 1, 'a' to"):
        prepare_task(RawTask("bad", ["a", "b"], TEMPLATES, splits), tmp_path, image_decoding(4))


@pytest.mark.parametrize("damaged", [b"", b"no image", encode_png(picture(1, (40, 40)))[:-200]])
def test_an_undecodable_image_is_named(damaged: bytes, tmp_path: Path) -> None:
    splits = {s: lambda: iter([Example(damaged, "x/7.png", 0)]) for s in ("train", "test", "validation")}
    raw = RawTask("bad", ["a", "b"], TEMPLATES, splits)
    where = r"task 'bad', split test, row 0: image 'x/7.png' cannot be decoded"
    with pytest.raises(MergeflowError, match=where) as caught:
        prepare_task(raw, tmp_path, image_decoding(4))
    assert " at 0x" not in str(caught.value)


@pytest.mark.parametrize("name", ["test.parquet", "test.images.npy", "test.labels.npy", "manifest.json"])
def test_a_full_disk_is_one_error_that_names_the_file(name: str, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("the system has no /dev/full")
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(MergeflowError, match=rf"{name}: no space left on the disk\. The task needs .*are free"):
        prepare_task(drawn_task(40), tmp_path, image_decoding(32))


def test_too_small_a_disk_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match=r"its arrays alone need \d+ MiB"):
        prepare_task(drawn_task(40), tmp_path, image_decoding(4_000_000))


def test_a_source_that_changes_between_passes_is_refused(tmp_path: Path) -> None:
    passes = iter([40, 39, 39, 39])
    draw = drawn_task(40).splits["train"]

    def shrinking() -> Iterator[Example]:
        yield from list(draw())[: next(passes)]

    raw = RawTask("s", ["a", "b", "c", "d"], TEMPLATES, {"train": shrinking})
    with pytest.raises(MergeflowError, match="listed 40 examples, then gave 39"):
        prepare_task(raw, tmp_path, image_decoding(4))


@pytest.mark.parametrize(
    ("names", "templates", "message"),
    [
        ([], TEMPLATES, "no class names found; expected at least two"),
        (["a"], TEMPLATES, r"task 't': one class only \('a'\) found; expected at least two"),
        (["a", "b", "a"], TEMPLATES, "more than once: 'a'"),
        (["a", " "], TEMPLATES, "class 1 has an empty name"),
        (["a", "b"], ["a photo of it"], "'a photo of it'; expected templates with exactly one"),
        (["a", "b"], [], "no template"),
    ],
)
def test_names_that_make_no_head_are_refused(names: list[str], templates: list[str], message: str) -> None:
    with pytest.raises(MergeflowError, match=message):
        RawTask("t", names, templates, {"train": lambda: iter(())})


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(MergeflowError, match="splits found: extra, train; expected train and"):
        RawTask("t", ["a", "b"], TEMPLATES, {"train": lambda: iter(()), "extra": lambda: iter(())})


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    prepare_task(drawn_task(40), tmp_path, image_decoding(8))
    return tmp_path


def test_load_split_names_what_is_wrong(prepared: Path) -> None:
    with pytest.raises(MergeflowError, match="unknown split 'trian': did you mean 'train'"):
        load_split(prepared, "trian")
    with pytest.raises(MergeflowError, match=r"nowhere/manifest\.json: no manifest"):
        load_split(prepared / "nowhere", "train")
    images, labels = prepared / "train.images.npy", prepared / "train.labels.npy"
    whole = images.read_bytes()
    images.write_bytes(whole[:-10])
    with pytest.raises(MergeflowError, match=r"train\.images\.npy: not a whole NumPy array \(\d+ bytes found"):
        load_split(prepared, "train")
    images.write_bytes(whole[:-10] + bytes(10))
    load_split(prepared, "train")
    with pytest.raises(MergeflowError, match="SHA-256 of the content is"):
        load_split(prepared, "train", verify=True)
    images.unlink()
    with pytest.raises(MergeflowError, match=r"train\.images\.npy is missing"):
        load_split(prepared, "train")
    images.write_bytes(whole)
    np.save(labels, np.full(32, 9))
    with pytest.raises(MergeflowError, match=r"train\.labels\.npy, row 0: label 9 is outside"):
        load_split(prepared, "train")
    np.save(labels, np.zeros(31, np.int64))
    with pytest.raises(MergeflowError, match=r"found int64 \[31\], but the manifest says int64 \[32\]"):
        load_split(prepared, "train")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"format_version": 99}', '{"format_version": 1}'])
def test_a_strange_manifest_is_refused(text: str, prepared: Path) -> None:
    text = text.replace('{"', '{"format": "mergeflow-task", "')
    (prepared / "manifest.json").write_text(text)
    with pytest.raises(MergeflowError, match=r"manifest\.json: (not valid JSON|found format)"):
        load_manifest(prepared)
