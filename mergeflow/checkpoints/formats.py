"""Opens every input format: a file, a sharded folder, a pickled state dict, a model folder, an adapter."""

import json
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.hub import from_hub
from mergeflow.checkpoints.lora import ADAPTER_CONFIG, open_adapter
from mergeflow.checkpoints.mistaken import mistaken
from mergeflow.checkpoints.pickles import PICKLES, open_pickle
from mergeflow.checkpoints.reader import Entry, LazyStateDict, open_safetensors
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    import torch

# What a folder may hold, in order of preference.
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
_INDEX_SUFFIX = ".index.json"
_MAX_INDEX_BYTES = 100_000_000


def open_checkpoint(path: str | Path) -> LazyStateDict:
    """Open a checkpoint without reading its data.

    Args:
        path: A safetensors file; an index of shards, or a folder with one; a `.pt`, `.pth`, `.bin` or `.ckpt` state
            dict (loaded without running code; `state_dict` and `module.` unwrapped); a Hugging Face model folder; a
            PEFT LoRA adapter folder, which opens as a task vector. What is not a path here may be a Hugging Face id,
            `owner/name` or `owner/name@revision`: the local cache is looked at first, then the network.

    Returns:
        A lazy mapping from names to tensors.

    Raises:
        MergeflowError: Nothing readable is there, it is not valid, or it holds code.
    """
    place = Path(path).expanduser()
    try:
        if place.is_dir():
            state = _open_folder(place)
            state.path = str(place)
            return state
        if not place.exists():
            return open_checkpoint(from_hub(str(path)))
    except OSError as error:  # no permission to look, or a name that is too long
        raise MergeflowError(f"cannot read checkpoint '{place}': {error.strerror}. Check the path.") from None
    if place.name.endswith(_INDEX_SUFFIX):
        return _open_index(place)
    if place.suffix in PICKLES:
        return open_pickle(place)
    return open_safetensors(place)


def read_state(path: str | Path) -> "dict[str, torch.Tensor]":
    """Return all tensors of a checkpoint, in memory of their own, by name.

    Raises:
        MergeflowError: As `open_checkpoint`.
    """
    with open_checkpoint(path) as state:
        return {name: state[name].clone() for name in state}


def _open_folder(folder: Path) -> LazyStateDict:
    if (folder / ADAPTER_CONFIG).exists():
        return open_adapter(folder, read_json(folder / ADAPTER_CONFIG))
    for name in _INDEXES:
        if (folder / name).exists():
            return _open_index(folder / name)
    for name in _WEIGHTS:
        if (folder / name).exists():
            return open_checkpoint(folder / name)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return open_safetensors(found[0])
    listed = ", ".join(path.name for path in found[:5]) or "no safetensors file"
    known = ", ".join((*_INDEXES, *_WEIGHTS, ADAPTER_CONFIG))
    raise MergeflowError(
        f"folder '{folder}' holds no checkpoint: expected one of {known} or a single safetensors file, found {listed}. "
        "Name the file itself."
    )


def _open_index(index: Path) -> LazyStateDict:
    """Open the shards that an index names; every name must be in the shard the index says."""
    places = _weight_map(index)
    shards: dict[str, LazyStateDict] = {}
    try:
        for shard in sorted(set(places.values())):
            if PurePath(shard).name != shard or shard in ("", ".", ".."):
                raise MergeflowError(f"index '{index}' names the shard '{shard}', which is not a file of its folder.")
            if not (index.parent / shard).is_file():
                raise MergeflowError(f"index '{index}' names the shard '{shard}', which is missing. Copy it there.")
            shards[shard] = open_checkpoint(index.parent / shard)
        return _joined(index, places, shards)
    except BaseException:
        for state in shards.values():
            state.close()
        raise


def _joined(index: Path, places: dict[str, str], shards: dict[str, LazyStateDict]) -> LazyStateDict:
    missing = sorted(name for name, shard in places.items() if name not in shards[shard])
    extra = sorted(name for shard, state in shards.items() for name in state if places.get(name) != shard)
    if missing or extra:
        raise MergeflowError(
            f"index '{index}' does not fit its shards: missing {missing[:5]}, not in the index {extra[:5]}. "
            "Some file belongs to another version: copy the folder again."
        )
    entries: dict[str, Entry] = {}
    infos: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for state in shards.values():
        entries.update(state.entries)
        infos.update(state.infos)
        metadata.update(state.metadata)
    files = tuple(file for state in shards.values() for file in state.detach_files())
    held = tuple(tuple(state) for state in shards.values()) if len(shards) > 1 else ()
    return LazyStateDict(str(index.parent), entries, infos, metadata, files, shards=held)


def _weight_map(index: Path) -> dict[str, str]:
    parsed = read_json(index)
    places = parsed.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(shard, str) for shard in places.values()):
        raise MergeflowError(f"index '{index}' has no weight_map of names to files. Copy it again.")
    return places


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON object.

    Raises:
        MergeflowError: It is too large, not JSON, or not an object.
    """
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise MergeflowError(f"'{path}' is too large for a JSON file of this kind.")
        content = path.read_bytes()
    except OSError as error:
        raise MergeflowError(f"cannot read '{path}': {error.strerror}. Check the path.") from None
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError) as error:
        other = mistaken(content[:256], "JSON")
        if other is not None:
            raise MergeflowError(f"'{path}' {other}.") from None
        raise MergeflowError(f"'{path}' is not a readable JSON file ({type(error).__name__}). Copy it again.") from None
    if not isinstance(parsed, dict):
        raise MergeflowError(f"'{path}' holds a {type(parsed).__name__}, not an object.")
    return parsed
