"""One split of a torchvision folder as a table of paths and labels."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

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
        split: names the rows, with their index.
    """
    keys = [(f"{split}/{row:06d}.png", int(label)) for row, label in enumerate(labels)]
    return Rows(keys, lambda row: Image.fromarray(images[row]))


def select_rows(rows: Rows, wanted: dict[str, set[str]], base: Path) -> dict[str, Rows]:
    """Return the rows of every official list.

    Args:
        rows: all that the data set holds.
        wanted: list to the names of its files.
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
