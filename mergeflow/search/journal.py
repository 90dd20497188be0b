"""A journal of finished work: lines appended whole, so that a killed process continues where it stopped."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mergeflow.errors import MergeflowError
from mergeflow.merging.files.output import lock_file

_FORMAT = 1


class Journal:
    """A file of JSON lines, each with a key; the first says which inputs all others belong to.

    One process at a time holds it, from its making to `close`. A line that a kill cut short is dropped when the file is
    opened again.

    Args:
        path: The file; made when missing, and removed by `close` when nothing was written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Any] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        held = lock_file(path)
        if held is None:
            raise MergeflowError(
                f"another process is at work on '{path}': wait for it, or choose another folder (--out)."
            )
        self._file = held

    def recorded(self) -> dict[str, Any]:
        """Return the inputs that the file's entries belong to; none where it has none, or is not a journal."""
        try:
            return dict(json.loads(self.path.read_bytes().partition(b"\n")[0])["inputs"])
        except (ValueError, TypeError, KeyError):
            return {}

    def begin(self, inputs: dict[str, Any]) -> None:
        """Read what is known."""
        self.entries = self._read(inputs)

    def _read(self, inputs: dict[str, Any]) -> dict[str, Any]:
        whole, end, _ = self.path.read_bytes().rpartition(b"\n")
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            entries = {line["key"]: line["value"] for line in lines[1:]}
            first: dict[str, Any] = {"format": _FORMAT, "inputs": inputs} if not lines else lines[0]
            before: dict[str, Any] | None = dict(first["inputs"]) if first["format"] == _FORMAT else None
        except (ValueError, TypeError, KeyError):
            before = None
        if before is None:
            raise MergeflowError(
                f"'{self.path}' is not a journal of this version: remove it, or choose another folder."
            )
        differing = sorted(key for key in {*before, *inputs} if before.get(key) != inputs.get(key))
        if differing:
            raise MergeflowError(
                f"'{self.path}' holds results of other inputs ({', '.join(differing)} changed): "
                "choose another folder (--out), or remove the file to start again."
            )
        os.ftruncate(self._file, len(whole) + len(end))
        if not lines:
            self._write(first)
        return entries

    def known(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the value of an entry, computed and written now where it is not known yet."""
        if key not in self.entries:
            self.append(key, compute())
        return self.entries[key]

    def append(self, key: str, value: Any) -> None:
        """Add an entry; on return it is on the disk."""
        self._write({"key": key, "value": value})
        self.entries[key] = value

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False).encode() + b"\n"
        written = os.write(self._file, text)
        if written != len(text):
            raise MergeflowError(f"cannot write '{self.path}': the disk is full. Free some space and run again.")
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file, so that another process may go on."""
        if os.fstat(self._file).st_size == 0:
            self.path.unlink(missing_ok=True)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
