"""config.json of a model folder, found from the path of its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.formats import read_json
from mergeflow.checkpoints.reader import LazyStateDict

if TYPE_CHECKING:
    from torch import Tensor

# Files that a model folder's config.json speaks of; any other file may lie beside a config of something else.
_WEIGHTS = re.compile(r"(?:model|pytorch_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)(?:\.index\.json)?$")


def folder_of(state: Mapping[str, Tensor]) -> Path | None:
    """Return the folder of the model or adapter that a state dict was opened from; None where there is none."""
    return folder_at(state.path) if isinstance(state, LazyStateDict) else None


def folder_at(place: str) -> Path | None:
    """Return the folder of a model or adapter by the path of its weights, or its own; None where there is none."""
    path = Path(place)
    return path if path.is_dir() else path.parent if _WEIGHTS.match(path.name) else None


def named_folders(folder: Path | None) -> list[str]:
    """Return the subfolders that a model's configurations name, as modules.json of sentence-transformers does."""
    if folder is None or not folder.is_dir():
        return []
    files = {folder / "modules.json", *folder.glob("config*.json"), *folder.glob("*_config.json")}
    texts: list[str] = []
    for file in files:
        with suppress(OSError, ValueError, RecursionError):  # what cannot be read names nothing
            texts += _texts(json.loads(file.read_bytes()))
    tops = {text.removeprefix("./").partition("/")[0] for text in texts}
    return sorted(name for name in tops if name not in ("", ".", "..") and (folder / name).is_dir())


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def config_of(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return config.json of the model that a state dict was opened from; {} in memory, or where there is none.

    Raises:
        MergeflowError: It is not a readable JSON object.
    """
    if isinstance(state, LazyStateDict) and state.config is not None:
        return dict(state.config)
    folder = folder_of(state)
    if folder is None or not (folder / "config.json").is_file():
        return {}
    return read_json(folder / "config.json")
