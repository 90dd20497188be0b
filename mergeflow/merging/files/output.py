"""What a merge leaves beside the tensors: digests of all that passed, and companions of the weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from mergeflow.checkpoints.fingerprint import BLOCK, SCHEME, combine, leaf_digests, tensor_digest
from mergeflow.checkpoints.folders import named_folders
from mergeflow.checkpoints.formats import PICKLES
from mergeflow.checkpoints.header import FLOATS, TensorInfo
from mergeflow.checkpoints.names import head_and_embedding, loaded_name
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.checkpoints.writer import write_text
from mergeflow.merging.files.place import RECORD
from mergeflow.merging.vocabulary.companions import MORE

_COPIED = ("*.json", "*.txt", "*.model", "*.model.*", "*.bpe", "*.jinja", "*.tiktoken", "LICENSE*")
_WEIGHTS = (*PICKLES, ".safetensors")
# Notes of the training that made the base, which say nothing of the merged model.
_TRAINING = re.compile(
    r"(?:trainer_state|training_args|(?:all|train|eval|predict)_results|wandb.*|optimizer.*)\.json|adapter_.*"
)
_IMPORTED = re.compile(r"^\s*from \.(?:(\w+)\S* import| import (\w+))", re.MULTILINE)
_PATHS = re.compile(r"(?:.*name_or_path|.*_file|.*_path|.*_dir)$")


@dataclass
class Digests:
    """Collects the digests of everything that passes: per owner and tensor, from those of its blocks."""

    scheme: str = SCHEME
    lock: Lock = field(default_factory=Lock)
    blocks: dict[tuple[str, str], dict[int, bytes]] = field(default_factory=dict)
    tensors: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, owner: str, name: str, start: int, data: memoryview, itemsize: int) -> None:
        """Take a piece of a tensor that passes.

        Args:
            owner: Whose tensor it is: "base", an expert's name.
            name: The tensor.
            start: Its first element in the flattened tensor: a multiple of the fingerprints' `BLOCK`.
            data: Its bytes, as stored.
            itemsize: Bytes of an element.
        """
        found = {start + at * BLOCK: one for at, one in enumerate(leaf_digests(data, itemsize, self.scheme))}
        with self.lock:
            self.blocks.setdefault((owner, name), {}).update(found)

    def settle(self) -> None:
        """Turn the blocks seen so far into digests of tensors."""
        for (owner, name), found in self.blocks.items():
            self.tensors.setdefault(owner, {})[name] = tensor_digest((found[at] for at in sorted(found)), self.scheme)
        self.blocks.clear()

    def fingerprint(self, owner: str, infos: Mapping[str, TensorInfo]) -> str:
        """Return the fingerprint of an owner whose tensors have all passed."""
        digests = self.tensors.get(owner, {})
        tensors = ((name, info.dtype, info.shape, digests[name]) for name, info in sorted(infos.items()))
        return combine(tensors, self.scheme)


def identity_of(paths: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return path, size and time of every input file: enough to see that a stopped merge's inputs are unchanged."""
    found: dict[str, list[Any]] = {}
    for owner, path in paths.items():
        place = Path(path)
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        stats = [(file.name, file.stat()) for file in files if file.is_file()]
        found[owner] = [str(place.resolve()), *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]
    return found


def shard_file(index: int, count: int) -> str:
    """Return the name of one file of a model folder."""
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


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
    """Write which shard holds which tensor, where there is more than one.

    Args:
        folder: Where the shards are.
        shards: The names of the tensors in each file.
        size: Bytes of all tensors together.
    """
    if len(shards) > 1:
        places = {name: file for file, names in shards.items() for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2))


def copy_companions(base: Path, folder: Path, dtype: str | None = None, own: Mapping[str, Any] | None = None) -> None:
    """Copy configuration, tokenizer and licence of a model folder, and the code and folders that these name.

    Never weights, their index, or an adapter's notes. Where the result has a type of its own, config.json says so.

    Args:
        base: The model folder; of a single file nothing is copied.
        folder: Where to.
        dtype: The result's type, where it has one of its own.
        own: The result's config.json, where it is not the base's.
    """
    if not base.is_dir():
        return
    for pattern in (*_COPIED, *_custom_code(base)):
        for file in sorted(base.glob(pattern)):
            taken = file.name.endswith(".index.json") or file.name == RECORD or file.suffix in _WEIGHTS
            if file.is_file() and not taken and not _TRAINING.fullmatch(file.name):
                shutil.copyfile(file, folder / file.name)
    for name in {MORE, *named_folders(base)}:
        if (base / name).is_dir():
            shutil.copytree(base / name, folder / name, dirs_exist_ok=True)
    if own is not None:
        write_text(folder / "config.json", json.dumps(dict(own), indent=2, ensure_ascii=False) + "\n")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        _forget_paths(folder / name)
    config = _config(folder / "config.json")
    key = next((key for key in ("dtype", "torch_dtype") if key in config), None)
    if dtype is not None and key is not None and config[key] != dtype:
        write_text(folder / "config.json", json.dumps({**config, key: dtype}, indent=2, ensure_ascii=False) + "\n")


def untie(config: Path, loaded: Mapping[str, Any], before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Say in a result's config.json that head and embedding are two weights, where they were one in the base.

    Without it transformers would tie the two again, and one of them would be lost.

    Args:
        config: The file.
        loaded: The base's.
        before: Digests of the base's tensors.
        after: Digests of the result's.
    """
    stored = {loaded_name(loaded, name): name for name in after}
    pair = head_and_embedding(loaded, stored)
    if pair is None or not config.is_file() or pair[0] not in stored:
        return
    head, embedding = (stored[name] for name in pair)
    if head in before and before[head] == before.get(embedding) and after[head] != after[embedding]:
        text = json.dumps({**_config(config), "tie_word_embeddings": False}, indent=2, ensure_ascii=False)
        write_text(config, text + "\n")


def _forget_paths(path: Path) -> None:
    """Take this machine's paths out of a configuration, where older versions note from where it was loaded."""
    config = _config(path)
    local = {
        key: Path(value).name
        for key, value in config.items()
        if isinstance(value, str) and _PATHS.fullmatch(key) and Path(value).expanduser().is_absolute()
    }
    if local:
        write_text(path, json.dumps({**config, **local}, indent=2, ensure_ascii=False) + "\n")


def _custom_code(base: Path) -> list[str]:
    """Return the Python files of a folder that its `auto_map` names, as "modeling_x.XModel", and those they import."""
    found: list[str] = []
    for name in ("config.json", "tokenizer_config.json"):
        entries = _config(base / name).get("auto_map")
        for entry in entries.values() if isinstance(entries, dict) else ():
            for one in entry if isinstance(entry, list) else [entry]:
                if isinstance(one, str) and re.fullmatch(r"\w+\.\w+", one):  # not "other/repository--module.Class"
                    found.append(f"{one.partition('.')[0]}.py")
    for name in found:  # grows on the way
        text = (base / name).read_text(encoding="utf-8", errors="replace") if (base / name).is_file() else ""
        imported = (f"{module}.py" for pair in _IMPORTED.findall(text) for module in pair if module)
        found += [file for file in dict.fromkeys(imported) if file not in found]
    return found


def _config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
