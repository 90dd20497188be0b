"""Texts for language models: a user's own, read from folders as the modality `causal` reads a task, in blocks."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path

import numpy as np
import torch

from mergeflow.data.arrays import SPLITS
from mergeflow.data.task import Example
from mergeflow.errors import MergeflowError
from mergeflow.modalities.causal.modality import PackedText, cut
from mergeflow.modalities.causal.preparation import open_folder
from mergeflow.modalities.causal.tokenizer import CausalTokenizer

KIND = "folder:"


def splits_of(place: str, root: Path) -> Mapping[str, Callable[[], Iterator[Example]]]:
    if not place.startswith(KIND):
        raise MergeflowError(f"'{place}' is not a folder of texts")
    return open_folder(place, place.removeprefix(KIND), 0, root).splits


def check_places(study: str, places: Iterable[object], root: Path) -> None:
    """Refuse, before anything is trained, folders that a study cannot read.

    Args:
        places: `folder:PATH`; what is no text is generated, and passed over.
    """
    faults = []
    for place in (place for place in places if isinstance(place, str)):
        try:
            lacking = [split for split in SPLITS if split not in splits_of(place, root)]
        except MergeflowError as error:
            faults.append(str(error))
            continue
        if lacking:
            faults.append(f"'{place}' has no texts of the split {' and '.join(lacking)}")
    if faults:
        raise MergeflowError(
            f"the study {study} cannot read its texts:\n"
            + "\n".join(f"  {fault}" for fault in faults)
            + "\nName each task's texts folder:PATH, a folder with train.txt, validation.txt and test.txt, or with "
            "folders of these names."
        )


def folder_documents(place: str, split: str, count: int, root: Path | None = None) -> Iterator[str]:
    """Yield the first documents of a split; `check_places` has seen that it is there."""
    pieces = (example.read() for example in splits_of(place, root or Path.cwd())[split]())
    whole = (list(document) for _, document in groupby(pieces, key=lambda piece: piece["document"]))
    yield from islice(("".join(piece["text"] for piece in document) for document in whole), count)


def packed(name: str, texts: Iterable[str], tokenizer: CausalTokenizer, block: int, device: torch.device) -> PackedText:
    """Return texts as examples of `block` tokens, the end of a text behind each."""
    ids = [token for text in texts for token in (*tokenizer.encode(text), tokenizer.end)]
    return PackedText(name, cut(np.array(ids), block, tokenizer.end), device, tokenizer.prefix)
