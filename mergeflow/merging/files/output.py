"""Where a merge writes: the place checked, the folder locked and exchanged whole, and the files written."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Any, Self

from mergeflow.checkpoints.fingerprint import (
    BLOCK,
    combine,
    leaf_digests,
    tensor_digest,
    tensor_digest_of,
)
from mergeflow.checkpoints.folders import code_files, named_folders
from mergeflow.checkpoints.formats import DIFFUSERS, PICKLES, expanded, read_json_if_whole
from mergeflow.checkpoints.header import FLOATS, TensorInfo
from mergeflow.checkpoints.names import tied_weights, untied_config
from mergeflow.checkpoints.reader import KIND, TIED, LazyStateDict, open_safetensors
from mergeflow.checkpoints.writer import is_special, sync_folder, write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.vocabulary.companions import MORE, write_json

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


def lock_file(path: Path) -> int | None:
    """Open a file for appending, made when missing, and lock it; None where another process has the lock.

    Closing the descriptor, or the process's end by whatever cause, gives the lock back. On a file system without locks
    everybody gets one.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                if isinstance(error, BlockingIOError):
                    return None
                raise
        try:
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass  # The holder before removed its file between our opening and our locking.
        os.close(descriptor)


RECORD = "mergeflow.json"
CARD_HEAD = "---\n# Written by mergeflow: the next merge into this place replaces it.\n"
# Keys in the header of a file that a merge, `vector`, `compress`, `extract-task` or `convert` made.
EXTRACTED, CONVERTED = "mergeflow.extracted", "mergeflow.converted"
_MADE_HERE = {"mergeflow.recipe", KIND, EXTRACTED, CONVERTED}


def check_place(out: str | None, shard_size: int | None, inputs: Mapping[str, str], force: bool = False) -> Path:
    """Return the path of a merge's result, as `check_out`; even by force its card replaces no file of others."""
    target = check_out(out, shard_size, inputs, force)
    check_card(target.with_suffix(".md") if target.suffix == ".safetensors" else target / "README.md")
    return target


def check_out(out: str | None, shard_size: int | None, inputs: Mapping[str, str], force: bool = False) -> Path:
    """Return the path of a result, checked.

    Args:
        inputs: Paths of what is read, by name: never overwritten.
        force: Whether a file that mergeflow did not make may be replaced; a folder never is.
    """
    if not out:
        raise MergeflowError("no output: give `out` in the recipe or --out.")
    target = expanded(out)
    single = target.suffix == ".safetensors"
    if single and shard_size is not None:
        raise MergeflowError(f"`shard_size` makes a folder, but out is the file '{out}': name a folder, or remove it.")
    if not single and target.suffix in PICKLES:
        raise MergeflowError(f"out '{out}': results are safetensors. End it in .safetensors, or name a folder.")
    try:
        _check_place(target, single, inputs)
        if single and not force:
            _check_replaceable_file(target)
    except OSError as error:  # no permission to look, or a name that is too long
        raise MergeflowError(f"cannot write '{out}': {error.strerror}. Choose another place.") from None
    return target


def check_file(out: str | Path, inputs: Mapping[str, str], force: bool = False) -> Path:
    """Return the path of a result that is one safetensors file, checked as `check_out` does."""
    if Path(out).suffix != ".safetensors":
        raise MergeflowError(f"out '{out}': the result is one file, end it in .safetensors.")
    return check_out(str(out), None, inputs, force)


def _check_place(target: Path, single: bool, inputs: Mapping[str, str]) -> None:
    real = target.resolve()
    for name, path in inputs.items():
        source = Path(path).resolve()
        inside = source.is_dir() and (real == source or source in real.parents)
        if real == source or inside or real in source.parents or _same_file(real, source):
            raise MergeflowError(f"out '{target}' would overwrite the input '{name}' ({path}): choose another place.")
    if is_special(target):
        raise MergeflowError(f"out '{target}' is a device, a pipe or a socket: name a file or a folder.")
    if single and target.is_dir():
        raise MergeflowError(f"out '{target}' is a folder: give another name.")
    if not single and target.is_file():
        raise MergeflowError(f"out '{target}' is a file: end it in .safetensors to make one file, or name a folder.")
    if not single:
        _check_replaceable(target)
        _check_partial(target)
    parent = next(folder for folder in real.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        fault = "is not a folder" if not parent.is_dir() else "may not be written"
        raise MergeflowError(f"cannot write '{target}': '{parent}' {fault}. Choose another place.")


def check_card(path: Path) -> None:
    """Check that a card may be written: at most an older card of ours is there."""
    if path.is_dir() or is_special(path) or (path.exists() and not path.read_bytes().startswith(CARD_HEAD.encode())):
        raise MergeflowError(
            f"the model card would overwrite '{path}', which no merge made: give `out` another name or move that file."
        )


def _same_file(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and a.samefile(b)


def _partial_folder(target: Path) -> Path:
    return target.parent / f".{target.name}.partial"


def _check_partial(target: Path) -> None:
    unfinished = _partial_folder(target)
    if unfinished.is_symlink() or unfinished.is_file():
        raise MergeflowError(f"'{unfinished}', where the unfinished folder belongs, is a file or a link: move it.")


def _check_replaceable_file(file: Path) -> None:
    """Check that a file may be replaced: nothing is there, nothing is in it, or mergeflow made it."""
    if not os.path.lexists(file) or (file.is_file() and file.stat().st_size == 0):
        return
    try:
        with open_safetensors(file) as checkpoint:
            is_ours = not checkpoint.metadata.keys().isdisjoint(_MADE_HERE)
    except MergeflowError:
        is_ours = False
    if not is_ours:
        raise MergeflowError(
            f"out '{file}' exists and was not made by a merge: choose another place, move it, or give --force "
            "(force=True) to replace it."
        )


def _check_replaceable(folder: Path) -> None:
    """Check that a merge may replace a folder: by its record, a merge wrote all its files."""
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if not held:
        return
    try:
        record = json.loads((folder / RECORD).read_bytes())
        recorded = {RECORD, *record.get("files", [])}
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        raise MergeflowError(
            f"out '{folder}' exists and was not made by a merge: choose another place or remove it."
        ) from None
    strange = sorted(held - recorded)
    if strange:
        more = f" … and {len(strange) - 5} more" if len(strange) > 5 else ""
        raise MergeflowError(
            f"out '{folder}' would be replaced, but holds what its {RECORD} does not list as the merge's own: "
            f"{', '.join(strange[:5])}{more}. Move that, remove the folder, or choose another place."
        )


def lock_output(lock: Path, target: Path) -> int:
    """Lock an output for one merge at a time; return the lock's descriptor."""
    with writing(target):
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = lock_file(lock)
    if held is None:
        raise MergeflowError(f"another merge is at work on '{target}': wait for it, or choose another place (--out).")
    return held


_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class OutputFolder:
    """The folder a merge makes; entering it locks the name until the merge ends, by whatever cause.

    Beside `name` a merge at work has `.name.partial`, the unfinished folder, `.name.journal`, which of its shards are
    finished, and `.name.lock`. `.name.replaced` is an older folder for the moment in which the new one gets its name.

    Attributes:
        shards: Of each finished shard, the digest of every tensor.
        inputs: Digests of the inputs' tensors that went into them, by input.
    """

    def __init__(self, target: Path) -> None:
        self.target = Path(os.path.abspath(target))
        parent, name = self.target.parent, self.target.name
        self.partial = _partial_folder(self.target)
        self.shards: dict[str, dict[str, str]] = {}
        self.inputs: dict[str, dict[str, str]] = {}
        self._identity: dict[str, Any] = {}
        self._journal, self._lock = parent / f".{name}.journal", parent / f".{name}.lock"
        self._replaced = parent / f".{name}.replaced"

    def __enter__(self) -> Self:
        self._held = lock_output(self._lock, self.target)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.unlink(missing_ok=True)
        os.close(self._held)

    def begin(self, identity: dict[str, Any], shards: Mapping[str, Mapping[str, TensorInfo]], resume: bool) -> None:
        """Make the unfinished folder; only the finished shards of a stopped merge to resume stay in it.

        Args:
            identity: All that the shards' content depends on, as JSON values: a stopped merge of another one starts
                again, as does one without a readable journal.
            resume: Whether to go on with a stopped merge. Shards whose tensors have other digests than the journal
                recorded are made again.
        """
        _check_partial(self.target)
        self._identity = identity
        if resume:
            self._read_journal(shards)
        with writing(self.target):
            self._bring_back()
            self.partial.mkdir(exist_ok=True)
            for path in list(self.partial.iterdir()):
                if path.name not in self.shards:
                    _remove(path)

    def _read_journal(self, shards: Mapping[str, Mapping[str, TensorInfo]]) -> None:
        try:
            journal = json.loads(self._journal.read_bytes())
            same = journal["identity"] == self._identity
            finished, inputs = dict(journal["shards"]), {owner: dict(seen) for owner, seen in journal["inputs"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return
        if same:
            self.inputs = inputs
            self.shards = {
                file: finished[file]
                for file, infos in shards.items()
                if file in finished and held_digests(self.partial / file, infos) == finished[file]
            }

    def _bring_back(self) -> None:
        """Give an older folder its name again where a kill in `publish` left nothing under it; else drop it."""
        if os.path.lexists(self._replaced):
            try:
                os.replace(self._replaced, self.target)
            except OSError:  # the new folder has the name
                _remove(self._replaced)

    def finish(self, file: str, digests: dict[str, str], inputs: dict[str, dict[str, str]]) -> None:
        """Record a shard that is whole, and the digests of all inputs' tensors so far."""
        self.shards[file], self.inputs = digests, inputs
        journal = {"identity": self._identity, "shards": self.shards, "inputs": self.inputs}
        write_text(self._journal, json.dumps(journal))

    def write_record(self, record: Mapping[str, Any], *later: str) -> None:
        """Write the record of what the folder holds, with the names of its files and of those that come `later`."""
        files = sorted({RECORD, *later, *(path.name for path in self.partial.iterdir())})
        write_text(self.partial / RECORD, json.dumps({**record, "files": files}, indent=2, ensure_ascii=False))

    def publish(self) -> None:
        """Give the finished folder its name; it replaces an older one."""
        with writing(self.target):
            try:
                _check_replaceable(self.target)
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


def held_digests(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, str] | None:
    """Return the digests of a file's tensors; None where it does not hold exactly these."""
    try:
        with open_safetensors(path) as state:
            if state.infos != dict(infos):
                return None
            return {name: tensor_digest_of(state, name) for name in infos}
    except (MergeflowError, OSError):
        return None


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Say where it was that the system would not write."""
    try:
        yield
    except OSError as error:
        raise MergeflowError(f"cannot write '{target}': {error.strerror}. Choose another place.") from None


_COPIED = ("*.json", "*.txt", "*.model", "*.model.*", "*.bpe", "*.jinja", "*.tiktoken", "LICENSE*")
_WEIGHTS = (*PICKLES, ".safetensors")
# Notes of the training that made the base, which say nothing of the merged model.
_TRAINING = re.compile(
    r"(?:trainer_state|training_args|(?:all|train|eval|predict)_results|wandb.*|optimizer.*)\.json|adapter_.*"
)
_PATHS = re.compile(r"(?:.*name_or_path|.*_file|.*_path|.*_dir)$")


@dataclass
class Digests:
    """Collects the digests of all pieces that are read: per owner and tensor, from those of its blocks."""

    lock: Lock = field(default_factory=Lock)
    blocks: dict[tuple[str, str], dict[int, bytes]] = field(default_factory=dict)
    tensors: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, owner: str, name: str, start: int, data: memoryview, itemsize: int) -> None:
        """Add the digest of a piece of an owner's tensor, which starts at a multiple of the fingerprints' `BLOCK`."""
        leaves = {start + at * BLOCK: leaf for at, leaf in enumerate(leaf_digests(data, itemsize))}
        with self.lock:
            self.blocks.setdefault((owner, name), {}).update(leaves)

    def settle(self) -> None:
        """Turn the blocks seen so far into digests of tensors."""
        for (owner, name), leaves in self.blocks.items():
            self.tensors.setdefault(owner, {})[name] = tensor_digest(leaves[at] for at in sorted(leaves))
        self.blocks.clear()

    def fingerprint(self, owner: str, infos: Mapping[str, TensorInfo]) -> str:
        """Compute the fingerprint of an owner whose tensors have all been read."""
        return fingerprint_of(infos, self.tensors.get(owner, {}))


def fingerprint_of(infos: Mapping[str, TensorInfo], digests: Mapping[str, str]) -> str:
    """Compute a fingerprint from the digests of its tensors, by name."""
    return combine((name, info.dtype, info.shape, digests[name]) for name, info in sorted(infos.items()))


def identity_of(paths: Mapping[str, str]) -> dict[str, list[Any]]:
    """Read path, size and time of every input file: enough to see whether a stopped merge's inputs changed."""
    identity: dict[str, list[Any]] = {}
    for owner, path in paths.items():
        place = Path(path)
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
        identity[owner] = [str(place.resolve()), *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]
    return identity


def tie_notes(tied: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the note of a file's header on its tensors that share storage, by the first name of each group."""
    held = set(names)
    ties = {name: first for name, first in tied.items() if name in held and first in held}
    return {TIED: json.dumps(ties)} if ties else {}


def weights_stem(base: Path) -> str:
    """Return the beginning of the names of a result's weights, by which the library that made the base finds them."""
    return DIFFUSERS if base.is_dir() and any(base.glob(f"{DIFFUSERS}*")) else "model"


def shard_file(index: int, count: int, stem: str = "model") -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def output_infos(infos: Mapping[str, TensorInfo], dtype: str | None) -> dict[str, TensorInfo]:
    """Return shape and type of every tensor of the result."""
    wanted = FLOATS[dtype] if dtype else None
    return {
        name: TensorInfo(info.shape, wanted if wanted and info.dtype.is_floating_point else info.dtype)
        for name, info in infos.items()
    }


def shard_names(infos: Mapping[str, TensorInfo], size: int | None) -> list[tuple[str, ...]]:
    """Split the tensors, in order of name, into files of at most `size` bytes (one tensor at least)."""
    if size is None:
        return [tuple(sorted(infos))]
    shards: list[list[str]] = [[]]
    held = 0
    for name in sorted(infos):
        if shards[-1] and held + infos[name].nbytes > size:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += infos[name].nbytes
    return [tuple(shard) for shard in shards]


def shards_like(states: Sequence[LazyStateDict], infos: Mapping[str, TensorInfo]) -> tuple[tuple[str, ...], ...]:
    """Return the tensors of each file, of the size of the states' largest; none where none of them has several."""
    sizes = [sum(state.infos[name].nbytes for name in held) for state in states for held in state.shards]
    return tuple(shard_names(infos, max(sizes))) if sizes else ()


def write_index(folder: Path, shards: Mapping[str, Iterable[str]], size: int) -> None:
    """Write which shard holds which tensor, where there is more than one."""
    if len(shards) > 1:
        places = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        stem = next(iter(shards)).partition("-")[0]
        write_text(folder / f"{stem}.safetensors.index.json", json.dumps(index, indent=2))


def copy_companions(
    base: Path, folder: Path, dtype: str | None = None, config: Mapping[str, Any] | None = None
) -> None:
    """Copy configuration, tokenizer and licence of a model folder, and the code and folders that these name.

    Never weights, their index, or an adapter's notes. Where the result has a type of its own, config.json says so.
    """
    if not base.is_dir():
        return
    for pattern in (*_COPIED, *code_files(base)):
        for file in sorted(base.glob(pattern)):
            taken = file.name.endswith(".index.json") or file.name == RECORD or file.suffix in _WEIGHTS
            if file.is_file() and not taken and not _TRAINING.fullmatch(file.name):
                shutil.copyfile(file, folder / file.name)
    for name in {MORE, *named_folders(base)}:
        if (base / name).is_dir():
            shutil.copytree(base / name, folder / name, dirs_exist_ok=True)
    if config is not None:
        write_json(folder / "config.json", config)
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        _forget_paths(folder / name)
    config = read_json_if_whole(folder / "config.json")
    key = next((key for key in ("dtype", "torch_dtype") if key in config), None)
    if dtype is not None and key is not None and config[key] != dtype:
        write_json(folder / "config.json", {**config, key: dtype})


def untie(config: Path, loaded: Mapping[str, Any], before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Mark head and embedding in a result's config.json as two weights, where they were one in the base.

    Without it transformers would tie the two again, and one of them would be lost. `before` and `after` are the
    digests of the base's and the result's tensors.
    """
    times = Counter(before.values())
    changed = [name for name in after if name in before and after[name] != before[name]]
    if not config.is_file() or all(times[before[name]] == 1 for name in changed):
        return  # asking transformers, which is slow to import, is of no use
    ties = tied_weights(loaded, after)
    if any(
        copy in before and before[copy] == before.get(origin) and after[copy] != after[origin]
        for copy, origin in ties.items()
    ):
        write_json(config, untied_config(read_json_if_whole(config)))


def _forget_paths(path: Path) -> None:
    """Take this machine's paths out of a configuration, where older versions note from where it was loaded."""
    config = read_json_if_whole(path)
    local = {
        key: Path(value).name
        for key, value in config.items()
        if isinstance(value, str) and _PATHS.fullmatch(key) and expanded(value).is_absolute()
    }
    if local:
        write_json(path, {**config, **local})
