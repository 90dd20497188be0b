"""Readers of the six tasks that extend the 14 to 20."""

from pathlib import Path

from mergeflow.modalities.vision.sources.torchvision_readers.rows import Found, Reader, array_rows, files_of, like_mnist


def _emnist(root: Path) -> Found:
    from torchvision.datasets import EMNIST

    prefix = "emnist-digits"
    return like_mnist(root / "EMNIST", EMNIST.classes_split_dict["digits"], f"{prefix}-train", f"{prefix}-test")


def _cifar10(root: Path) -> Found:
    from torchvision.datasets import CIFAR10

    parts = {"train": CIFAR10(root, train=True), "test": CIFAR10(root, train=False)}
    return parts["train"].classes, {split: array_rows(part.data, part.targets, split) for split, part in parts.items()}


def _food101(root: Path) -> Found:
    from torchvision.datasets import Food101

    parts = {split: Food101(root, split=split, loader=str) for split in ("train", "test")}
    base = root / "food-101" / "images"
    return parts["train"].classes, {split: files_of(part, base) for split, part in parts.items()}


def _fashion_mnist(root: Path) -> Found:
    from torchvision.datasets import FashionMNIST

    return like_mnist(root / "FashionMNIST", FashionMNIST.classes)


def _rendered_sst2(root: Path) -> Found:
    from torchvision.datasets import RenderedSST2

    parts = {name: RenderedSST2(root, split=name, loader=str) for name in ("train", "val", "test")}
    base = root / "rendered-sst2"
    rows = {name.replace("val", "validation"): files_of(part, base) for name, part in parts.items()}
    return parts["train"].classes, rows


def _kmnist(root: Path) -> Found:
    from torchvision.datasets import KMNIST

    return like_mnist(root / "KMNIST", KMNIST.classes)


SIX_OF_TWENTY: dict[str, Reader] = {
    "EMNIST": _emnist,
    "CIFAR10": _cifar10,
    "Food101": _food101,
    "FashionMNIST": _fashion_mnist,
    "RenderedSST2": _rendered_sst2,
    "KMNIST": _kmnist,
}
