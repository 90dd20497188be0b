"""The prepared form of a task on disk, and reading it back."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.vision.data.splits import label_error
from mergeflow.modalities.vision.data.task import SPLITS

FORMAT = "mergeflow-task"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_FIELDS = ("task", "image_size", "class_names", "templates", "splits")
_AGAIN = "Prepare the task again."


@dataclass(frozen=True)
class Split:
    """A prepared split.

    Args:
        images: uint8 [N, S, S, 3], a private memory map: what is written to it never reaches the file.
        labels: int64 [N].
        class_names: label i is class_names[i].
        templates: prompts with `{}` for the class name.
    """

    images: np.ndarray
    labels: np.ndarray
    class_names: list[str]
    templates: list[str]

    def __len__(self) -> int:
        return len(self.labels)


def split_files(folder: Path, split: str) -> tuple[Path, Path, Path]:
    """Return the paths of a split's Parquet file, pixel array and label array."""
    return folder / f"{split}.parquet", folder / f"{split}.images.npy", folder / f"{split}.labels.npy"


def load_manifest(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a prepared task.

    Args:
        folder: what `prepare_task` wrote.

    Raises:
        MergeflowError: missing, unreadable, or of another format version.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MergeflowError(
            f"{path}: no manifest of a prepared task can be read ({error.strerror}). {_AGAIN}"
        ) from error
    except ValueError as error:
        raise MergeflowError(f"{path}: not valid JSON ({error}). {_AGAIN}") from error
    found = (manifest.get("format"), manifest.get("format_version")) if isinstance(manifest, dict) else (None, None)
    if found != (FORMAT, FORMAT_VERSION):
        raise MergeflowError(f"{path}: found format {found}, expected {(FORMAT, FORMAT_VERSION)}. {_AGAIN}")
    lacking = [name for name in _FIELDS if name not in manifest] or [s for s in SPLITS if s not in manifest["splits"]]
    if lacking:
        raise MergeflowError(f"{path}: no {', '.join(lacking)}. {_AGAIN}")
    return manifest


def load_split(folder: str | Path, split: str, verify: bool = False) -> Split:
    """Return a prepared split; images stay on disk until they are indexed.

    Args:
        folder: what `prepare_task` wrote.
        split: train, validation or test.
        verify: also read every pixel and compare with the manifest's SHA-256.

    Raises:
        MergeflowError: unknown split; missing, truncated or altered array; a count that differs from the manifest's; a
            label outside the class names.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    manifest = load_manifest(folder)
    record, size = manifest["splits"][split], manifest["image_size"]
    _, images_path, labels_path = split_files(Path(folder), split)
    images = _open_array(images_path, (record["count"], size, size, 3), np.dtype(np.uint8))
    labels = np.array(_open_array(labels_path, (record["count"],), np.dtype(np.int64)))
    names = manifest["class_names"]
    outside = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(outside):
        row = int(outside[0])
        raise label_error(f"{labels_path}, row {row}", int(labels[row]), names)
    if verify:
        _verify(images_path, images, record["pixels_sha256"])
        _verify(labels_path, labels, record["labels_sha256"])
    return Split(images, labels, names, manifest["templates"])


def _open_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if not path.exists():
        raise MergeflowError(f"{path}: missing, although the manifest lists it. {_AGAIN}")
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)  # torch shares writable memory alone
    except (OSError, ValueError) as error:
        expected = f"a header and {int(np.prod(shape)) * dtype.itemsize} bytes of {dtype} {list(shape)} expected"
        raise MergeflowError(
            f"{path}: not a whole NumPy array ({path.stat().st_size} bytes found, {expected}): {error}. {_AGAIN}"
        ) from error
    if array.shape != shape or array.dtype != dtype:
        raise MergeflowError(
            f"{path}: found {array.dtype} {list(array.shape)}, but the manifest says {dtype} {list(shape)}. {_AGAIN}"
        )
    return array


def _verify(path: Path, array: np.ndarray, expected: str) -> None:
    found = hashlib.sha256()
    for start in range(0, len(array), 1024):
        found.update(np.ascontiguousarray(array[start : start + 1024]).data)
    if found.hexdigest() != expected:
        raise MergeflowError(f"{path}: SHA-256 of the content is {found.hexdigest()}, expected {expected}. {_AGAIN}")
