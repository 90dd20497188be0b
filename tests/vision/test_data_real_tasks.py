"""The twenty real data sets of the benchmarks, in the formats they come in, made small; and the hub's data sets."""

import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.io
from PIL import Image

from mergeflow.data import load_split
from mergeflow.data.prepare import prepare_task
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.preparation import image_decoding, open_images
from mergeflow.modalities.vision.sources.real_tasks import REAL_TASKS, clip_class_names, find_real_task


def draw(count: int, *shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)


def save(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(draw(10, 10, 3, seed=seed)).save(path)


def in_mnists_format(folder: str, prefix: Callable[[str], str]) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        raw = root / folder / "raw"
        raw.mkdir(parents=True)
        for split, count, seed in (("train", 40, 1), ("test", 20, 2)):
            labels = np.arange(count, dtype=np.uint8) % 10
            images = draw(count, 28, 28, seed=seed)
            for kind, data, magic in (("images-idx3", images, 2051), ("labels-idx1", labels, 2049)):
                header = struct.pack(f">{1 + data.ndim}i", magic, *data.shape)
                (raw / f"{prefix(split)}-{kind}-ubyte").write_bytes(header + data.tobytes())

    return make


def like_mnist(split: str) -> str:
    return "train" if split == "train" else "t10k"


make_mnist = in_mnists_format("MNIST", like_mnist)


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


def make_cifar(
    folder: Path, train: list[str], test: str, labels: str, meta: tuple[str, str, list[str]], count: int = 40
) -> None:
    folder.mkdir(parents=True)
    for seed, name in enumerate([*train, test]):
        rows = {"data": draw(count, 3072, seed=seed), labels: [row % len(meta[2]) for row in range(count)]}
        (folder / name).write_bytes(pickle.dumps(rows))
    (folder / meta[0]).write_bytes(pickle.dumps({meta[1]: meta[2]}))


def make_cifar10(root: Path) -> None:
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    batches = [f"data_batch_{index}" for index in range(1, 6)]
    make_cifar(root / "cifar-10-batches-py", batches, "test_batch", "labels", ("batches.meta", "label_names", names))


def make_cifar100(root: Path, names: Sequence[str] = ("apple", "aquarium_fish", "maple_tree", "worm")) -> None:
    meta = ("meta", "fine_label_names", list(names))
    make_cifar(root / "cifar-100-python", ["train"], "test", "fine_labels", meta, 10 * len(names))


def make_fer2013(root: Path) -> None:
    (root / "fer2013").mkdir()
    lines = ["emotion,pixels,Usage"]
    for use, count, seed in (("Training", 70, 1), ("PublicTest", 14, 2), ("PrivateTest", 14, 3)):
        faces = draw(count, 48 * 48, seed=seed)
        lines += [f"{row % 7},{' '.join(map(str, face))},{use}" for row, face in enumerate(faces)]
    (root / "fer2013" / "fer2013.csv").write_text("\n".join(lines) + "\n")


def make_flowers102(root: Path) -> None:
    base = root / "flowers-102"
    labels = [row % 102 + 1 for row in range(306)]
    for row in range(306):
        save(base / "jpg" / f"image_{row + 1:05d}.jpg", row)
    scipy.io.savemat(base / "imagelabels.mat", {"labels": labels})
    ids = {"trnid": range(1, 103), "valid": range(103, 205), "tstid": range(205, 307)}
    scipy.io.savemat(base / "setid.mat", {name: list(rows) for name, rows in ids.items()})


def make_oxford_pet(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    (base / "annotations").mkdir(parents=True)
    for split, rows in (("trainval", range(10)), ("test", range(10, 14))):
        lines = []
        for label, name in enumerate(("Abyssinian", "american_bulldog"), 1):
            for row in rows:
                save(base / "images" / f"{name}_{row}.jpg", 100 * label + row)
                lines.append(f"{name}_{row} {label} {label} 1")
        (base / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")


def make_pcam(root: Path) -> None:
    (root / "pcam").mkdir()
    for seed, split in enumerate(("train", "valid", "test")):
        for key in ("x", "y"):
            with open(root / "pcam" / f"camelyonpatch_level_2_split_{split}_{key}.h5", "wb") as file:
                np.savez(file, x=draw(6, 96, 96, 3, seed=seed), y=(np.arange(6) % 2).reshape(6, 1, 1, 1))


def make_stl10(root: Path) -> None:
    base = root / "stl10_binary"
    base.mkdir()
    for seed, (split, count) in enumerate((("train", 40), ("test", 20))):
        (base / f"{split}_X.bin").write_bytes(draw(count, 3 * 96 * 96, seed=seed).tobytes())
        (base / f"{split}_y.bin").write_bytes((np.arange(count) % 10 + 1).astype(np.uint8).tobytes())
    (base / "unlabeled_X.bin").write_bytes(b"")


def make_food101(root: Path) -> None:
    for split, rows in (("train", range(10)), ("test", range(10, 12))):
        lists = {name: [f"{name}/{row}" for row in rows] for name in ("apple_pie", "waffles")}
        for seed, files in enumerate(lists.values()):
            for row, file in zip(rows, files, strict=True):
                save(root / "food-101" / "images" / f"{file}.jpg", 100 * seed + row)
        (root / "food-101" / "meta").mkdir(exist_ok=True)
        (root / "food-101" / "meta" / f"{split}.json").write_text(json.dumps(lists))


def make_rendered_sst2(root: Path) -> None:
    for index, split in enumerate(("train", "valid", "test")):
        for label, name in enumerate(("negative", "positive")):
            for row in range(3):
                save(root / "rendered-sst2" / split / name / f"{row}.png", 100 * index + 10 * label + row)


@pytest.fixture(autouse=True)
def no_published_checksums(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision compares files with the published ones; the small ones have other checksums."""
    from torchvision.datasets import SVHN

    unchecked = {name: [url, file, None] for name, (url, file, _) in SVHN.split_list.items()}
    monkeypatch.setattr(SVHN, "split_list", unchecked)
    monkeypatch.setattr("torchvision.datasets.utils.check_md5", lambda *_, **__: True)


@pytest.fixture(autouse=True)
def stand_in_for_h5py(monkeypatch: pytest.MonkeyPatch) -> None:
    """PCAM's files are HDF5, whose package is not installed here: NumPy's archives have the same way of access."""
    monkeypatch.setitem(sys.modules, "h5py", SimpleNamespace(File=np.load))


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
    "CIFAR100": (make_cifar100, "apple", "worm", (9, 1, 10)),
    "FER2013": (make_fer2013, "angry", "neutral", (9, 1, 4)),
    "Flowers102": (make_flowers102, "pink primrose", "blackberry lily", (1, 1, 1)),
    "OxfordIIITPet": (make_oxford_pet, "Abyssinian", "american bulldog", (9, 1, 4)),
    "PCAM": (make_pcam, "lymph node", "lymph node containing metastatic tumor tissue", (3, 3, 3)),
    "STL10": (make_stl10, "airplane", "truck", (3, 1, 2)),
    "EMNIST": (in_mnists_format("EMNIST", lambda split: f"emnist-digits-{split}"), "0", "9", (3, 1, 2)),
    "CIFAR10": (make_cifar10, "airplane", "truck", (18, 2, 4)),
    "Food101": (make_food101, "apple pie", "waffles", (9, 1, 2)),
    "FashionMNIST": (in_mnists_format("FashionMNIST", like_mnist), "T-shirt/top", "Ankle boot", (3, 1, 2)),
    "RenderedSST2": (make_rendered_sst2, "negative", "positive", (3, 3, 3)),
    "KMNIST": (in_mnists_format("KMNIST", like_mnist), "o", "wo", (3, 1, 2)),
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
def test_torchvision_folders_are_prepared(name: str, tmp_path: Path) -> None:
    make, first, last, per_class = LAYOUTS[name]
    make(tmp_path)
    raw = open_images(name.lower(), f"torchvision:{name}@{tmp_path}")
    manifest = prepare_task(raw, tmp_path / "out", image_decoding(8))
    assert manifest["class_names"][0] == first
    assert manifest["class_names"][-1].endswith(last)
    assert manifest["templates"] == list(find_real_task(name).templates)  # type: ignore[union-attr]
    counts = [set(manifest["splits"][s]["per_class"]) for s in ("train", "validation", "test")]
    assert counts == [{count} for count in per_class]
    assert str(tmp_path) not in (tmp_path / "out" / "train.parquet").read_bytes().decode("latin1")


@pytest.mark.parametrize("name", LAYOUTS)
def test_missing_files_say_where_to_get_them(name: str, tmp_path: Path) -> None:
    message = name if name == "RESISC45" else f"{name} cannot be read from '.*hf:{find_real_task(name).name}"  # type: ignore[union-attr]
    with pytest.raises(MergeflowError, match=message) as caught:
        open_images(name, f"torchvision:{name}@{tmp_path}")
    # What the message offers to run is a call that the class accepts.
    assert ("download=True" in str(caught.value)) == (name not in ("FER2013", "Cars", "RESISC45"))
    assert ("split='digits'" in str(caught.value)) == (name == "EMNIST")


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
    raw = open_images("resisc45", f"torchvision:RESISC45@{tmp_path}")
    splits = prepare_task(raw, tmp_path / "out", image_decoding(8))["splits"]
    assert [splits[s]["per_class"] for s in ("train", "validation", "test")] == [[8, 8], [2, 2], [2, 2]]


@pytest.mark.parametrize("name", ["EMNIST", "FashionMNIST", "KMNIST"])
def test_files_in_mnists_format_are_read_as_they_come(name: str, tmp_path: Path) -> None:
    LAYOUTS[name][0](tmp_path)

    def pixels() -> list[bytes]:
        return [example.read().tobytes() for example in open_images("it", source).splits["test"]()]

    source = f"torchvision:{name}@{tmp_path}"
    unpacked = pixels()
    for path in (tmp_path / name / "raw").iterdir():
        if path.suffix != ".gz":
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    assert pixels() == unpacked


@pytest.mark.parametrize("name", ["CIFAR10", "STL10", "PCAM"])
def test_colours_and_axes_stay(name: str, tmp_path: Path) -> None:
    """Each format orders its axes in its own way; a picture that is turned or has its colours swapped is another."""
    LAYOUTS[name][0](tmp_path)
    size = 32 if name == "CIFAR10" else 96
    prepare_task(open_images("it", f"torchvision:{name}@{tmp_path}"), tmp_path / "out", image_decoding(size))
    first = load_split(tmp_path / "out", "test").images[0]
    if name == "CIFAR10":
        expected = draw(40, 3, 32, 32, seed=5)[0].transpose(1, 2, 0)
    elif name == "STL10":  # columns before rows
        expected = draw(20, 3, 96, 96, seed=1)[0].transpose(2, 1, 0)
    else:
        expected = draw(6, 96, 96, 3, seed=2)[0]
    assert np.array_equal(first, expected)


def test_emotions_keep_their_labels(tmp_path: Path) -> None:
    """The original's order is not alphabetical, the hub's copy is."""
    make_fer2013(tmp_path)
    original = open_images("fer2013", f"torchvision:FER2013@{tmp_path}").class_names
    assert original == ["angry", "disgusted", "fearful", "happy", "sad", "surprised", "neutral"]
    assert sorted(original) == list(REAL_TASKS["FER2013"].hub_names)


def test_fer2013_without_labels_for_test_is_refused(tmp_path: Path) -> None:
    make_fer2013(tmp_path)
    lines = (tmp_path / "fer2013/fer2013.csv").read_text().splitlines()[1:8]
    rows = [line.split(",") for line in lines]
    (tmp_path / "fer2013/fer2013.csv").unlink()
    (tmp_path / "fer2013/train.csv").write_text("\n".join(["emotion,pixels", *(f"{a},{b}" for a, b, _ in rows)]))
    (tmp_path / "fer2013/test.csv").write_text("\n".join(["pixels", *(b for _, b, _ in rows)]))
    with pytest.raises(MergeflowError, match=r"test\.csv has no labels\. Put fer2013\.csv"):
        open_images("fer2013", f"torchvision:FER2013@{tmp_path}")


def test_pcam_without_h5py_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MergeflowError, match=r"PCAM cannot be read from .*pip install h5py.*hf:PCAM"):
        open_images("pcam", f"torchvision:PCAM@{tmp_path}")


def test_names_from_other_copies_become_clips() -> None:
    for name, given, wanted in (
        ("Flowers102", ["globe-flower", "pink-yellow dahlia?"], ["globe flower", "pink and yellow dahlia"]),
        ("OxfordIIITPet", ["maine_coon", "English Setter"], ["Maine Coon", "english setter"]),
        ("FashionMNIST", ["T - shirt / top", "Ankle boot"], ["T-shirt/top", "Ankle boot"]),
        ("KMNIST", ["お", "を"], ["o", "wo"]),
        ("KMNIST", [str(label) for label in range(10)], ["o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"]),
        ("FER2013", ["happy", "Surprise"], ["happy", "surprised"]),
        ("CIFAR100", ["lawn_mower"], ["lawn mower"]),
    ):
        assert clip_class_names(REAL_TASKS[name], given) == wanted


def test_aliases_lead_to_the_twelve() -> None:
    names = ["OxfordPets", "patch_camelyon", "sst2", "kuzushiji-mnist", "flowers", "emnist-digits", "ethz/food101"]
    real_names = [task.name for name in names if (task := find_real_task(name))]
    assert real_names == ["OxfordIIITPet", "PCAM", "RenderedSST2", "KMNIST", "Flowers102", "EMNIST", "Food101"]


def on_the_hub(monkeypatch: pytest.MonkeyPatch, splits: list[str], label: Any, labels: list[Any], image: str) -> None:
    import datasets

    features = datasets.Features({image: datasets.Image(), "cls" if image == "jpg" else "label": label})
    pictures = iter(range(100))

    def load(*_: object, **__: object) -> object:
        images = [Image.fromarray(np.full((5, 5, 3), next(pictures), np.uint8)) for _ in labels]
        return datasets.Dataset.from_dict(dict(zip(features, (images, labels), strict=True)), features=features)

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: splits)
    monkeypatch.setattr(datasets, "load_dataset", load)


def test_hub_copies_with_bare_labels_get_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    on_the_hub(monkeypatch, ["train", "valid", "test"], datasets.Value("bool"), [False, True] * 2, "image")
    manifest = prepare_task(open_images("pcam", "hf:PCAM"), tmp_path / "pcam", image_decoding(5))
    assert manifest["class_names"] == list(REAL_TASKS["PCAM"].numbered)
    assert [manifest["splits"][s]["per_class"] for s in ("train", "validation", "test")] == [[2, 2]] * 3
    on_the_hub(monkeypatch, ["train", "test"], datasets.Value("int64"), [0, 6, 3], "jpg")
    raw = open_images("faces", "hf:clip-benchmark/wds_fer2013")
    assert [raw.class_names[label] for _, label in raw.list_keys("test")] == ["angry", "surprised", "happy"]
    with pytest.raises(MergeflowError, match="no ClassLabel names for column 'cls'"):
        open_images("faces", "hf:somebody/faces")


def test_food101s_validation_is_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    names = datasets.ClassLabel(names=["apple_pie", "waffles"])
    on_the_hub(monkeypatch, ["train", "validation"], names, [0, 1] * 10, "image")
    raw = open_images("food", "hf:Food101")
    assert (raw.counts, raw.class_names) == ({"train": 20, "test": 20}, ["apple pie", "waffles"])


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
    assert (len(signs), len(set(signs)), signs[14]) == (43, 43, "stop")
    assert clip_class_names(REAL_TASKS["GTSRB"], signs) == list(signs)


def test_a_snapshot_of_a_real_task_gets_its_prompts(tmp_path: Path) -> None:
    make_eurosat(tmp_path)
    raw = open_images("EuroSAT", f"folder:{tmp_path / 'eurosat/2750'}")
    assert raw.class_names == ["annual crop land", "forest", "lake or sea"]
    assert raw.templates == REAL_TASKS["EuroSAT"].templates


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
