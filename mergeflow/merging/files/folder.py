"""The folder a merge makes: one merge at a time, resumable; it replaces an older one only when it is whole."""

import ctypes
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mergeflow.checkpoints.fingerprint import FIRST, SCHEME, tensor_digest_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import open_safetensors
from mergeflow.checkpoints.writer import sync_folder, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.files.lock import lock_file
from mergeflow.merging.files.place import check_partial, check_replaceable, partial_folder

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove an unfinished folder that nothing can resume."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class OutputFolder:
    """The folder a merge makes; entering it locks the name until the merge ends, by whatever cause.

    Beside `name` a merge at work has `.name.partial`, the unfinished folder, `.name.journal`, which of its shards are
    finished, and `.name.lock`. `.name.replaced` is an older folder for the moment in which the new one gets its name.

    Args:
        target: The folder.

    Attributes:
        partial: Where to write.
        shards: Of each finished shard, the digest of every tensor.
        inputs: Digests of the inputs' tensors that went into them, by input.
        scheme: Of these digests.

    Raises:
        MergeflowError: Another merge is at work on it, or its place cannot be written.
    """

    def __init__(self, target: Path) -> None:
        self.target = Path(os.path.abspath(target))
        beside, name = self.target.parent, self.target.name
        self.partial = partial_folder(self.target)
        self.shards: dict[str, dict[str, str]] = {}
        self.inputs: dict[str, dict[str, str]] = {}
        self.scheme = SCHEME
        self._identity: dict[str, Any] = {}
        self._journal, self._lock = beside / f".{name}.journal", beside / f".{name}.lock"
        self._replaced = beside / f".{name}.replaced"

    def __enter__(self) -> Self:
        with _writing(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            held = lock_file(self._lock)
            if held is None:
                raise MergeflowError(
                    f"another merge is at work on '{self.target}': wait for it, or choose another place (--out)."
                )
        self._held = held
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.unlink(missing_ok=True)
        os.close(self._held)

    def begin(
        self,
        identity: dict[str, Any],
        shards: Mapping[str, Mapping[str, TensorInfo]],
        resume: bool,
        scheme: str = SCHEME,
    ) -> None:
        """Make the unfinished folder; all that stays in it are the finished shards of a stopped merge to resume.

        Args:
            identity: All that the shards' content depends on, as JSON values: a stopped merge of another one starts
                again, as does one without a readable journal.
            shards: The tensors of each shard.
            resume: Whether to go on with a stopped merge. Shards whose tensors have other digests than the journal
                recorded are made again.
            scheme: Of digests; a merge that goes on keeps that of its journal.

        Raises:
            MergeflowError: Something else has the unfinished folder's name.
        """
        check_partial(self.target)
        self._identity, self.scheme = identity, scheme
        if resume:
            self._read_journal(shards)
        with _writing(self.target):
            self._bring_back()
            self.partial.mkdir(exist_ok=True)
            for path in list(self.partial.iterdir()):
                if path.name not in self.shards:
                    _remove(path)

    def _read_journal(self, shards: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        try:
            found = json.loads(self._journal.read_bytes())
            same = found["identity"] == self._identity
            finished, inputs = dict(found["shards"]), {owner: dict(seen) for owner, seen in found["inputs"].items()}
            scheme = str(found.get("scheme", FIRST))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return
        if same:
            self.inputs, self.scheme = inputs, scheme
            self.shards = {
                file: finished[file]
                for file, infos in shards.items()
                if file in finished and _digests(self.partial / file, infos, scheme) == finished[file]
            }

    def _bring_back(self) -> None:
        """Give an older folder its name again where a kill in `publish` left nothing under it; else drop it."""
        if os.path.lexists(self._replaced):
            try:
                os.replace(self._replaced, self.target)
            except OSError:  # the new folder has the name
                _remove(self._replaced)

    def finish(self, file: str, digests: dict[str, str], inputs: dict[str, dict[str, str]]) -> None:
        """Record a shard that is whole, and the digests of all inputs' tensors so far.

        Args:
            file: The shard's name.
            digests: Of its tensors, by name.
            inputs: Digests of the tensors read so far, by input and name.
        """
        self.shards[file], self.inputs = digests, inputs
        known = {"scheme": self.scheme, "identity": self._identity, "shards": self.shards, "inputs": self.inputs}
        write_text(self._journal, json.dumps(known))

    def publish(self) -> None:
        """Give the finished folder its name; it replaces an older one.

        Raises:
            MergeflowError: Somebody put files into the older one in the meantime; the finished shards are kept.
        """
        with _writing(self.target):
            try:
                check_replaceable(self.target)
            except MergeflowError as error:
                raise MergeflowError(f"{error} The shards are done: --resume uses them.") from None
            if not os.path.lexists(self.target):
                os.replace(self.partial, self.target)
            elif not _exchange(self.partial, self.target):
                os.replace(self.target, self._replaced)
                os.replace(self.partial, self.target)
                os.replace(self._replaced, self.partial)
            sync_folder(self.target.parent)
            self._journal.unlink(missing_ok=True)
        with suppress(OSError):  # what stays, the next merge removes
            _remove(self.partial)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError):
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _digests(path: Path, infos: Mapping[str, TensorInfo], scheme: str) -> dict[str, str] | None:
    """Return the digests of a file's tensors; None where it does not hold exactly these."""
    try:
        with open_safetensors(path) as state:
            if state.infos != dict(infos):
                return None
            return {name: tensor_digest_of(state, name, scheme) for name in infos}
    except (MergeflowError, OSError):
        return None


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MergeflowError(f"cannot write '{target}': {error.strerror}. Choose another place.") from None
