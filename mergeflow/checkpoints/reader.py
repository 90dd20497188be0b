"""Lazy state dicts: a mapping of names to tensors whose data stays in the files until it is read.

Data is read by position (`preadv`) into buffers of the caller, not through a memory map: a map of eight checkpoints
counts all their pages as the process's own memory, and copying is no slower (see docs/performance.md).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, Self

from mergeflow.checkpoints.header import TensorInfo, read_header
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

# Keys of our notes in a file's metadata.
KIND = "mergeflow.kind"
BASE = "mergeflow.base"  # of a task vector: the fingerprint of its base
TIED = "mergeflow.tied"


class Entry(Protocol):
    """Where the data of one tensor comes from."""

    def read(self, start: int, stop: int, /) -> Tensor:
        """Return elements start..stop of the flattened tensor, [stop − start], in the storage type."""
        ...


@dataclass(frozen=True)
class ComputedEntry:
    """A tensor that is computed when it is read: (first element, end) of the flattened tensor → its elements."""

    read: Callable[[int, int], Tensor]


# Files of which only the header is on this machine, by device and inode, and what puts the whole ones in their places.
ABSENT: dict[tuple[int, int], Callable[[], None]] = {}


@dataclass
class OpenFile:
    """An open file that several entries share."""

    path: str
    descriptor: int
    bring: Callable[[], None] | None = None  # puts the whole file in its place, where only the header is there
    lock: Lock = field(default_factory=Lock)

    def make_whole(self) -> None:
        """Bring the file before its first tensor is read, where only its header is on this machine."""
        if self.bring is None:
            return
        with self.lock:
            if self.bring is not None:
                self.bring()
                whole = os.open(self.path, os.O_RDONLY)
                os.dup2(whole, self.descriptor, inheritable=False)
                os.close(whole)
                self.bring = None

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True)
class FileEntry:
    """A tensor stored in a safetensors file."""

    file: OpenFile
    offset: int
    info: TensorInfo

    def read(self, start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=self.info.dtype.torch)
        self.read_into(out, start)
        return out

    def read_ahead(self, start: int, stop: int) -> None:
        """Ask the system to read elements start..stop from the disk in the background, unless it has them in memory."""
        size = self.info.dtype.itemsize
        first, last = self.offset + start * size, self.offset + stop * size - 1
        if hasattr(os, "posix_fadvise") and last >= first and not _in_memory(self.file.descriptor, last):
            os.posix_fadvise(self.file.descriptor, first, last - first + 1, os.POSIX_FADV_WILLNEED)

    def read_into(self, out: Tensor, start: int) -> None:
        """Fill the flat, contiguous `out` [n] (storage type) from element `start` on."""
        if out.numel() == 0:
            return
        self.read_bytes(out.view(torch.uint8).numpy().data, start)

    def read_bytes(self, view: memoryview, start: int) -> None:
        """Fill writable memory with the bytes of elements from `start` on."""
        self.file.make_whole()
        position = self.offset + start * self.info.dtype.itemsize
        done = 0
        while done < len(view):
            count = os.preadv(self.file.descriptor, [view[done:]], position + done)
            if count == 0:
                raise MergeflowError(f"'{self.file.path}' became shorter while it was read: was it overwritten?")
            done += count


def _in_memory(descriptor: int, position: int) -> bool:
    """Whether the system can give a byte of a file without the disk; to ask takes a fortieth of an announcement."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], position, os.RWF_NOWAIT))
    except (OSError, AttributeError):  # it would have to wait; or the system cannot tell
        return False


@dataclass(frozen=True)
class TensorEntry:
    """A tensor that is already in memory (or mapped by torch)."""

    tensor: Tensor

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor.reshape(-1)[start:stop]


@dataclass(eq=False, repr=False)
class LazyStateDict(Mapping[str, "Tensor"]):
    """A read-only state dict over files; use it as a context manager or call `close`.

    Tensors of a task vector or an adapter are differences from a base; a name that is missing means zero.
    """

    path: str  # what was opened
    entries: Mapping[str, Entry]  # where the data of each tensor comes from
    infos: dict[str, TensorInfo]  # known without reading data
    metadata: dict[str, str]
    files: tuple[OpenFile, ...] = ()
    is_task_vector: bool = False
    tied: Mapping[str, str] = field(default_factory=dict)  # names that share storage, each with the first of its group
    absolute: frozenset[str] = frozenset()  # of a task vector: whole weights all the same, as of retrained modules
    shards: tuple[tuple[str, ...], ...] = ()  # the names in each file, in order, where an index lists several
    config: Mapping[str, Any] | None = None  # config.json of tensors of several models; None: the files' own counts
    notes: tuple[str, ...] = ()  # what else the file holds, and is not read

    def __getitem__(self, name: str) -> Tensor:
        info = self.infos[name]
        return self.entries[name].read(0, info.numel).reshape(info.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def __contains__(self, name: object) -> bool:
        return name in self.infos

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return a piece of a flattened tensor, [stop − start], in its storage type; it may share memory."""
        return self.entries[name].read(start, stop)

    def read_into(self, name: str, out: Tensor, start: int) -> None:
        """Fill `out` [n], flat, contiguous and of any type, with the elements of a flattened tensor from `start` on."""
        entry = self.entries[name]
        if isinstance(entry, FileEntry) and out.dtype == self.infos[name].dtype.torch and out.device.type == "cpu":
            entry.read_into(out, start)
        else:
            out.copy_(entry.read(start, start + out.numel()))

    def read_ahead(self, name: str, start: int, stop: int) -> None:
        """Announce that a piece of a tensor will be read soon; it does nothing for tensors that are in memory."""
        entry = self.entries.get(name)
        if isinstance(entry, FileEntry):
            entry.read_ahead(start, stop)

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names, by their old ones; those that are not among them keep theirs."""

        def new(name: str) -> str:
            return names.get(name, name)

        self.infos = {new(name): info for name, info in self.infos.items()}
        self.entries = {new(name): entry for name, entry in self.entries.items()}
        self.tied = {new(name): new(first) for name, first in self.tied.items()}
        self.absolute = frozenset(map(new, self.absolute))
        self.shards = tuple(tuple(map(new, held)) for held in self.shards)

    def detach_files(self) -> tuple[OpenFile, ...]:
        """Hand the open files over to another state dict that shares the entries."""
        files, self.files = self.files, ()
        return files

    def close(self) -> None:
        """Close the files; reading afterwards fails."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


def unreadable(path: str | Path, error: OSError) -> MergeflowError:
    """Return the error for a checkpoint that the system does not give."""
    return MergeflowError(f"cannot read checkpoint '{path}': {error.strerror}. Check the path.")


def open_safetensors(path: str | Path) -> LazyStateDict:
    """Open one safetensors file; its header is validated whole before this returns."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise unreadable(path, error) from None
    status = os.fstat(descriptor)
    file = OpenFile(str(path), descriptor, ABSENT.get((status.st_dev, status.st_ino)))
    try:
        with os.fdopen(os.dup(descriptor), "rb") as stream:
            header = read_header(stream, str(path))
    except OSError as error:
        file.close()
        raise unreadable(path, error) from None
    except BaseException:
        file.close()
        raise
    entries = {name: FileEntry(file, header.offsets[name], info) for name, info in header.infos.items()}
    vector = header.metadata.get(KIND) == "task_vector"
    tied = _recorded_ties(header.metadata.get(TIED, "{}"), header.infos)
    return LazyStateDict(str(path), entries, header.infos, header.metadata, (file,), vector, tied)


def _recorded_ties(text: str, infos: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Ties that a writer of ours noted; a note that does not fit the tensors is void."""
    try:
        ties = json.loads(text)
        return {name: first for name, first in ties.items() if infos[name] == infos[first] and first < name}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def tied_names(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names whose tensor is another name's tensor too, each with the first name of its group."""
    if isinstance(state, LazyStateDict):
        return dict(state.tied)
    seen: dict[tuple[object, ...], str] = {}
    ties = {}
    for name in sorted(state):
        tensor = state[name]
        key = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and seen.setdefault(key, name) != name:
            ties[name] = seen[key]
    return ties


def view(
    state: LazyStateDict,
    names: Iterable[str] | None = None,
    entries: Mapping[str, Entry] | None = None,
    infos: Mapping[str, TensorInfo] | None = None,
    tied: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> LazyStateDict:
    """Return a state with some of its tensors, or others, and other ties and names; the files stay the state's own."""
    entries, infos, ties = entries or state.entries, infos or state.infos, state.tied if tied is None else tied
    infos = {name: infos[name] for name in (infos if names is None else names)}
    made = replace(
        state,
        entries={name: entries[name] for name in infos},
        infos=infos,
        files=(),
        tied={name: first for name, first in ties.items() if name in infos and first in infos},
        absolute=state.absolute & infos.keys(),
        notes=(),
    )
    made.rename(rename or {})
    return made


def infos_of_file(state: LazyStateDict) -> dict[str, TensorInfo]:
    """Return the tensors without those that are others once more: a tied weight may have been laid under two names."""
    first = {id(state.entries[name]): name for name in reversed(list(state.entries))}
    return {name: info for name, info in state.infos.items() if first[id(state.entries[name])] == name}


_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PARALLEL, _AVERAGED = "module.", "n_averaged"  # of DataParallel; torch's AveragedModel has a counter beside it


def unwrap(state: LazyStateDict) -> None:
    """Take out of names what torch.compile, FSDP and DataParallel put into them, and no model has."""
    plain = {name: _WRAPPERS.sub("", name) for name in state}
    if plain and all(name.startswith(_PARALLEL) or other == _AVERAGED for other, name in plain.items()):
        plain = {name: _WRAPPERS.sub("", other.removeprefix(_PARALLEL)) for name, other in plain.items()}
    names: dict[str, str] = {}
    for name, other in plain.items():
        if names.setdefault(other, name) != name:
            raise MergeflowError(f"'{state.path}' holds '{name}' and '{names[other]}', which are both '{other}'.")
    if any(name != other for name, other in plain.items()):
        state.rename(plain)
