"""The prepared form of any modality, guards against what cannot be measured, and the form of version 1."""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mergeflow.data import load_manifest, load_split
from mergeflow.data.decoding import Decoded, Decoding
from mergeflow.data.locations import decoded
from mergeflow.data.prepare import prepare_task
from mergeflow.data.task import Example, RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.images import encode_png
from mergeflow.modalities.vision.preparation import image_decoding, open_images

ROOT = Path(__file__).parents[2]


def points() -> Decoding:
    """Regression: x float64 [N, 3] and y float64 [N]; no classes."""

    def decode(example: Example, where: str) -> Decoded:
        x, y = example.edited(example.read())
        digest = hashlib.sha256(x.tobytes()).digest()
        return Decoded({"x": x, "y": np.float64(y)}, digest, {"x": x.tolist(), "path": example.path}, x.nbytes)

    def schema(names: Sequence[str] | None) -> pa.Schema:
        return pa.schema([("x", pa.list_(pa.float64())), ("path", pa.string())])

    return Decoding({"width": 3}, decode, schema, size=32)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), count=st.integers(30, 80))
def test_a_task_without_classes_keeps_every_bit(
    seed: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("points")
    x = np.random.default_rng(seed).standard_normal((count, 3))
    y = np.array([[1.0, np.pi, -0.0][row % 3] for row in range(count)])
    train = [Example((x[row], y[row]), f"{row}") for row in range(count)]
    raw = RawTask("points", None, None, {"train": lambda: iter(train)})
    manifest = prepare_task(raw, folder, points())
    assert (manifest["class_names"], manifest["templates"], manifest["decoding"]) == ([], [], {"width": 3})
    record = manifest["splits"]["train"]
    assert record["per_class"] == []
    assert {name: (array["dtype"], array["shape"]) for name, array in record["arrays"].items()} == {
        "x": ("float64", [3]),
        "y": ("float64", []),
    }
    examples: list[tuple[bytes, bytes]] = []
    for split in ("train", "validation", "test"):
        part = load_split(folder, split, verify=True)
        assert isinstance(part.x, np.memmap)
        assert part.x.flags.writeable  # a private map: torch shares no other
        with pytest.raises(AttributeError, match="no array 'images': it has x, y"):
            part.images  # noqa: B018
        examples += [(a.tobytes(), b.tobytes()) for a, b in zip(part.x, part.y, strict=True)]
        for name, array in part.arrays.items():
            sha256 = hashlib.sha256(array.tobytes()).hexdigest()
            assert manifest["splits"][split]["arrays"][name]["sha256"] == sha256
    assert sorted(examples) == sorted((a.tobytes(), b.tobytes()) for a, b in zip(x, y, strict=True))


def picture(seed: int) -> bytes:
    return encode_png(Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Thirty pictures in each of two classes."""
    for label, name in enumerate(("bottom", "top")):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for row in range(30):
            (tmp_path / "pets" / name / f"{row:02d}.png").write_bytes(picture(100 * label + row))
    return tmp_path / "pets"


def prepare(folder: Path, query: str = "") -> dict[str, Any]:
    return prepare_task(open_images("pets", f"folder:{folder}{query}"), folder.parent / "out", image_decoding(8))


def test_a_picture_under_two_labels_is_refused_with_both_paths(folder: Path) -> None:
    shutil.copy(folder / "top/07.png", folder / "bottom/copy.png")
    with pytest.raises(MergeflowError) as caught:
        prepare(folder)
    for part in ("'bottom/copy.png'", "'top/07.png'", "'bottom')", "'top')", "conflicts=keep"):
        assert part in str(caught.value)
    assert prepare(folder, "?conflicts=keep")["warnings"] == [
        "examples that have the content of another under a different label: 1; all are kept."
    ]


def test_many_conflicts_are_told_at_once_up_to_fifty(folder: Path) -> None:
    for row in range(30, 60):
        (folder / "top" / f"{row}.png").write_bytes(picture(100 + row))
    for path in (folder / "top").iterdir():
        shutil.copy(path, folder / "bottom" / f"copy{path.name}")
    with pytest.raises(MergeflowError, match="60 examples of task 'pets' have the content of another") as caught:
        prepare(folder)
    lines = str(caught.value).splitlines()
    assert sum("has the content of" in line for line in lines) == 50
    assert "  and 10 more" in lines


def test_undecodable_pictures_are_all_told_at_once_up_to_fifty_with_the_number_of_the_rest(folder: Path) -> None:
    bad = [folder / name / f"{row:02d}.png" for name in ("bottom", "top") for row in range(28)]
    for path in bad:
        path.write_bytes(b"not a picture")
    with pytest.raises(MergeflowError, match="56 examples of task 'pets' cannot be used:") as caught:
        prepare(folder)
    lines = str(caught.value).splitlines()
    names = {f"'{path.parent.name}/{path.name}'" for path in bad}
    assert sum(any(name in line for line in lines) for name in names) == 50
    assert lines[-1] == "  and 6 more"
    assert not (folder.parent / "out/manifest.json").exists()


def test_a_class_that_test_lacks_is_refused_with_the_way_out(folder: Path) -> None:
    (folder / "rare").mkdir()
    (folder / "rare/one.png").write_bytes(picture(900))
    with pytest.raises(MergeflowError, match=r"1 of 3 classes have no test example.*'rare'.*classes=0,2\)"):
        prepare(folder)
    assert prepare(folder, "?classes=0,2")["class_names"] == ["bottom", "top"]


def test_a_class_that_validation_lacks_is_a_warning(folder: Path) -> None:
    (folder / "rare").mkdir()
    for row in range(2):
        (folder / f"rare/{row}.png").write_bytes(picture(900 + row))
    manifest = prepare(folder)
    assert manifest["splits"]["validation"]["per_class"][1] == 0
    assert len(manifest["warnings"]) == 1
    assert "1 of 3 classes have no validation example: 'rare'" in manifest["warnings"][0]
    assert load_manifest(folder.parent / "out")["warnings"] == manifest["warnings"]


def test_left_out_examples_are_not_read(tmp_path: Path) -> None:
    read: list[int] = []

    def train() -> Iterator[Example]:
        for row in range(60):
            yield Example(lambda row=row: read.append(row) or picture(row), f"{row}", row % 3)  # type: ignore[misc,func-returns-value]

    raw = RawTask("three", ["a", "b", "c"], None, {"train": train})
    transforms = open_images("x", "suite:pocket-digits?classes=0-1").transforms
    prepare_task(replace(raw, transforms=transforms), tmp_path, image_decoding(8))
    assert {row % 3 for row in read} == {0, 1}


def test_the_mark_of_an_editor_is_no_part_of_the_text() -> None:
    assert decoded("\ufeffein Bär".encode(), "a.txt") == "ein Bär"


@pytest.mark.parametrize(
    ("content", "fault"),
    [("cats".encode("utf-16"), "it begins as UTF-16 does"), ("caf\u00e9".encode("latin-1"), "byte 3 is 0xe9")],
)
def test_another_encoding_is_refused_by_name(content: bytes, fault: str) -> None:
    with pytest.raises(MergeflowError, match=f"a.txt is not a text in UTF-8: {fault}. Convert it to UTF-8."):
        decoded(content, "a.txt")
