"""Readers of the six tasks that extend the 14 to 20."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from mergeflow.modalities.vision.sources.torchvision_readers.rows import Found, Reader, array_rows, files_of


def _emnist(root: Path) -> Found:
    from torchvision.datasets import EMNIST

    return _like_mnist(partial(EMNIST, split="digits"), root)


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

    return _like_mnist(FashionMNIST, root)


def _rendered_sst2(root: Path) -> Found:
    from torchvision.datasets import RenderedSST2

    parts = {name: RenderedSST2(root, split=name, loader=str) for name in ("train", "val", "test")}
    base = root / "rendered-sst2"
    rows = {name.replace("val", "validation"): files_of(part, base) for name, part in parts.items()}
    return parts["train"].classes, rows


def _kmnist(root: Path) -> Found:
    from torchvision.datasets import KMNIST

    return _like_mnist(KMNIST, root)


def _like_mnist(dataset: Callable[..., Any], root: Path) -> Found:
    parts = {"train": dataset(root, train=True), "test": dataset(root, train=False)}
    rows = {split: array_rows(part.data.numpy(), part.targets.tolist(), split) for split, part in parts.items()}
    return parts["train"].classes, rows


SIX_OF_TWENTY: dict[str, Reader] = {
    "EMNIST": _emnist,
    "CIFAR10": _cifar10,
    "Food101": _food101,
    "FashionMNIST": _fashion_mnist,
    "RenderedSST2": _rendered_sst2,
    "KMNIST": _kmnist,
}
