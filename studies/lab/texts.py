"""Texts of a user's own, read from folders as the modality `causal` reads a task."""

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path

from mergeflow.data.task import Example
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.sources.folder import open_folder

KIND = "folder:"


def splits_of(place: str, root: Path) -> Mapping[str, Callable[[], Iterator[Example]]]:
    """Return the splits of a place `folder:PATH`.

    Raises:
        MergeflowError: it is no such place, or the folder cannot be read.
    """
    if not place.startswith(KIND):
        raise MergeflowError(f"'{place}' is not a folder of texts")
    return open_folder(place, place.removeprefix(KIND), 0, root).splits


def folder_documents(place: str, split: str, count: int, root: Path | None = None) -> Iterator[str]:
    """Yield the first documents of a split.

    Raises:
        MergeflowError: the folder has no such split.
    """
    splits = splits_of(place, root or Path.cwd())
    if split not in splits:
        raise MergeflowError(
            f"'{place}' has no texts of the split {split}: it needs train.txt, validation.txt and test.txt, or folders "
            "of these names."
        )
    pieces = (example.read() for example in splits[split]())
    whole = (list(document) for _, document in groupby(pieces, key=lambda piece: piece["document"]))
    yield from islice(("".join(piece["text"] for piece in document) for document in whole), count)
