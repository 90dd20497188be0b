"""Paths and URIs: list, open and decode files wherever fsspec reaches, and tell which split they hold."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec import AbstractFileSystem

from mergeflow.data.arrays import quoted
from mergeflow.errors import MergeflowError

_ALIASES = {
    "train": ("train", "training"),
    "validation": ("validation", "val", "valid", "dev"),
    "test": ("test", "testing"),
}
_SPLIT_NAMES = {alias: split for split, aliases in _ALIASES.items() for alias in aliases}
SPLIT_ALIASES = tuple(_SPLIT_NAMES)
_OF_SYSTEMS = (".", "__MACOSX", "Thumbs.db", "desktop.ini")  # what file managers leave in folders


def split_of(name: str) -> str | None:
    """Return the split that a file or folder name stands for, or None.

    Example:
        >>> split_of("val"), split_of("Train"), split_of("extra")
        ('validation', 'train', None)
    """
    return _SPLIT_NAMES.get(name.lower())


@dataclass(frozen=True)
class Location:
    """A file or folder on some file system."""

    files: Any
    path: str

    @classmethod
    def open(cls, uri: str) -> "Location":
        """Return the location of a path or URI that exists."""
        try:
            files, path = fsspec.core.url_to_fs(uri)
            exists = files.exists(path)
        except ImportError as error:
            raise MergeflowError(f"'{uri}': {error}. Install the package that reads this kind of URI.") from error
        # Every file system has errors of its own for "cannot connect" and "not allowed".
        except Exception as error:
            raise MergeflowError(
                f"'{uri}' cannot be opened ({type(error).__name__}: {error}). Check the address, the network and the "
                "credentials."
            ) from error
        if not exists:
            raise MergeflowError(f"'{uri}': no such file or folder. Check the path.")
        return cls(files, path.rstrip("/") or path)

    def is_file(self) -> bool:
        """Return whether this is one file."""
        return bool(self.files.isfile(self.path))

    def list_files(self) -> list[tuple[str, ...]]:
        """Return every file below, sorted, as its path parts from here; hidden files and folders are left out."""
        return [parts for parts, kind in self._below() if kind == "file"]

    def list_folders(self) -> list[tuple[str, ...]]:
        """Return every folder below, sorted, as its path parts from here; hidden ones are left out."""
        return [parts for parts, kind in self._below() if kind == "directory"]

    def join(self, parts: Sequence[str]) -> str:
        """Return the path of a file below."""
        return "/".join((self.path, *parts))

    def open_file(self, path: str) -> IO[bytes]:
        """Open a file for reading; one with the ending .gz is decompressed."""
        stream: IO[bytes] = self.files.open(path, "rb", compression="gzip" if path.endswith(".gz") else None)
        return stream

    def read(self, path: str) -> bytes:
        """Return the bytes of a file."""
        with self.open_file(path) as stream:
            return stream.read()

    def _below(self) -> list[tuple[tuple[str, ...], str]]:
        entries = self._find()
        below = []
        for path, info in entries.items():
            parts = tuple(path[len(self.path) :].strip("/").split("/"))
            if parts != ("",) and not any(part.startswith(_OF_SYSTEMS) for part in parts):
                kind = self._kind_behind(path, info) if info.get("islink") else info["type"]
                below.append((parts, kind))
                if kind == "directory" and info.get("islink"):  # `find` stops at a link
                    below += [((*parts, *inner), location) for inner, location in Location(self.files, path)._below()]
        return sorted(below)

    def _find(self) -> dict[str, Any]:
        """List the files and folders below, by path, down to links."""
        if type(self.files).walk is not AbstractFileSystem.walk:  # a store of objects, which lists all at once
            listed: dict[str, Any] = self.files.find(self.path, withdirs=True, detail=True)
            return listed
        inside_of: dict[str, Any] = {}
        folders = [self.path]
        while folders:
            folder = folders.pop()
            try:
                inside = {info["name"].rstrip("/"): info for info in self.files.ls(folder, detail=True)}
            except OSError as error:
                raise MergeflowError(
                    f"'{folder}' cannot be read ({error.strerror or error}): allow it, or move it elsewhere."
                ) from error
            inside.pop(folder, None)
            inside_of |= inside
            folders += [path for path, info in inside.items() if info["type"] == "directory" and not info.get("islink")]
        return inside_of

    def _kind_behind(self, path: str, info: Mapping[str, Any]) -> str:
        """Follow a symbolic link; a link that is left out would make a task smaller unnoticed."""
        if self.files.isdir(path):
            if Path(path).parent.resolve().is_relative_to(Path(path).resolve()):
                raise MergeflowError(f"{path} is a link to a folder that holds it. Remove the link.")
            return "directory"
        if self.files.isfile(path):
            return "file"
        raise MergeflowError(
            f"{path} is a link to {info.get('destination')}, which is not there. Bring it back, or remove the link."
        )


def decoded(content: bytes, path: str) -> str:
    """Return the text that a file holds."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        marked = content.startswith((b"\xff\xfe", b"\xfe\xff"))
        fault = "it begins as UTF-16 does" if marked else f"byte {error.start} is {content[error.start]:#04x}"
        raise MergeflowError(f"{path} is not a text in UTF-8: {fault}. Convert it to UTF-8.") from None


_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.[\w.]+$")


def list_shards(location: Location, task_name: str, ending: str = "parquet") -> dict[str, list[str]]:
    """Return the files of each split; one file alone is a training split from which the others are carved.

    Files of a folder are named after their split (also val, valid, dev), or lie in one folder for each, in `data/` too.
    """
    if location.is_file():
        return {"train": [location.path]}
    shards: dict[str, list[str]] = {}
    others: dict[str, str] = {}
    unknown = []
    endings = (f".{ending}",) if ending == "parquet" else (f".{ending}", f".{ending}.gz")
    for parts in location.list_files():
        inner = parts[1:] if parts[0] == "data" else parts
        split = split_of(re.split(r"[-_.]", inner[-1])[0]) if len(inner) == 1 else split_of(inner[0])
        if not parts[-1].lower().endswith(endings):
            others.setdefault(split or "", "/".join(parts))
        elif split is None or len(inner) > 2:
            unknown.append("/".join(parts))
        else:
            shards.setdefault(split, []).append(location.join(parts))
    if shards:
        unknown += [name for split, name in others.items() if split and split not in shards]
    if unknown or "train" not in shards:
        kind = {"parquet": "Parquet"}.get(ending, ending.upper())
        content = quoted(unknown) or ", ".join(shards) or f"no {kind} file"
        content += f", but {quoted(list(others.values()))}" if others and not (unknown or shards) else ""
        raise MergeflowError(
            f"task '{task_name}': {location.path} holds {content}; expected shards of train and, where there are, of "
            f"validation and test: train-*.{ending}, validation-*.{ending} and test-*.{ending}, or train.{ending} ..., "
            f"or train/*.{ending} ..., in the folder or in its data/. Rename the files."
        )
    for split, paths in shards.items():
        _check_whole(location, split, paths)
    return shards


def _check_whole(location: Location, split: str, paths: Sequence[str]) -> None:
    """A numbered set must be whole: a download that stopped half-way would otherwise pass as a smaller data set."""
    totals: dict[str, set[int]] = {}
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in paths:
        if match := _SHARD.search(path):
            name, total = path[: match.start()], int(match[2])
            totals.setdefault(name, set()).add(total)
            numbers.setdefault((name, total), set()).add(int(match[1]))
    for (name, total), present in numbers.items():
        missing = sorted(set(range(total)) - present)
        if missing or len(totals[name]) > 1:
            raise MergeflowError(
                f"{location.path}: split '{split}', {name.rsplit('/', 1)[-1]}-*, has {len(present)} of {total} shards; "
                f"missing: {missing[:10]}. Download the snapshot again."
            )
