"""Hugging Face's `datasets`: it reads what we write, we read what it writes, and what happens without it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mergeflow.data import load_split
from mergeflow.data.prepare import prepare_task
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.preparation import image_decoding, open_images
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS


def save(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (10, 10, 3), np.uint8)).save(path)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def image_folder(root: Path) -> Path:
    """Two classes; 10 training and 4 test pictures of each."""
    for split, rows in (("train", range(10)), ("test", range(10, 14))):
        for label, name in enumerate(("banded", "polka-dotted")):
            for row in rows:
                save(root / split / name / f"{row}.png", 100 * label + row)
    return root


def prepared(folder: Path) -> Path:
    raw = open_images("textures", f"folder:{image_folder(folder / 'raw')}")
    prepare_task(raw, folder / "textures", image_decoding(8))
    return folder / "textures"


def test_datasets_reads_our_parquet_with_class_labels(own_cache: Path) -> None:
    import datasets

    folder = prepared(own_cache)
    files = {split: str(folder / f"{split}.parquet") for split in ("train", "validation", "test")}
    loaded = datasets.load_dataset("parquet", data_files=files)
    assert loaded["train"].features["label"] == datasets.ClassLabel(names=["banded", "polka-dotted"])
    assert isinstance(loaded["train"].features["image"], datasets.Image)
    arrays = load_split(folder, "test")
    assert loaded["test"]["label"][:] == arrays.labels.tolist()
    assert loaded["test"][0]["image"].size == (10, 10)
    assert {split: len(part) for split, part in loaded.items()} == {"train": 18, "validation": 2, "test": 8}


def test_we_read_what_datasets_writes(own_cache: Path) -> None:
    import datasets

    images = [Image.fromarray(np.full((5, 5, 3), 10 * row, np.uint8)) for row in range(24)]
    features = datasets.Features({"img": datasets.Image(), "fine": datasets.ClassLabel(names=["odd", "even"])})
    for split, rows in (("train", range(20)), ("test", range(20, 24))):
        columns = {"img": [images[r] for r in rows], "fine": [r % 2 for r in rows]}
        part = datasets.Dataset.from_dict(columns, features=features)
        part.to_parquet(own_cache / "data" / f"{split}-00000-of-00001.parquet")
    splits = prepare_task(open_images("parity", f"parquet:{own_cache}"), own_cache / "out", image_decoding(5))["splits"]
    assert [splits[s]["per_class"] for s in ("train", "validation", "test")] == [[9, 9], [1, 1], [2, 2]]


@pytest.mark.parametrize("layout", ["parquet", "imagefolder"])
def test_hf_opens_a_local_data_set(layout: str, own_cache: Path) -> None:
    if layout == "parquet":
        folder = own_cache / "set@1#2"  # a path may hold the signs of a revision and a configuration
        folder.mkdir()
        for path in prepared(own_cache).glob("*.parquet"):
            path.rename(folder / path.name)
    else:
        folder = image_folder(own_cache / "set")
    raw = open_images("mine", f"hf:{folder.name}", root=own_cache)
    manifest = prepare_task(raw, own_cache / "out", image_decoding(8))
    assert manifest["class_names"] == ["banded", "polka-dotted"]
    counts = {split: record["count"] for split, record in manifest["splits"].items()}
    assert counts == {"train": 18, "validation": 2, "test": 8}


def test_splits_that_are_not_used_are_listed(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["one", "two"])})
    pictures = iter(range(100))

    def load(*_: object, **__: object) -> object:
        images = [Image.fromarray(np.full((5, 5, 3), next(pictures), np.uint8)) for _ in range(6)]
        return datasets.Dataset.from_dict({"image": images, "label": [0, 1] * 3}, features=features)

    asked: list[Sequence[object]] = []
    monkeypatch.setattr(
        datasets, "get_dataset_split_names", lambda *a, **k: asked.append((*a, k)) or ["train", "test", "contrast"]
    )
    monkeypatch.setattr(datasets, "load_dataset", load)
    raw = open_images("svhn", "hf:SVHN@abc")
    assert asked == [("ufldl-stanford/svhn", "cropped_digits", {"revision": "abc"})]
    assert prepare_task(raw, own_cache / "out", image_decoding(5))["ignored_splits"] == ["contrast"]
    assert raw.templates == REAL_TASKS["SVHN"].templates


@pytest.mark.slow
def test_an_offline_hub_is_one_clear_error(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    code = (
        "from mergeflow.modalities.vision.preparation import open_images\n"
        "from mergeflow.errors import MergeflowError\n"
        "try: open_images('dtd', 'hf:DTD')\n"
        "except MergeflowError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.startswith("hf:tanganke/dtd cannot be loaded (")
    assert "HF_HUB_OFFLINE" in done.stdout


def test_without_datasets_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MergeflowError, match=r"needs the package 'datasets'.*pip install 'mergeflow\[hub\]'"):
        open_images("mnist", "hf:MNIST")
