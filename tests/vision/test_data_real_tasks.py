"""The real eight in the formats they come in, made small."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from PIL import Image

from mergeflow.data import load_split
from mergeflow.data.prepare import prepare_task
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.decoding import image_decoding
from mergeflow.modalities.vision.sources.kinds import open_images
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS, clip_class_names, find_real_task


def save(path: Path, seed: int, size: int = 10) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), np.uint8)).save(path)


def make_mnist(root: Path) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count, seed in (("train", 40, 1), ("t10k", 20, 2)):
        images = np.random.default_rng(seed).integers(0, 256, (count, 28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for path, data, magic in (
            (f"{name}-images-idx3-ubyte", images, 2051),
            (f"{name}-labels-idx1-ubyte", labels, 2049),
        ):
            (raw / path).write_bytes(struct.pack(f">{1 + data.ndim}i", magic, *data.shape) + data.tobytes())
            (raw / f"{path}.gz").write_bytes(gzip.compress(b""))


def make_svhn(root: Path) -> None:
    for name, count, seed in (("train", 40, 1), ("test", 20, 2)):
        images = np.random.default_rng(seed).integers(0, 256, (32, 32, 3, count), np.uint8)
        labels = (np.arange(count, dtype=np.uint8) % 10)[:, None] + 1
        scipy.io.savemat(root / f"{name}_32x32.mat", {"X": images, "y": labels})


def make_dtd(root: Path) -> None:
    classes, base = ("banded", "polka-dotted"), root / "dtd" / "dtd"
    (base / "labels").mkdir(parents=True)
    for index, split in enumerate(("train", "val", "test")):
        lines = [f"{name}/{name}_{index}{row}.jpg" for name in classes for row in range(3)]
        (base / "labels" / f"{split}1.txt").write_text("\n".join(lines) + "\n")
        for row, line in enumerate(lines):
            save(base / "images" / line, 100 * index + row)


def make_eurosat(root: Path) -> None:
    for label, name in enumerate(("AnnualCrop", "Forest", "SeaLake")):
        for row in range(10):
            save(root / "eurosat" / "2750" / name / f"{name}_{row}.jpg", 100 * label + row)


def make_gtsrb(root: Path) -> None:
    base = root / "gtsrb" / "GTSRB"
    lines = ["Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2;ClassId"]
    for label in range(43):
        for row in range(3):
            save(base / "Training" / f"{label:05d}" / f"00000_{row:05d}.ppm", 10 * label + row)
        save(base / "Final_Test" / "Images" / f"{label:05d}.ppm", 1000 + label)
        lines.append(f"{label:05d}.ppm;10;10;1;1;9;9;{42 - label}")
    (root / "gtsrb" / "GT-final_test.csv").write_text("\n".join(lines) + "\n")


def make_cars(root: Path) -> None:
    base = root / "stanford_cars"
    (base / "devkit").mkdir(parents=True)
    names = np.array(["AM General Hummer SUV 2000", "Ram C/V Cargo Van Minivan 2012"], dtype=object)
    scipy.io.savemat(base / "devkit" / "cars_meta.mat", {"class_names": names})
    for split, path in (("train", "devkit/cars_train_annos.mat"), ("test", "cars_test_annos_withlabels.mat")):
        rows = [(f"{row:05d}.jpg", row % 2 + 1) for row in range(8)]
        kind = [("fname", object), ("class", np.uint8)]
        scipy.io.savemat(base / path, {"annotations": np.array(rows, dtype=kind)})
        for row, (name, _) in enumerate(rows):
            save(base / f"cars_{split}" / name, row + (50 if split == "test" else 0))


def make_sun397(root: Path) -> None:
    base = root / "SUN397"
    classes = ("/a/abbey", "/c/church/outdoor")
    for label, name in enumerate(classes):
        for row in range(12):
            save(base / name[1:] / f"sun_{label}{row:02d}.jpg", 100 * label + row)
    (base / "ClassName.txt").write_text("\n".join(classes) + "\n")


def make_resisc45(root: Path) -> None:
    for label, name in enumerate(("airplane", "mobile_home_park")):
        for row in range(12):
            save(root / "NWPU-RESISC45" / name / f"{name}_{row:03d}.jpg", 100 * label + row)


@pytest.fixture(autouse=True)
def no_published_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision compares SVHN's files with the published ones; the small ones have other checksums."""
    from torchvision.datasets import SVHN

    monkeypatch.setattr(
        SVHN, "split_list", {name: [url, file, None] for name, (url, file, _) in SVHN.split_list.items()}
    )


# name -> (maker, first class name, last class name, images per class in (train, validation, test))
LAYOUTS: dict[str, tuple[Callable[[Path], None], str, str, tuple[int, int, int]]] = {
    "MNIST": (make_mnist, "0", "9", (3, 1, 2)),
    "SVHN": (make_svhn, "0", "9", (3, 1, 2)),
    "DTD": (make_dtd, "banded", "polka-dotted", (3, 3, 3)),
    "EuroSAT": (make_eurosat, "annual crop land", "lake or sea", (8, 1, 1)),
    "GTSRB": (make_gtsrb, "red and white circle 20 kph speed limit", "trucks has ended", (2, 1, 1)),
    "Cars": (make_cars, "AM General Hummer SUV 2000", "Ram C/V Cargo Van Minivan 2012", (3, 1, 4)),
    "SUN397": (make_sun397, "abbey", "church outdoor", (10, 1, 1)),
    "RESISC45": (make_resisc45, "airplane", "mobile home park", (10, 1, 1)),
}


def test_a_real_task_takes_transforms(tmp_path: Path) -> None:
    make_mnist(tmp_path)
    raw = open_images("parity", f"torchvision:MNIST@{tmp_path}?classes=5-9&colour=1")
    manifest = prepare_task(raw, tmp_path / "out", image_decoding(8))
    assert manifest["class_names"] == ["even number", "odd number"]
    assert manifest["splits"]["test"]["per_class"] == [4, 6]  # two each of 6, 8 and of 5, 7, 9
    test = load_split(tmp_path / "out", "test")
    assert np.array_equal(test.images[..., 0].any(axis=(1, 2)), test.labels == 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_torchvision_folders_of_the_real_eight_are_prepared(name: str, tmp_path: Path) -> None:
    make, first, last, per_class = LAYOUTS[name]
    make(tmp_path)
    manifest = prepare_task(
        open_images(name.lower(), f"torchvision:{name}@{tmp_path}"), tmp_path / "out", image_decoding(8)
    )
    assert manifest["class_names"][0] == first
    assert manifest["class_names"][-1].endswith(last)
    assert manifest["templates"] == list(find_real_task(name).templates)  # type: ignore[union-attr]
    found = [set(manifest["splits"][s]["per_class"]) for s in ("train", "validation", "test")]
    assert found == [{count} for count in per_class]
    assert str(tmp_path) not in (tmp_path / "out" / "train.parquet").read_bytes().decode("latin1")


@pytest.mark.parametrize("name", LAYOUTS)
def test_missing_files_of_the_real_eight_say_where_to_get_them(name: str, tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match=name if name == "RESISC45" else f"{name} cannot be read from .*hf:"):
        open_images(name, f"torchvision:{name}@{tmp_path}")


def test_labels_belong_to_the_pictures(tmp_path: Path) -> None:
    make_gtsrb(tmp_path)
    prepare_task(open_images("gtsrb", f"torchvision:GTSRB@{tmp_path}"), tmp_path / "out", image_decoding(10))
    test = load_split(tmp_path / "out", "test")
    for label, image in zip(test.labels, test.images, strict=True):
        original = Image.open(tmp_path / "gtsrb" / "GTSRB" / "Final_Test" / "Images" / f"{42 - label:05d}.ppm")
        assert np.array_equal(image, np.asarray(original))


def test_svhn_calls_ten_zero(tmp_path: Path) -> None:
    make_svhn(tmp_path)
    keys = list(open_images("svhn", f"torchvision:svhn@{tmp_path}").list_keys("test"))
    assert [label for _, label in keys[:10]] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_a_missing_gtsrb_folder_does_not_shift_labels(tmp_path: Path) -> None:
    make_gtsrb(tmp_path)
    (tmp_path / "gtsrb/GTSRB/Training/00007").rename(tmp_path / "elsewhere")
    with pytest.raises(MergeflowError, match="found 42 class folders; expected 00000 to 00042"):
        open_images("gtsrb", f"torchvision:GTSRB@{tmp_path}")


def test_dtd_lists_must_name_the_same_classes(tmp_path: Path) -> None:
    make_dtd(tmp_path)
    (tmp_path / "dtd/dtd/labels/test1.txt").write_text("banded/banded_20.jpg\n")
    with pytest.raises(MergeflowError, match="label lists name different classes"):
        open_images("dtd", f"torchvision:DTD@{tmp_path}")


@pytest.mark.parametrize("missing", [False, True])
def test_official_partitions_are_used_where_they_are(missing: bool, tmp_path: Path) -> None:
    make_sun397(tmp_path)
    lists = {"Training_01": range(8), "Testing_01": range(8, 13 if missing else 12)}
    for name, rows in lists.items():
        lines = [f"/a/abbey/sun_0{row:02d}.jpg\n/c/church/outdoor/sun_1{row:02d}.jpg\n" for row in rows]
        (tmp_path / "SUN397" / f"{name}.txt").write_text("".join(lines))
    if missing:
        with pytest.raises(MergeflowError, match=r"official test list names 2 images that are not there.*sun_012\.jpg"):
            open_images("sun397", f"torchvision:SUN397@{tmp_path}")
        return
    raw = open_images("sun397", f"torchvision:SUN397@{tmp_path}")
    assert raw.counts == {"train": 16, "test": 8}
    assert all(int(Path(path).stem[-2:]) >= 8 for path, _ in raw.list_keys("test"))


def test_resisc45_lists_are_used_where_they_are(tmp_path: Path) -> None:
    make_resisc45(tmp_path)
    for name, rows in (("train", range(8)), ("val", range(8, 10)), ("test", range(10, 12))):
        lines = [f"{cls}_{row:03d}.jpg\n" for cls in ("airplane", "mobile_home_park") for row in rows]
        (tmp_path / f"resisc45-{name}.txt").write_text("".join(lines))
    splits = prepare_task(
        open_images("resisc45", f"torchvision:RESISC45@{tmp_path}"), tmp_path / "out", image_decoding(8)
    )["splits"]
    assert [splits[s]["per_class"] for s in ("train", "validation", "test")] == [[8, 8], [2, 2], [2, 2]]


@pytest.mark.parametrize("kind", ["torchvision", "hf"])
def test_an_unknown_real_task_gets_the_nearest(kind: str) -> None:
    with pytest.raises(MergeflowError, match=r"unknown .*data set 'EuroSatt': did you mean 'EuroSAT'"):
        open_images("x", f"{kind}:EuroSatt")


def test_the_table_is_whole() -> None:
    """The 8-, 14- and 20-task benchmarks' order, with CLIP's number of templates."""
    assert all(template.count("{}") == 1 for task in REAL_TASKS.values() for template in task.templates)
    eight = {"StanfordCars": 8, "DTD": 8, "EuroSAT": 3, "GTSRB": 3, "MNIST": 1, "RESISC45": 18, "SUN397": 2, "SVHN": 1}
    six = {"CIFAR100": 18, "FER2013": 6, "Flowers102": 1, "OxfordIIITPet": 1, "PCAM": 1, "STL10": 2}
    last = {"EMNIST": 1, "CIFAR10": 18, "Food101": 1, "FashionMNIST": 2, "RenderedSST2": 1, "KMNIST": 1}
    counts = [(name, len(task.templates)) for name, task in REAL_TASKS.items()]
    assert counts == [*eight.items(), *six.items(), *last.items()]
    signs = REAL_TASKS["GTSRB"].numbered
    assert (len(signs), len(set(signs)), signs[14], signs[17]) == (
        43,
        43,
        "stop",
        "red circle with white horizonal stripe no entry",
    )
    assert clip_class_names(REAL_TASKS["GTSRB"], signs) == list(signs)


def test_a_snapshot_of_a_real_task_gets_its_prompts(tmp_path: Path) -> None:
    make_eurosat(tmp_path)
    raw = open_images("EuroSAT", f"folder:{tmp_path / 'eurosat/2750'}")
    assert raw.class_names == ["annual crop land", "forest", "lake or sea"]
    assert raw.templates == REAL_TASKS["EuroSAT"].templates
