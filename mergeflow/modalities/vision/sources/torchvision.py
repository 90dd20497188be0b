"""Real data sets as torchvision keeps them: each read to class names and the rows of every split."""

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mergeflow.data.address import default_root
from mergeflow.data.task import Example, RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.images import ImageInput
from mergeflow.modalities.vision.sources import DEFAULT_TEMPLATES
from mergeflow.modalities.vision.sources.files import open_folder
from mergeflow.modalities.vision.sources.real_tasks import RealTask, clip_class_names, get_real_task


@dataclass(frozen=True)
class Rows:
    """One split as a table: (path, label) by row, and how to read a row's image."""

    keys: Sequence[tuple[str, int]]
    read: Callable[[int], ImageInput]

    def examples(self) -> Iterator[Example]:
        for row, (path, label) in enumerate(self.keys):
            yield Example(partial(self.read, row), path, label)

    def only(self, wanted: set[str]) -> "Rows":
        rows = [row for row, (path, _) in enumerate(self.keys) if path in wanted]
        return Rows([self.keys[row] for row in rows], lambda row: self.read(rows[row]))


Found = tuple[Sequence[str], dict[str, Rows]]  # class names, and the rows of each split
Reader = Callable[[Path], Found]  # of ROOT; raises whatever torchvision raises when files are missing


def files_of(dataset: Any, root: Path) -> Rows:
    """Return the rows of a torchvision data set that was made with `loader=str`: its items are (path, label)."""
    items = ((Path(path), int(label)) for path, label in (dataset[row] for row in range(len(dataset))))
    return file_rows(items, root)


def file_rows(items: Iterable[tuple[Path, int]], root: Path) -> Rows:
    """Return the rows of image files under `root` with their labels, sorted by path."""
    # Sorted, because torchvision lists some folders in the order of the file system.
    keys = sorted((path.relative_to(root).as_posix(), label) for path, label in items)
    return Rows(keys, lambda row: (root / keys[row][0]).read_bytes())


def array_rows(images: Any, labels: Any, split: str) -> Rows:
    """Return the rows of a data set that torchvision holds as arrays: images uint8 [N, H, W] or [N, H, W, 3]."""
    keys = [(f"{split}/{row:06d}.png", int(label)) for row, label in enumerate(labels)]
    return Rows(keys, lambda row: Image.fromarray(images[row]))


def like_mnist(root: Path, classes: Sequence[str], train: str = "train", test: str = "t10k") -> Found:
    """Read a data set in MNIST's format from the files as they are downloaded, packed by gzip, or unpacked.

    The names of the two files of each split begin with `train` and `test`.
    """
    rows = {}
    for split, name in (("train", train), ("test", test)):
        labels = _idx_array(root / "raw" / f"{name}-labels-idx1-ubyte")
        images = _idx_array(root / "raw" / f"{name}-images-idx3-ubyte")
        if len(images) != len(labels):
            raise ValueError(f"'{root}' has {len(images)} images and {len(labels)} labels of {name}")
        rows[split] = array_rows(images, labels.tolist(), split)
    return classes, rows


def _idx_array(path: Path) -> np.ndarray:
    """Return the array of an IDX file of bytes: its type, its number of dimensions, these big-endian, the values."""
    packed = path.with_name(f"{path.name}.gz")
    content = path.read_bytes() if path.exists() or not packed.exists() else gzip.decompress(packed.read_bytes())
    if content[:3] != b"\0\0\x08":
        raise ValueError(f"'{path}' is not an IDX file of bytes")
    shape = np.frombuffer(content, ">i4", content[3], 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape)


def select_rows(rows: Rows, wanted: dict[str, set[str]], base: Path) -> dict[str, Rows]:
    """Return the rows of every official list, whose names start from `base`."""
    present = {path for path, _ in rows.keys}
    for split, paths in wanted.items():
        if missing := sorted(paths - present):
            raise MergeflowError(
                f"'{base}': the official {split} list names {len(missing)} images that are not there, such as "
                f"'{missing[0]}'. Restore them, or remove the lists to have splits carved."
            )
    return {split: rows.only(paths) for split, paths in wanted.items()}


def datasets(name: str) -> Any:
    """Return a class of torchvision's data sets, imported when it is first asked for."""
    return getattr(import_module("torchvision.datasets"), name)


def _listed(name: str, folder: str, *splits: str, **options: Any) -> Reader:
    """Return the reader of a data set whose class lists each split's files below `folder`."""

    def read(root: Path) -> Found:
        parts = {split: datasets(name)(root, split=split, loader=str, **options) for split in splits}
        # torchvision numbers the classes of each split for itself.
        if len({tuple(part.classes) for part in parts.values()}) > 1:
            counts = {split: len(part.classes) for split, part in parts.items()}
            raise MergeflowError(
                f"{name} under '{root}': the label lists name different classes ({counts}); restore them."
            )
        rows = {split.replace("val", "validation"): files_of(part, root / folder) for split, part in parts.items()}
        return parts["train"].classes, rows

    return read


def _like_mnist(name: str) -> Reader:
    """Return the reader of a data set that torchvision keeps as it keeps MNIST."""
    return lambda root: like_mnist(root / name, datasets(name).classes)


def _cifar(name: str) -> Reader:
    def read(root: Path) -> Found:
        parts = {split: datasets(name)(root, train=split == "train") for split in ("train", "test")}
        rows = {split: array_rows(part.data, part.targets, split) for split, part in parts.items()}
        return parts["train"].classes, rows

    return read


def _channels_first(name: str) -> Reader:
    def read(root: Path) -> Found:
        parts = {split: datasets(name)(root, split=split) for split in ("train", "test")}
        rows = {split: array_rows(part.data.transpose(0, 2, 3, 1), part.labels, split) for split, part in parts.items()}
        # Without a list of names the labels are numbers.
        return getattr(parts["train"], "classes", [str(label) for label in range(10)]), rows

    return read


def _eurosat(root: Path) -> Found:
    dataset = datasets("EuroSAT")(root, loader=str)
    return dataset.classes, {"train": files_of(dataset, root / "eurosat/2750")}


def _gtsrb(root: Path) -> Found:
    numbers = [f"{label:05d}" for label in range(43)]
    training = root / "gtsrb/GTSRB/Training"
    folders = sorted(folder.name for folder in training.iterdir() if folder.is_dir()) if training.is_dir() else numbers
    # torchvision labels the training folders in order, so that one missing folder would shift all labels after it.
    if folders != numbers:
        raise MergeflowError(
            f"'{training}': found {len(folders)} class folders; expected 00000 to 00042. Restore them."
        )
    base = root / "gtsrb/GTSRB"
    parts = {split: datasets("GTSRB")(root, split=split)._samples for split in ("train", "test")}
    return numbers, {s: file_rows(((Path(p), int(c)) for p, c in items), base) for s, items in parts.items()}


def _resisc45(root: Path) -> Found:
    raw = open_folder("RESISC45", str(root / "NWPU-RESISC45"), DEFAULT_TEMPLATES, 0)
    base = root / "NWPU-RESISC45"
    rows = file_rows(((base / path, label) for path, label in raw.list_keys("train")), base)
    names = {"train": "train", "validation": "val", "test": "test"}
    lists = {split: root / f"resisc45-{name}.txt" for split, name in names.items()}
    if not all(path.exists() for path in lists.values()):
        return raw.strata, {"train": rows}
    # The lists name only files; the class folder is the file's name without its number.
    named = {split: path.read_text().split() for split, path in lists.items()}
    wanted = {split: {f"{line.rsplit('_', 1)[0]}/{line}" for line in lines} for split, lines in named.items()}
    return raw.strata, select_rows(rows, wanted, base)


def _sun397(root: Path) -> Found:
    dataset = datasets("SUN397")(root, loader=str)
    base = root / "SUN397"
    rows = files_of(dataset, base)
    for folder in (base, base / "Partitions"):
        lists = {"train": folder / "Training_01.txt", "test": folder / "Testing_01.txt"}
        if all(path.exists() for path in lists.values()):
            named = {split: map(str.strip, path.read_text().splitlines()) for split, path in lists.items()}
            wanted = {split: {line.lstrip("/") for line in lines if line} for split, lines in named.items()}
            return dataset.classes, select_rows(rows, wanted, base)
    return dataset.classes, {"train": rows}


def _fer2013(root: Path) -> Found:
    rows = {}
    for split in ("train", "test"):
        images, labels = zip(*datasets("FER2013")(root, split=split)._samples, strict=True)
        if None in labels:
            raise MergeflowError(
                f"'{root / 'fer2013'}': test.csv has no labels. Put fer2013.csv or icml_face_data.csv there."
            )
        rows[split] = array_rows([image.numpy() for image in images], labels, split)
    return [str(label) for label in range(7)], rows


def _oxford_pet(root: Path) -> Found:
    parts = {name: datasets("OxfordIIITPet")(root, split=name) for name in ("trainval", "test")}
    base = root / "oxford-iiit-pet" / "images"
    items = {name: zip(part._images, part._labels, strict=True) for name, part in parts.items()}
    return parts["trainval"].classes, {name.removesuffix("val"): file_rows(rows, base) for name, rows in items.items()}


def _pcam(root: Path) -> Found:
    parts = {name: datasets("PCAM")(root, split=name) for name in ("train", "val", "test")}
    return ["0", "1"], {name.replace("val", "validation"): _hdf5_rows(part, name) for name, part in parts.items()}


def _hdf5_rows(part: Any, name: str) -> Rows:
    """Return the rows of a split of PCAM; torchvision itself would open two files for each label."""
    files = {kind: part._base_folder / file for kind, (file, *_) in part._FILES[name].items()}
    with part.h5py.File(files["targets"]) as targets:
        labels = targets["y"][:, 0, 0, 0]
    keys = [(f"{name}/{row:06d}.png", int(label)) for row, label in enumerate(labels)]

    def read(row: int) -> Image.Image:
        with part.h5py.File(files["images"]) as images:
            return Image.fromarray(images["x"][row])

    return Rows(keys, read)


def _emnist(root: Path) -> Found:
    classes = datasets("EMNIST").classes_split_dict["digits"]
    return like_mnist(root / "EMNIST", classes, "emnist-digits-train", "emnist-digits-test")


READERS: Mapping[str, Reader] = {
    "StanfordCars": _listed("StanfordCars", "stanford_cars", "train", "test"),
    "DTD": _listed("DTD", "dtd/dtd/images", "train", "val", "test", partition=1),
    "EuroSAT": _eurosat,
    "GTSRB": _gtsrb,
    "MNIST": _like_mnist("MNIST"),
    "RESISC45": _resisc45,
    "SUN397": _sun397,
    "SVHN": _channels_first("SVHN"),
    "CIFAR100": _cifar("CIFAR100"),
    "FER2013": _fer2013,
    "Flowers102": _listed("Flowers102", "flowers-102", "train", "val", "test"),
    "OxfordIIITPet": _oxford_pet,
    "PCAM": _pcam,
    "STL10": _channels_first("STL10"),
    "EMNIST": _emnist,
    "CIFAR10": _cifar("CIFAR10"),
    "Food101": _listed("Food101", "food-101/images", "train", "test"),
    "FashionMNIST": _like_mnist("FashionMNIST"),
    "RenderedSST2": _listed("RenderedSST2", "rendered-sst2", "train", "val", "test"),
    "KMNIST": _like_mnist("KMNIST"),
}


def open_torchvision(task_name: str, place: str, seed: int, root: Path) -> RawTask:
    """Open one of the 20 real data sets from a local torchvision folder; nothing is downloaded.

    Official splits are used as they are: train, val and test of Flowers102, PCAM, RenderedSST2 and partition 1 of DTD;
    trainval and test of OxfordIIITPet; partition 1 of SUN397 and torchgeo's lists of RESISC45 where their files are
    present; nothing of EuroSAT; train and test of all others. What is left is carved.

    Args:
        place: `NAME[@ROOT]`, ROOT as given to torchvision, default `inputs/torchvision`. RESISC45, which torchvision
            lacks, is read from ROOT/NWPU-RESISC45/CLASS/*.jpg.
        root: what a relative ROOT starts from.
    """
    name, _, own_root = place.partition("@")
    task = get_real_task(name)
    folder = root / (own_root or default_root("torchvision"))
    try:
        names, splits = READERS[task.name](folder)
    except MergeflowError:
        raise
    # torchvision raises RuntimeError, AssertionError, FileNotFoundError or a parser's error for the same thing.
    except Exception as error:
        raise _not_there(task, folder, error) from error
    return RawTask(
        name=task_name,
        class_names=clip_class_names(task, names),
        templates=task.templates,
        splits={split: rows.examples for split, rows in splits.items()},
        seed=seed,
        counts={split: len(rows.keys) for split, rows in splits.items()},
        keys={split: partial(iter, rows.keys) for split, rows in splits.items()},
        keeps_conflicts=True,
    )


def _not_there(task: RealTask, folder: Path, error: Exception) -> MergeflowError:
    ways = {
        "StanfordCars": "torchvision can no longer download it: put the original archives under stanford_cars/",
        "RESISC45": "put the original archive's class folders under NWPU-RESISC45/",
        "FER2013": "put the competition's fer2013.csv or icml_face_data.csv under fer2013/",
    }
    fixed = "split='digits', " if task.name == "EMNIST" else ""
    fetch = f"python -c \"import torchvision; torchvision.datasets.{task.name}('{folder}', {fixed}download=True)\""
    if task.name in ("DTD", "GTSRB", "MNIST", "PCAM", "SVHN"):
        fetch += " (and the same for every other split)"
    return MergeflowError(
        f"{task.name} cannot be read from '{folder}' ({type(error).__name__}: {error}). "
        f"{ways.get(task.name, 'Download it with: ' + fetch)}, or use hf:{task.name}."
    )
