"""The prepared form of a task on disk: named arrays for each split and a manifest; and reading them back."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mergeflow.errors import MergeflowError, unknown_name

SPLITS = ("train", "validation", "test")
FORMAT = "mergeflow-task"
FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_FIELDS = ("task", "decoding", "class_names", "templates", "splits")
_AGAIN = "Prepare the task again."


@dataclass(frozen=True)
class Split:
    """A prepared split: arrays by name, one row for every example. `split.labels` is `split.arrays["labels"]`.

    Args:
        arrays: private memory maps: what is written to them never reaches the files. Images have `images` (uint8
            [N, S, S, 3]) and `labels` (int64 [N]).
    """

    arrays: Mapping[str, np.ndarray]
    class_names: list[str]
    templates: list[str]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_") or name not in self.arrays:
            raise AttributeError(f"this split has no array '{name}': it has {', '.join(self.arrays)}")
        return self.arrays[name]


def array_file(folder: Path, split: str, name: str) -> Path:
    """Return the path of one array of a split."""
    return folder / f"{split}.{name}.npy"


def load_manifest(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a prepared task, which `prepare_task` wrote."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MergeflowError(
            f"{path}: no manifest of a prepared task can be read ({error.strerror}). {_AGAIN}"
        ) from error
    except ValueError as error:
        raise MergeflowError(f"{path}: not valid JSON ({error}). {_AGAIN}") from error
    version = (manifest.get("format"), manifest.get("format_version")) if isinstance(manifest, dict) else (None, None)
    if version != (FORMAT, FORMAT_VERSION):
        raise MergeflowError(f"{path}: found format {version}, expected {(FORMAT, FORMAT_VERSION)}. {_AGAIN}")
    lacking = [name for name in _FIELDS if name not in manifest] or [s for s in SPLITS if s not in manifest["splits"]]
    if lacking:
        raise MergeflowError(f"{path}: no {', '.join(lacking)}. {_AGAIN}")
    return manifest


def digest_of_split(record: Mapping[str, Any]) -> str:
    """Return one digest of a split's arrays, by which registered models know what they were trained on."""
    return hashlib.sha256("".join(array["sha256"] for array in record["arrays"].values()).encode()).hexdigest()


def load_split(folder: str | Path, split: str, verify: bool = False) -> Split:
    """Open a prepared split; arrays stay on disk until they are indexed.

    To `verify`, every array is read whole and compared with the manifest's SHA-256.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    manifest = load_manifest(folder)
    record, names = manifest["splits"][split], manifest["class_names"]
    arrays = {}
    for name, array in record["arrays"].items():
        path = array_file(Path(folder), split, name)
        arrays[name] = _open_array(path, (record["count"], *array["shape"]), np.dtype(array["dtype"]))
        if verify:
            _verify(path, arrays[name], array["sha256"])
    if names:
        labels = arrays["labels"] = np.array(arrays["labels"])
        outside = np.flatnonzero((labels < 0) | (labels >= len(names)))
        if len(outside):
            row = int(outside[0])
            raise label_error(f"{array_file(Path(folder), split, 'labels')}, row {row}", int(labels[row]), names)
    return Split(arrays, names, manifest["templates"])


def label_error(where: str, label: object, class_names: Sequence[str]) -> MergeflowError:
    """Return the error for a label that no class name belongs to."""
    return MergeflowError(
        f"{where}: label {label} is outside the class names (0 to {len(class_names) - 1}, "
        f"'{class_names[0]}' to '{class_names[-1]}'). Correct the label or name the class; "
        "a split without labels (-1) cannot be used."
    )


def quoted(names: Sequence[str], limit: int = 5) -> str:
    """Return names in quotes, those after the first few as a number.

    Example:
        >>> quoted(["cat", "dog", "emu"], limit=2)
        "'cat', 'dog' and 1 more"
    """
    shown = ", ".join(f"'{name}'" for name in names[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _open_array(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if not path.exists():
        raise MergeflowError(f"{path} is missing, although the manifest lists it. {_AGAIN}")
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
    digest = hashlib.sha256()
    for start in range(0, len(array), 1024):
        digest.update(np.ascontiguousarray(array[start : start + 1024]).data)
    if digest.hexdigest() != expected:
        raise MergeflowError(f"{path}: SHA-256 of the content is {digest.hexdigest()}, expected {expected}. {_AGAIN}")
