"""Parquet snapshots and image folders: what is read, what is refused, and what docs/data.md says."""

import io
import json
import os
import shutil
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from mergeflow.data import load_split
from mergeflow.data.prepare import prepare_task
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.preparation import SOURCES, image_decoding, open_images
from mergeflow.modalities.vision.sources.files import image_schema
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS


def encoded(seed: int, kind: str = "PNG", size: int = 12) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size + 3, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def write_shard(path: Path, seeds: Sequence[int], names: Sequence[str] = ("cat", "dog"), **options: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": encoded(seed), "path": f"{seed}.png"} for seed in seeds]
    table = pa.table({"image": images, "label": [seed % len(names) for seed in seeds]}, schema=image_schema(names))
    pq.write_table(table, path, **options)


def write_folder(root: Path, classes: Sequence[str] = ("cat", "dog"), images: int = 20, first: int = 0) -> Path:
    for index, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for row in range(images):
            (root / name / f"{row:03d}.png").write_bytes(encoded(first + 1000 * index + row))
    return root


def test_a_class_is_one_however_its_name_is_composed(tmp_path: Path) -> None:
    """A file system of Apple's composes letters otherwise than the others do."""
    for split, form in (("train", "NFC"), ("test", "NFD")):
        write_folder(tmp_path / split, first=100 * len(split))
        (tmp_path / split / "cat").rename(tmp_path / split / unicodedata.normalize(form, "Kätzchen"))
    raw = open_images("pets", f"folder:{tmp_path}")
    assert raw.class_names == ["Kätzchen", "dog"]
    assert {example.label for example in raw.splits["test"]()} == {0, 1}


@pytest.mark.parametrize("splits", [("",), ("train", "validation", "test")])
def test_a_file_name_that_is_not_utf_8_is_told_in_escapes(splits: Sequence[str], tmp_path: Path) -> None:
    """Carved from one folder it was a traceback of a digest, and in splits one of Parquet."""
    for number, split in enumerate(splits):
        write_folder(tmp_path / "in" / split, first=100 * number)
    os.rename(
        tmp_path / "in" / splits[0] / "cat/003.png", os.fsencode(tmp_path / "in" / splits[0] / "cat") + b"/caf\xe9.png"
    )
    with pytest.raises(MergeflowError, match=r"the file name '.*caf\\udce9.png' is not UTF-8. Rename the file."):
        prepare_task(open_images("pets", f"folder:{tmp_path / 'in'}"), tmp_path / "out", image_decoding(8))


SNAPSHOTS = {
    "files": ("train", "val", "test"),
    "shards": ("data/train-00000-of-00002", "data/validation-00000-of-00001", "data/test-00000-of-00001"),
    "folders": ("train/0000", "validation/0000", "test/0000"),
}


@pytest.mark.parametrize("layout", SNAPSHOTS)
def test_snapshots_of_every_layout_are_read(layout: str, tmp_path: Path) -> None:
    for name, seeds in zip(SNAPSHOTS[layout], (range(10), range(10, 14), range(20, 26)), strict=True):
        write_shard(tmp_path / f"{name}.parquet", seeds)
    if layout == "shards":
        write_shard(tmp_path / "data/train-00001-of-00002.parquet", range(30, 32))
    (tmp_path / "README.md").write_text("card")
    raw = open_images("pets", f"parquet:{tmp_path}")
    expected = 12 if layout == "shards" else 10
    assert list(raw.class_names) == ["cat", "dog"]
    assert raw.counts == {"train": expected, "validation": 4, "test": 6}
    manifest = prepare_task(raw, tmp_path / "out", image_decoding(8))
    assert manifest["splits"]["train"]["count"] == expected
    assert manifest["splits"]["test"]["carved_from"] is None


def test_sets_of_shards_are_whole_each_by_its_own_name(tmp_path: Path) -> None:
    for name in ("train-en-00000-of-00002", "train-de-00001-of-00002"):
        write_shard(tmp_path / f"{name}.parquet", range(10))
    with pytest.raises(MergeflowError, match=r"split 'train', train-(de|en)-\*, has 1 of 2 shards; missing: \[[01]\]"):
        open_images("pets", f"parquet:{tmp_path}")
    for name in ("train-en-00001-of-00002", "train-de-00000-of-00002", "train-fr-00000-of-00001"):
        write_shard(tmp_path / f"{name}.parquet", range(10))
    assert open_images("pets", f"parquet:{tmp_path}").counts["train"] == 50


def test_endings_in_capitals_count_and_a_split_of_another_ending_is_told(tmp_path: Path) -> None:
    write_shard(tmp_path / "train.PARQUET", range(10))
    assert open_images("pets", f"parquet:{tmp_path}").counts["train"] == 10
    (tmp_path / "train.csv").write_text("the same once more")
    assert open_images("pets", f"parquet:{tmp_path}").counts["train"] == 10
    (tmp_path / "test.parquet.gz").write_bytes(b"")
    with pytest.raises(MergeflowError, match=r"holds 'test.parquet.gz'; expected shards"):
        open_images("pets", f"parquet:{tmp_path}")


def test_a_folder_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "in", first=0)
    listed = LocalFileSystem.ls

    def ls(self: LocalFileSystem, path: str, *args: Any, **options: Any) -> Any:  # root may read every folder
        if str(path).endswith("/cat"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(self, path, *args, **options)

    monkeypatch.setattr(LocalFileSystem, "ls", ls)
    with pytest.raises(MergeflowError, match=r"in/cat' cannot be read \(Permission denied\)"):
        open_images("pets", f"folder:{tmp_path / 'in'}")


def test_one_file_is_a_training_split_and_its_bytes_are_kept(tmp_path: Path) -> None:
    write_shard(tmp_path / "all.parquet", range(60))
    raw = open_images("pets", f"parquet:{tmp_path / 'all.parquet'}")
    splits = prepare_task(raw, tmp_path / "out", image_decoding(8))["splits"]
    assert [splits[s]["count"] for s in ("train", "validation", "test")] == [48, 6, 6]
    tables = [pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist() for split in splits]
    images = [row["image"]["bytes"] for table in tables for row in table]
    assert sorted(images) == sorted(encoded(seed) for seed in range(60))


def test_a_snapshot_is_read_through_a_uri(tmp_path: Path) -> None:
    write_shard(tmp_path / "train.parquet", range(20))
    memory = fsspec.filesystem("memory")
    memory.pipe("/pets/data/train-00000-of-00001.parquet", (tmp_path / "train.parquet").read_bytes())
    try:
        manifest = prepare_task(open_images("pets", "parquet:memory://pets"), tmp_path / "out", image_decoding(8))
    finally:
        memory.rm("/pets", recursive=True)
    assert sum(record["count"] for record in manifest["splits"].values()) == 20


def test_columns_are_chosen_behind_the_source(tmp_path: Path) -> None:
    write_shard(tmp_path / "train.parquet", range(20))
    table = pq.read_table(tmp_path / "train.parquet").append_column("id", pa.array(range(20)))
    pq.write_table(table, tmp_path / "train.parquet")
    assert open_images("pets", f"parquet:{tmp_path}").counts == {"train": 20}  # the declared columns win
    table = table.drop_columns(["id"]).rename_columns(["img", "fine"])
    features = {"img": {"_type": "Image"}} | {
        name: {"_type": "ClassLabel", "names": [f"{name} {k}" for k in range(20)]} for name in ("fine", "coarse")
    }
    table = table.append_column("coarse", pa.array([0, 1] * 10))
    metadata = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "train.parquet")
    with pytest.raises(MergeflowError, match=r"no single integer label column.*`\?image=NAME&label=NAME`"):
        open_images("pets", f"parquet:{tmp_path}")
    raw = open_images("pets", f"parquet:{tmp_path}?label=coarse&image=img")
    assert raw.strata[:2] == ["coarse 0", "coarse 1"]
    assert [example.label for example in raw.splits["train"]()][:3] == [0, 1, 0]
    with pytest.raises(MergeflowError, match="unknown column 'corase': did you mean 'coarse'"):
        open_images("pets", f"parquet:{tmp_path}?label=corase")


def test_a_snapshot_takes_transforms(tmp_path: Path) -> None:
    write_shard(tmp_path / "train.parquet", range(90), names=("cat", "dog", "emu"))
    raw = open_images("pets", f"parquet:{tmp_path}?classes=0,2&rotate=90")
    manifest = prepare_task(raw, tmp_path / "out", image_decoding(8))
    assert manifest["class_names"] == ["cat", "emu"]
    assert manifest["source"] == f"parquet:{tmp_path}?classes=0,2&rotate=90"
    stored = pq.read_table(tmp_path / "out/test.parquet").to_pylist()[0]["image"]
    original = Image.open(io.BytesIO(encoded(int(stored["path"].removesuffix(".png")))))
    turned = original.rotate(90, Image.Resampling.BILINEAR)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(stored["bytes"]))), np.asarray(turned))


def bare(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata(None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bare, "no ClassLabel names for column 'label'. Columns found: image: struct<bytes: binary, path: string>"),
        (lambda t: bare(t.drop_columns(["label"])), "no single integer label column"),
        (lambda t: bare(t.drop_columns(["image"])), r"no single image column. Columns found: label: int64. Expected:"),
        (lambda t: t.drop_columns(["image"]), "no single image column"),
        (lambda t: t.set_column(1, "label", t["label"].cast(pa.string())), "no single integer label column"),
        (lambda t: t.replace_schema_metadata({"huggingface": "{"}), "under 'huggingface' is not readable"),
    ],
)
def test_a_wrong_schema_prints_found_and_expected(change: object, message: str, tmp_path: Path) -> None:
    write_shard(tmp_path / "train.parquet", range(4))
    pq.write_table(change(pq.read_table(tmp_path / "train.parquet")), tmp_path / "train.parquet")  # type: ignore[operator]
    with pytest.raises(MergeflowError, match=message) as caught:
        open_images("pets", f"parquet:{tmp_path}")
    assert "train.parquet" in str(caught.value)
    assert "Expected: one image column of type struct<bytes: binary, path: string>" in str(caught.value)


def test_a_damaged_parquet_file_is_an_error_not_a_smaller_task(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    for length in (0, 3, 200, -20):
        write_shard(path, range(4))
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(MergeflowError, match=r"train\.parquet: not a readable Parquet file"):
            open_images("pets", f"parquet:{tmp_path}")
    write_shard(path, range(200), compression="zstd")
    whole = bytearray(path.read_bytes())
    whole[20_000:60_000] = bytes(40_000)
    path.write_bytes(whole)
    with pytest.raises(MergeflowError, match=r"train.*(not a readable Parquet file|cannot be decoded)"):
        prepare_task(open_images("pets", f"parquet:{tmp_path}"), tmp_path / "out", image_decoding(8))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train-00000-of-00003.parquet", "train-00002-of-00003.parquet"), r"2 of 3 shards; missing: \[1\]"),
        (("train.parquet", "extra.parquet"), "'extra.parquet'; expected shards of train"),
        (("test.parquet",), "holds test; expected shards of train"),
        (("notes.txt",), "holds no Parquet file, but 'notes.txt'; expected"),
        (("a/b/train.parquet",), "'a/b/train.parquet'; expected shards"),
    ],
)
def test_unsupported_snapshots_are_refused(names: Sequence[str], message: str, tmp_path: Path) -> None:
    for name in names:
        write_shard(tmp_path / name, range(4))
    with pytest.raises(MergeflowError, match=message):
        open_images("pets", f"parquet:{tmp_path}")


def test_shards_must_agree_about_class_names(tmp_path: Path) -> None:
    write_shard(tmp_path / "train.parquet", range(4))
    write_shard(tmp_path / "test.parquet", range(4), names=("dog", "cat"))
    with pytest.raises(MergeflowError, match=r"test\.parquet: columns and class names .* those of .*train\.parquet"):
        open_images("pets", f"parquet:{tmp_path}")


@pytest.mark.parametrize(("column", "fault"), [("image", "no image bytes"), ("label", "no label")])
def test_a_row_without_image_or_label_is_named(column: str, fault: str, tmp_path: Path) -> None:
    rows = [{"image": {"bytes": encoded(i), "path": None}, "label": i % 2} for i in range(4)]
    rows[2][column] = {"bytes": None, "path": "elsewhere.png"} if column == "image" else None
    for split in ("train", "validation", "test"):
        pq.write_table(pa.Table.from_pylist(rows, schema=image_schema(["a", "b"])), tmp_path / f"{split}.parquet")
    with pytest.raises(MergeflowError, match=rf"test\.parquet, row 2: {fault}"):
        prepare_task(open_images("pets", f"parquet:{tmp_path}"), tmp_path / "out", image_decoding(8))


def test_a_folder_per_class_is_split_the_same_way_every_time(tmp_path: Path) -> None:
    write_folder(tmp_path / "pets")
    prepare_task(open_images("pets", f"folder:{tmp_path / 'pets'}"), tmp_path / "one", image_decoding(8))
    shutil.move(tmp_path / "pets", tmp_path / "moved")
    raw = open_images("pets", f"folder:{tmp_path / 'moved'}")
    manifest = prepare_task(raw, tmp_path / "two", image_decoding(8))
    assert manifest["class_names"] == ["cat", "dog"]
    assert [manifest["splits"][s]["per_class"] for s in ("train", "validation", "test")] == [[16, 16], [2, 2], [2, 2]]
    for path in (tmp_path / "one").glob("*.parquet"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize("validation", ["val", "valid", "validation", None])
def test_split_folders_are_used(validation: str | None, tmp_path: Path) -> None:
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "test", images=3, first=500)
    if validation:
        write_folder(tmp_path / validation, classes=("cat",), images=4, first=700)
    (tmp_path / "LICENSE").write_text("free")
    (tmp_path / "train" / ".DS_Store").write_text("hidden")
    out = tmp_path.parent / f"{tmp_path.name}-out"
    splits = prepare_task(open_images("pets", f"folder:{tmp_path}"), out, image_decoding(8))["splits"]
    assert splits["test"]["per_class"] == [3, 3]
    assert splits["validation"]["per_class"] == ([4, 0] if validation else [2, 2])
    assert splits["train"]["per_class"] == ([20, 20] if validation else [18, 18])


def test_jpegs_are_kept_as_they_are_and_resized_as_clip_does(tmp_path: Path) -> None:
    from torchvision.transforms import CenterCrop, InterpolationMode, Resize

    for first, split in enumerate(("train", "val", "test")):
        for row, size in enumerate((20, 37)):
            (tmp_path / split / str(row)).mkdir(parents=True)
            (tmp_path / split / str(row) / f"{row}.JPG").write_bytes(encoded(10 * first + row, "JPEG", size))
    out = tmp_path.parent / f"{tmp_path.name}-out"
    prepare_task(open_images("jpeg", f"folder:{tmp_path}"), out, image_decoding(16))
    rows = pq.read_table(out / "train.parquet").to_pylist()
    images = load_split(out, "train").images
    for row, image in zip(rows, images, strict=True):
        assert row["image"]["bytes"] == (tmp_path / row["image"]["path"]).read_bytes()
        original = Image.open(io.BytesIO(row["image"]["bytes"]))
        clip = CenterCrop(16)(Resize(16, InterpolationMode.BICUBIC)(original))
        assert np.array_equal(image, np.asarray(clip))


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (("train/cat/1.png", "holdout/cat/1.png"), "unsupported split folder 'holdout' next to train"),
        (("train/cat/1.png", "val/cat/1.png", "valid/cat/1.png"), "unsupported split folder 'valid' next to"),
        (("test/cat/1.png",), r"has split folders \(test\) but no train"),
        (("train/cat/1.png", "test/dog/1.png"), "class folders in test that train lacks: dog"),
        (("cat/1.png", "cat/notes.txt"), r"cat/notes\.txt: expected an image \("),
        (("cat/1.png", "stray.png"), r"stray\.png: expected a class folder around it"),
        (("readme.txt",), "no class folders found"),
    ],
)
def test_unsupported_folders_are_refused(paths: Sequence[str], message: str, tmp_path: Path) -> None:
    for path in paths:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(encoded(1))
    with pytest.raises(MergeflowError, match=message):
        open_images("pets", f"folder:{tmp_path}")


def test_links_to_files_and_folders_are_read_like_what_they_lead_to(tmp_path: Path) -> None:
    real, linked = write_folder(tmp_path / "real"), tmp_path / "linked"
    (linked / "cat").mkdir(parents=True)
    for image in (real / "cat").iterdir():
        (linked / "cat" / image.name).symlink_to(image)
    (linked / "dog").symlink_to(real / "dog", target_is_directory=True)
    whole, again = (
        prepare_task(open_images("pets", f"folder:{root}"), tmp_path / f"out-{root.name}", image_decoding(32))
        for root in (real, linked)
    )
    assert again["splits"] == whole["splits"]

    write_shard(tmp_path / "blobs/5eed.parquet", range(20))
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets/train.parquet").symlink_to(tmp_path / "blobs/5eed.parquet")
    assert open_images("pets", f"parquet:{tmp_path / 'pets'}").counts["train"] == 20


@pytest.mark.parametrize(
    ("target", "fault"),
    [("../unmounted", r"is a link to .*unmounted, which is not there"), (".", "is a link to a folder that holds it")],
)
def test_a_link_that_cannot_be_followed_is_an_error(tmp_path: Path, target: str, fault: str) -> None:
    root = write_folder(tmp_path / "pets")
    (root / "cat/lost.png").symlink_to(root / target)
    with pytest.raises(MergeflowError, match=f"cat/lost.png {fault}"):
        open_images("pets", f"folder:{root}")


@pytest.mark.parametrize("names", [("owl", "owl "), ("caf\u00e9", "cafe\u0301")], ids=["blank", "accent"])
def test_class_names_that_look_alike_are_refused(names: Sequence[str], tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match="class names found more than once"):
        open_images("pets", f"folder:{write_folder(tmp_path / 'pets', names)}")


def test_what_file_managers_leave_is_no_example(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "pets")
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "._000.png"):
        (folder / "cat" / name).write_bytes(b"x")
    assert len(list(open_images("pets", f"folder:{folder}").splits["train"]())) == 40


def test_an_empty_class_folder_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path / "pets")
    (tmp_path / "pets" / "emu").mkdir()
    with pytest.raises(MergeflowError, match=r"1 of 3 classes have no training example in folder:.*'emu'"):
        prepare_task(open_images("pets", f"folder:{tmp_path / 'pets'}"), tmp_path / "out", image_decoding(8))
    (tmp_path / "pets" / "emu").rmdir()
    (tmp_path / "pets" / "dog" / "003.png").write_bytes(b"not a picture")
    with pytest.raises(MergeflowError, match=r"row 23: image 'dog/003\.png' cannot be decoded"):
        prepare_task(open_images("pets", f"folder:{tmp_path / 'pets'}"), tmp_path / "out", image_decoding(8))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("foldr:x", "unknown kind of data source 'foldr': did you mean 'folder'"),
        ("folder", "has no address; expected 'folder:ADDRESS'"),
        ("folder:", "has no address"),
        ("folder:/nowhere/at/all", "'/nowhere/at/all': no such file or folder"),
        ("parquet:nowhere", "'nowhere': no such file or folder"),
        ("parquet:nosuchprotocol://bucket/x", "nosuchprotocol"),
        ("folder:gs://bucket/x", "gs.*Install the package"),
        ("suite:pocket9", "unknown suite 'pocket9': did you mean 'pocket8'"),
        ("suite:pocket8", "task 'pets': suite pocket8 has 8 tasks and not this one; it is in pocket14"),
        ("suite:pocket14/kana", r"suite pocket14 has 14 tasks and not this one.*write suite:pocket20"),
        ("suite:pocket8/digit", "unknown task of suite pocket8 'digit': did you mean 'digits'"),
    ],
)
def test_bad_addresses_are_one_clear_error(source: str, message: str) -> None:
    with pytest.raises(MergeflowError, match=message):
        open_images("pets", source)


def test_names_and_templates_can_be_replaced(tmp_path: Path) -> None:
    write_folder(tmp_path, images=2)
    raw = open_images("pets", f"folder:{tmp_path}", class_names=["tabby", "hound"], templates=["my {}"])
    assert (raw.class_names, raw.templates) == (("tabby", "hound"), ("my {}",))
    with pytest.raises(MergeflowError, match=r"1 class names given, but folder:.* has 2 classes"):
        open_images("pets", f"folder:{tmp_path}", class_names=["tabby"])


def test_a_suite_task_is_prepared(tmp_path: Path) -> None:
    raw = open_images("digits", "suite:pocket8")
    splits = prepare_task(raw, tmp_path, image_decoding(32))["splits"]
    assert {split: record["count"] for split, record in splits.items()} == dict(raw.counts)
    assert not any(record["duplicates_removed"] for record in splits.values())


def test_relative_paths_start_from_the_root_and_stay_relative_in_the_manifest(tmp_path: Path) -> None:
    write_folder(tmp_path / "raw" / "pets")
    manifest = prepare_task(open_images("pets", "folder:raw/pets", root=tmp_path), tmp_path / "out", image_decoding(8))
    assert manifest["source"] == "folder:raw/pets"
    assert str(tmp_path) not in (tmp_path / "out" / "manifest.json").read_text()


DOCS = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_every_source_and_real_task_is_documented() -> None:
    assert all(f"| `{kind}:" in DOCS for kind in SOURCES)
    assert all(task.hub_id in DOCS and task.name in DOCS for task in REAL_TASKS.values())


def test_every_field_of_the_manifest_is_documented(tmp_path: Path) -> None:
    for row in range(20):
        (tmp_path / "pets" / f"{row % 2}").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), row, np.uint8)).save(tmp_path / "pets" / f"{row % 2}" / f"{row}.png")
    manifest = prepare_task(open_images("pets", f"folder:{tmp_path / 'pets'}"), tmp_path / "out", image_decoding(4))
    assert all(f"`{name}`" in DOCS for name in (*manifest, *manifest["splits"]["train"]))


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for row in range(10):
            pixels = np.full((40, 50, 3), 20 * row + label, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{row}.png")
    names: dict[str, object] = {}
    exec(DOCS.split("```python\n")[1].split("```")[0], names)
    assert names["train"].images.shape == (16, 32, 32, 3)  # type: ignore[attr-defined]
