"""Readers of the eight standard tasks."""

from pathlib import Path

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.sources import DEFAULT_TEMPLATES
from mergeflow.modalities.vision.sources.folder import open_folder
from mergeflow.modalities.vision.sources.torchvision_readers.rows import (
    Found,
    Reader,
    array_rows,
    file_rows,
    files_of,
    like_mnist,
    select_rows,
)


def _cars(root: Path) -> Found:
    from torchvision.datasets import StanfordCars

    parts = {split: StanfordCars(root, split=split, loader=str) for split in ("train", "test")}
    rows = {split: files_of(part, root / "stanford_cars") for split, part in parts.items()}
    return parts["train"].classes, rows


def _dtd(root: Path) -> Found:
    from torchvision.datasets import DTD

    parts = {name: DTD(root, split=name, partition=1, loader=str) for name in ("train", "val", "test")}
    # torchvision numbers the classes of each split for itself.
    if len({tuple(part.classes) for part in parts.values()}) > 1:
        counts = {name: len(part.classes) for name, part in parts.items()}
        raise MergeflowError(f"DTD under '{root}': the label lists name different classes ({counts}); restore them.")
    rows = {name.replace("val", "validation"): files_of(part, root / "dtd/dtd/images") for name, part in parts.items()}
    return parts["train"].classes, rows


def _eurosat(root: Path) -> Found:
    from torchvision.datasets import EuroSAT

    dataset = EuroSAT(root, loader=str)
    return dataset.classes, {"train": files_of(dataset, root / "eurosat/2750")}


def _gtsrb(root: Path) -> Found:
    from torchvision.datasets import GTSRB

    numbers = [f"{label:05d}" for label in range(43)]
    training = root / "gtsrb/GTSRB/Training"
    found = sorted(folder.name for folder in training.iterdir() if folder.is_dir()) if training.is_dir() else numbers
    # torchvision labels the training folders in order, so that one missing folder would shift all labels after it.
    if found != numbers:
        raise MergeflowError(f"'{training}': found {len(found)} class folders; expected 00000 to 00042. Restore them.")
    base = root / "gtsrb/GTSRB"
    parts = {split: GTSRB(root, split=split)._samples for split in ("train", "test")}
    return numbers, {s: file_rows(((Path(p), int(c)) for p, c in items), base) for s, items in parts.items()}


def _mnist(root: Path) -> Found:
    from torchvision.datasets import MNIST

    return like_mnist(root / "MNIST", MNIST.classes)


def _resisc45(root: Path) -> Found:
    raw = open_folder("RESISC45", str(root / "NWPU-RESISC45"), DEFAULT_TEMPLATES, 0)
    base = root / "NWPU-RESISC45"
    rows = file_rows(((base / path, label) for path, label in raw.list_keys("train")), base)
    lists = {split: root / f"resisc45-{name}.txt" for split, name in _RESISC45_LISTS.items()}
    if not all(path.exists() for path in lists.values()):
        return raw.strata, {"train": rows}
    # The lists name only files; the class folder is the file's name without its number.
    wanted = {
        split: {f"{line.rsplit('_', 1)[0]}/{line}" for line in path.read_text().split()}
        for split, path in lists.items()
    }
    return raw.strata, select_rows(rows, wanted, base)


def _sun397(root: Path) -> Found:
    from torchvision.datasets import SUN397

    dataset = SUN397(root, loader=str)
    base = root / "SUN397"
    rows = files_of(dataset, base)
    for folder in (base, base / "Partitions"):
        lists = {"train": folder / "Training_01.txt", "test": folder / "Testing_01.txt"}
        if all(path.exists() for path in lists.values()):
            wanted = {
                split: {line.strip().lstrip("/") for line in path.read_text().splitlines() if line.strip()}
                for split, path in lists.items()
            }
            return dataset.classes, select_rows(rows, wanted, base)
    return dataset.classes, {"train": rows}


def _svhn(root: Path) -> Found:
    from torchvision.datasets import SVHN

    parts = {split: SVHN(root, split=split) for split in ("train", "test")}
    rows = {split: array_rows(part.data.transpose(0, 2, 3, 1), part.labels, split) for split, part in parts.items()}
    return [str(digit) for digit in range(10)], rows


_RESISC45_LISTS = {"train": "train", "validation": "val", "test": "test"}
EIGHT: dict[str, Reader] = {
    "StanfordCars": _cars,
    "DTD": _dtd,
    "EuroSAT": _eurosat,
    "GTSRB": _gtsrb,
    "MNIST": _mnist,
    "RESISC45": _resisc45,
    "SUN397": _sun397,
    "SVHN": _svhn,
}
