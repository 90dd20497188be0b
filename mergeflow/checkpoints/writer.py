"""Atomic writers: a checkpoint appears whole under its name, or not at all."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

from mergeflow.checkpoints.fingerprint import BLOCK, blocks, combine, leaf_digests, raw_bytes, tensor_digest
from mergeflow.checkpoints.header import TensorInfo, build_header
from mergeflow.checkpoints.reader import TIED, tied_names
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from torch import Tensor


class StreamWriter:
    """Writes one safetensors file piece by piece, in any order and from any thread; `commit` makes it appear.

    Args:
        path: The file to make; an existing one is replaced by `commit` and untouched before.
        infos: Shape and dtype of every tensor, so that the layout is known before the first byte.
        metadata: Text to store in the header; `commit` may replace values by others of the same length.
    """

    def __init__(self, path: str | Path, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> None:
        self.path = Path(path)
        self.infos = dict(infos)
        self.metadata = dict(metadata)
        self._digests: dict[tuple[str, int], bytes] = {}
        head, self._offsets = build_header(self.infos, self.metadata)
        self._size = len(head) + sum(info.nbytes for info in self.infos.values())
        with _disk_errors(self.path, self._size):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _NamelessFile(self.path)
            try:
                self._file.allocate(self._size)
                self._file.write(head, 0)
            except OSError:
                self._file.close()
                raise

    def write(self, name: str, start: int, piece: Tensor) -> None:
        """Store a piece [n] of a flattened tensor, in its type, from an element on: a multiple of `BLOCK`."""
        info = self.infos[name]
        assert piece.dtype == info.dtype.torch, (name, piece.dtype, info.dtype)
        assert start % BLOCK == 0, start
        data, itemsize = raw_bytes(piece), info.dtype.itemsize
        for index, digest in enumerate(leaf_digests(data, itemsize)):
            self._digests[name, start + index * BLOCK] = digest
        with _disk_errors(self.path, self._size):
            self._file.write(data, self._offsets[name] + start * itemsize)

    def digests(self) -> dict[str, str]:
        """Return the digest of every tensor that was written."""
        return {
            name: tensor_digest(self._digests[name, at] for at in range(0, info.numel, BLOCK))
            for name, info in sorted(self.infos.items())
        }

    def fingerprint(self) -> str:
        """Return the fingerprint of what was written."""
        digests = self.digests()
        tensors = ((name, self.infos[name].dtype, self.infos[name].shape, digests[name]) for name in digests)
        return combine(tensors)

    def commit(self, metadata: Mapping[str, str] | None = None) -> str:
        """Make the file appear under its name, synced to disk; returns its fingerprint."""
        result = self.fingerprint()
        with _disk_errors(self.path, self._size):
            if metadata is not None:
                head, offsets = build_header(self.infos, metadata)
                assert offsets == self._offsets, "late metadata must have the length of what it replaces"
                self._file.write(head, 0)
            self._file.publish()
        return result

    def abandon(self) -> None:
        """Drop what was written."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()


_BEHIND, _WRITE = 64 * 2**20, 2  # bytes; SYNC_FILE_RANGE_WRITE


def _start_writing(descriptor: int) -> None:
    """Let the system begin to write a file to the disk; it does nothing where the system cannot."""
    with suppress(AttributeError, OSError, TypeError):  # musl, macOS, Windows
        ctypes.CDLL(None).sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _WRITE)


class _NamelessFile:
    """A file without a name (O_TMPFILE): killed half-way, nothing of it stays. A named one where that is missing."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._name: str | None = None
        self._waiting = 0  # bytes that the disk has not been asked to take; threads may miscount it a little
        try:
            self._fd = os.open(target.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
            os.stat(f"/proc/self/fd/{self._fd}")
        except (OSError, AttributeError):
            self._fd, self._name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
            os.chmod(self._name, 0o666 & ~_umask())

    def allocate(self, size: int) -> None:
        """Reserve the space, so that a full disk is found before the work."""
        try:
            os.posix_fallocate(self._fd, 0, max(size, 1))
        except OSError as error:
            if error.errno in (28, 122):  # ENOSPC, EDQUOT; other errors mean the file system cannot reserve
                raise
        os.ftruncate(self._fd, size)

    def write(self, data: bytes | memoryview, position: int) -> None:
        view = memoryview(data)
        self._waiting += len(view)
        while len(view):
            count = os.pwrite(self._fd, view, position)
            view, position = view[count:], position + count
        if self._waiting >= _BEHIND:  # the disk works while the rest is computed, not only at the end
            self._waiting = 0
            _start_writing(self._fd)

    def publish(self) -> None:
        os.fsync(self._fd)
        if self._name is None:
            self._name = self._give_name()
        os.replace(self._name, self._target)
        self._name = None
        sync_folder(self._target.parent)
        self.close()

    def _give_name(self) -> str:
        name = f"{self._target.parent}/.{self._target.name}.{os.getpid()}.{self._fd}.tmp"
        with suppress(FileNotFoundError):
            os.unlink(name)
        folder = os.open(self._target.parent, os.O_RDONLY)
        try:
            # Only with a folder descriptor does Python call linkat, which follows the link of /proc to our file.
            os.link(f"/proc/self/fd/{self._fd}", name, src_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(folder)
        return name

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._name is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._name)
            self._name = None


@contextmanager
def _disk_errors(path: Path, size: int) -> Iterator[None]:
    """Turn the errors of a full or read-only disk into one message with the way out."""
    try:
        yield
    except OSError as error:
        raise MergeflowError(
            f"cannot write '{path}' ({size / 1e6:.1f} MB): {error.strerror}. "
            "Nothing was left behind; free some space or choose another place."
        ) from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sync_folder(folder: Path) -> None:
    """Make renames inside a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_checkpoint(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """Write a state dict as one safetensors file, whole or not at all, and return its fingerprint.

    Args:
        path: File to make; folders above it are made, an existing file is replaced in one step.
        tensors: Tied ones are written as copies and listed in the metadata, so that readers that do not know them still
            find every name.
    """
    infos = {name: TensorInfo.of(tensors[name]) for name in tensors}
    ties = tied_names(tensors)
    notes = {**(metadata or {}), **({TIED: json.dumps(ties)} if ties else {})}
    with StreamWriter(path, infos, notes) as writer:
        for name in tensors:
            for number, part in enumerate(blocks(tensors[name])):
                writer.write(name, number * BLOCK, part)
        return writer.commit()


def write_text(path: str | Path, text: str) -> None:
    """Write a small text file atomically."""
    with _disk_errors(Path(path), len(text)):
        write_atomically(path, text)


def write_atomically(path: str | Path, content: str | bytes) -> None:
    """Write a small file that is there whole or not at all, and on the disk, whenever the process is killed.

    A device or a pipe, such as /dev/stdout, is written to and never replaced. Errors of the disk are passed on as they
    are: the pipeline tries a stage again after one that may pass by itself.
    """
    target, data = Path(path), content.encode() if isinstance(content, str) else content
    if is_special(target):
        target.write_bytes(data)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    file = _NamelessFile(target)
    try:
        file.write(data, 0)
        file.publish()
    finally:
        file.close()


def is_special(path: Path) -> bool:
    """Whether something is there that is neither a file nor a folder: a device, a pipe, a socket."""
    return path.exists() and not path.is_file() and not path.is_dir()


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Put a file there once more; it takes no space where the disk has hard links."""
    try:
        os.link(Path(source).resolve(), target)
    except OSError:  # another disk, or a file system without links
        shutil.copyfile(source, target)
