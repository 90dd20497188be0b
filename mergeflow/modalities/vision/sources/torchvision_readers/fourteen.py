"""Readers of the six tasks that extend the eight to 14."""

from pathlib import Path
from typing import Any

from PIL import Image

from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.sources.torchvision_readers.rows import (
    Found,
    Reader,
    Rows,
    array_rows,
    file_rows,
    files_of,
)


def _cifar100(root: Path) -> Found:
    from torchvision.datasets import CIFAR100

    parts = {"train": CIFAR100(root, train=True), "test": CIFAR100(root, train=False)}
    return parts["train"].classes, {split: array_rows(part.data, part.targets, split) for split, part in parts.items()}


def _fer2013(root: Path) -> Found:
    from torchvision.datasets import FER2013

    rows = {}
    for split in ("train", "test"):
        images, labels = zip(*FER2013(root, split=split)._samples, strict=True)
        if None in labels:
            raise MergeflowError(
                f"'{root / 'fer2013'}': test.csv has no labels. Put fer2013.csv or icml_face_data.csv there."
            )
        rows[split] = array_rows([image.numpy() for image in images], labels, split)
    return [str(label) for label in range(7)], rows


def _flowers102(root: Path) -> Found:
    from torchvision.datasets import Flowers102

    parts = {name: Flowers102(root, split=name, loader=str) for name in ("train", "val", "test")}
    base = root / "flowers-102"
    return Flowers102.classes, {name.replace("val", "validation"): files_of(p, base) for name, p in parts.items()}


def _oxford_pet(root: Path) -> Found:
    from torchvision.datasets import OxfordIIITPet

    parts = {name: OxfordIIITPet(root, split=name) for name in ("trainval", "test")}
    base = root / "oxford-iiit-pet" / "images"
    rows = {
        name.removesuffix("val"): file_rows(zip(part._images, part._labels, strict=True), base)
        for name, part in parts.items()
    }
    return parts["trainval"].classes, rows


def _pcam(root: Path) -> Found:
    from torchvision.datasets import PCAM

    parts = {name: PCAM(root, split=name) for name in ("train", "val", "test")}
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


def _stl10(root: Path) -> Found:
    from torchvision.datasets import STL10

    parts = {split: STL10(root, split=split) for split in ("train", "test")}
    rows = {split: array_rows(part.data.transpose(0, 2, 3, 1), part.labels, split) for split, part in parts.items()}
    # Without its list of names the labels are numbers; `numbered` knows their names.
    return getattr(parts["train"], "classes", [str(label) for label in range(10)]), rows


SIX_OF_FOURTEEN: dict[str, Reader] = {
    "CIFAR100": _cifar100,
    "FER2013": _fer2013,
    "Flowers102": _flowers102,
    "OxfordIIITPet": _oxford_pet,
    "PCAM": _pcam,
    "STL10": _stl10,
}
