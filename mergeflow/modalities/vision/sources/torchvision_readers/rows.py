"""One split of a torchvision folder as a table of paths and labels."""

import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mergeflow.data.task import Example
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.images import ImageInput


@dataclass(frozen=True)
class Rows:
    """One split as a table: (path, label) by row, and how to read a row's image."""

    keys: Sequence[tuple[str, int]]
    read: Callable[[int], ImageInput]

    def examples(self) -> Iterator[Example]:
        for row, (path, label) in enumerate(self.keys):
            yield Example(partial(self.read, row), path, label)

    def list_keys(self) -> Iterator[tuple[str, int]]:
        return iter(self.keys)

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
    """Return the rows of a data set that torchvision holds as arrays: images uint8 [N, H, W] or [N, H, W, 3].

    Args:
        images: uint8 [N, H, W] or [N, H, W, 3].
        labels: [N].
    """
    keys = [(f"{split}/{row:06d}.png", int(label)) for row, label in enumerate(labels)]
    return Rows(keys, lambda row: Image.fromarray(images[row]))


def like_mnist(root: Path, classes: Sequence[str], train: str = "train", test: str = "t10k") -> Found:
    """Read a data set in MNIST's format from the files as they are downloaded, packed by gzip, or unpacked.

    Args:
        root: the folder with `raw`.
        train: how the names of the training split's two files begin.
        test: and those of the test split's.
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
    """Return the rows of every official list.

    Args:
        rows: all that the data set holds.
        base: the folder that these names start from.

    Raises:
        MergeflowError: a list names files that are not there.
    """
    there = {path for path, _ in rows.keys}
    for split, paths in wanted.items():
        if missing := sorted(paths - there):
            raise MergeflowError(
                f"'{base}': the official {split} list names {len(missing)} images that are not there, such as "
                f"'{missing[0]}'. Restore them, or remove the lists to have splits carved."
            )
    return {split: rows.only(paths) for split, paths in wanted.items()}
