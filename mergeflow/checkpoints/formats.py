"""Opens every input format: a file, a sharded folder, a pickled state dict, a model folder, an adapter."""

import json
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.hub import from_hub
from mergeflow.checkpoints.lora import ADAPTER_CONFIG, open_adapter
from mergeflow.checkpoints.mistaken import mistaken
from mergeflow.checkpoints.pickles import is_pickle, open_pickle
from mergeflow.checkpoints.reader import Entry, LazyStateDict, open_safetensors
from mergeflow.checkpoints.views import unwrap
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    import torch

# The weights of a model folder in the order in which `from_pretrained` of transformers looks for them.
_TRANSFORMERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
_INDEX_SUFFIX = ".index.json"
_MAX_INDEX_BYTES = 100_000_000


def open_checkpoint(path: str | Path) -> LazyStateDict:
    """Open a checkpoint without reading its data.

    Args:
        path: A safetensors file; an index of shards, or a folder with one; a state dict of `torch.save`, alone or in
            what a training run saved (no code is run; `module.` is unwrapped); a Hugging Face model folder; a PEFT LoRA
            adapter folder, which opens as a task vector. What is not a path here may be a Hugging Face id,
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
    state = _open_index(place) if place.name.endswith(_INDEX_SUFFIX) else _open_file(place)
    unwrap(state)
    return state


def _open_file(path: Path) -> LazyStateDict:
    return open_pickle(path) if is_pickle(path) else open_safetensors(path)


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
    names = weights_in(folder)
    if not names:
        listed = ", ".join(path.name for path in sorted(folder.glob("*.safetensors"))[:5]) or "no safetensors file"
        expected = ", ".join((*_TRANSFORMERS, *_OPEN_CLIP, ADAPTER_CONFIG))
        raise MergeflowError(
            f"folder '{folder}' holds no checkpoint: expected one of {expected} or a single safetensors file, found "
            f"{listed}. Name the file itself."
        )
    try:
        return open_checkpoint(folder / names[0])
    except MergeflowError as error:
        if len(names) == 1:
            raise
        others = "', '".join(names[1:])
        raise MergeflowError(f"{error} The folder also holds '{others}': name that file if it is the one.") from None


def weights_in(folder: Path) -> list[str]:
    """Return the weights that a folder holds by their file's name, or their index's; the first is what is loaded.

    A folder may hold a model twice: transformers' and open_clip's files, or a file that an older sharded save left.
    """
    open_clip_first = (folder / "open_clip_config.json").exists() and not (folder / "config.json").exists()
    order = (*_OPEN_CLIP, *_TRANSFORMERS) if open_clip_first else (*_TRANSFORMERS, *_OPEN_CLIP)
    names = [name for name in order if (folder / name).exists()]
    if names:
        return names
    others = [path.name for path in folder.glob("*.safetensors")]
    return others if len(others) == 1 else []


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
            shards[shard] = _open_file(index.parent / shard)
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
