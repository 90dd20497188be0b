"""Open every input format: a file, a sharded folder, a pickled state dict, a model folder, an adapter, a Hub id."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from functools import partial, reduce
from operator import getitem
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.lora import ADAPTER_CONFIG, ADAPTER_PICKLE, ADAPTER_WEIGHTS, open_adapter
from mergeflow.checkpoints.reader import (
    LazyStateDict,
    TensorEntry,
    open_safetensors,
    tied_names,
    unreadable,
    unwrap,
)
from mergeflow.checkpoints.sniff_format import cut_short, first_bytes, is_pickled, mistaken, other_archive
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ID = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:@(?P<revision>[\w][\w./-]*))?")
_CACHED = re.compile(r"(?:^|/)models--([\w][\w.-]*?)--([\w][\w.-]*)/snapshots/")
_FILES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt", ".json", ".yaml", ".yml", ".gguf")
_WEIGHTS = ("*.safetensors", "*.bin")
COMPANIONS = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.bpe", "*.py", "LICENSE*", "README.md")
# Steps of sentence-transformers, such as 1_Pooling, and more chat templates.
_COMPANION_FOLDERS = re.compile(r"(?:\d+_\w+|additional_chat_templates)/[^/]+$")


def from_hub(name: str) -> Path:
    """Return the local folder of a model by its Hugging Face id, `owner/name` or `owner/name@revision`.

    A model in the local cache is taken from there without asking the network, so `owner/name` is then the commit that
    was downloaded last; a revision is a branch, tag or commit.
    """
    match = _ID.fullmatch(name)
    if not match or not is_id(name):
        raise MergeflowError(f"there is no checkpoint at '{name}'{_seen_from(name)}. Check the path.")
    return _cached(*match.groups()) or _downloaded(*match.groups())


def _seen_from(name: str) -> str:
    """Return which folder a path is taken from, where it is relative."""
    return "" if Path(name).is_absolute() else f" (seen from '{Path.cwd()}')"


def expanded(path: str | Path) -> Path:
    """Put the home folder in place of `~`; `~name` of nobody stays as it is, where `Path.expanduser` raises."""
    return Path(os.path.expanduser(path))


def fixed_id(name: str) -> str:
    """Return `owner/name@commit` for a model of the cache, so that a recorded recipe reads the same files for ever.

    Anything else, such as a path of this machine, is returned unchanged.
    """
    match = _ID.fullmatch(name)
    if not match or expanded(name).exists():
        return name
    try:
        folder = from_hub(name)
    except MergeflowError:
        return name
    return f"{match.group('repo')}@{folder.name}"


def is_id(name: str) -> bool:
    """Whether a name has the form of a Hugging Face id and is not a path of this machine."""
    # If a folder `models` is here, `models/base` is a mistyped path and must not be looked up on a server.
    return bool(_ID.fullmatch(name)) and not name.endswith(_FILES) and not Path(name).parent.is_dir()


def local_folder(name: str) -> Path | None:
    """Return the folder of a model by its path, or by its id in the local cache; the network is not used."""
    place, match = expanded(name), _ID.fullmatch(name)
    if place.is_dir():
        return place
    return _cached(*match.groups()) if match and is_id(name) else None


def cached_id(path: str) -> str | None:
    """Return the id of a model that lies in the local cache, by its path; None for one that lies elsewhere."""
    match = _CACHED.search(path)
    return "/".join(match.groups()) if match else None


def _cached(repo: str, revision: str | None) -> Path | None:
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:  # not installed; or every version of the client has another class for "not in the cache"
        return None
    # A tokenizer alone may have been downloaded, by whatever needed no more.
    return folder if any(path for pattern in _WEIGHTS for path in folder.glob(pattern)) else None


def _downloaded(repo: str, revision: str | None) -> Path:
    try:
        import huggingface_hub as hub

        model = hub.model_info(repo, revision=revision, timeout=10)
        listed = [file.rfilename for file in model.siblings or ()]
        files = [file for file in listed if "/" not in file]
        weights = _WEIGHTS[0] if any(file.endswith(".safetensors") for file in files) else _WEIGHTS[1]
        wanted = [file for file in files if any(fnmatchcase(file, pattern) for pattern in (weights, *COMPANIONS))]
        wanted += [file for file in listed if _COMPANION_FOLDERS.match(file)]
        return Path(hub.snapshot_download(repo, revision=model.sha, allow_patterns=wanted))
    except ImportError:
        raise MergeflowError(
            f"there is no checkpoint at '{repo}'; to read it as a Hugging Face id, install huggingface_hub."
        ) from None
    except Exception as error:  # no network, no such model, or a licence not accepted: the client's message says which
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].removesuffix(".")[:160]
        raise MergeflowError(
            f"there is no checkpoint at '{repo}': the path does not exist{_seen_from(repo)}, and as a Hugging Face id "
            f"it is neither in the local cache nor can it be downloaded ({reason}). Check the path, or run "
            f"`hf download {repo}` with a network."
        ) from None


PICKLES = (".pt", ".pth", ".bin", ".ckpt")
# Keys under which training runs keep a model's state dict, in order of preference; `module` is DeepSpeed's.
_NESTED = ("state_dict", "model_state_dict", "model", "module")
_ADVICE = f"Save the state dict alone, or under one of the keys {', '.join(_NESTED)}."


def is_pickle(path: Path) -> bool:
    """Whether a file is to be read as one of torch.save: by its ending, or for unusual endings by its first bytes."""
    if path.suffix in (*PICKLES, ".safetensors"):
        return path.suffix in PICKLES
    try:
        return is_pickled(first_bytes(path))
    except OSError:  # opening it raises the error
        return False


def open_pickle(path: Path) -> LazyStateDict:
    """Open a pickled state dict; its data stays in the file where the format allows it."""
    tensors, notes = _unwrap(_load(path), path)
    infos = {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}
    entries = {name: TensorEntry(tensor.detach().resolve_neg().resolve_conj()) for name, tensor in tensors.items()}
    return LazyStateDict(str(path), entries, infos, {}, tied=tied_names(tensors), notes=notes)


def _load(path: Path) -> Any:
    try:
        start = first_bytes(path)
        # Only files in the zip format can be mapped; older ones are read whole.
        zipped = start.startswith(b"PK\x03\x04")
        with torch.serialization.safe_globals([*_numbers(), *(_classes(path) if zipped else [])]):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except OSError as error:  # mapping a file that is cut short is an "invalid argument" to the system
        raise (_refused(path, b"", "EOF") if error.errno == errno.EINVAL else unreadable(path, error)) from None
    except Exception as error:  # the reader raises whatever a damaged or hostile file leads it to
        raise _refused(path, start, str(error) or type(error).__name__) from None
    if of_class := next(filter(None, _owners(loaded, set())), ""):
        raise _refused(path, start, f"GLOBAL {of_class}")
    return loaded


def _numbers() -> list[Any]:
    """Return NumPy's classes, which training scripts save scores and random states with; loading them runs no code."""
    import numpy as np

    makers = {"scalar": np.float64(0).__reduce__()[0], "_reconstruct": np.zeros(1).__reduce__()[0]}
    places = ("numpy.core.multiarray", "numpy._core.multiarray")
    functions = [(function, f"{place}.{name}") for place in places for name, function in makers.items()]
    kinds = {type(np.dtype(kind)) for kind in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"}
    return [np.dtype, np.ndarray, *kinds, *functions]


# Classes, also of bound methods: other names in lower case are functions, so code.
_CLASS = re.compile(
    r".+\.[A-Z]\w*|(?:datetime|collections|numpy\.random\._pickle)\.\w+"
    r"|builtins\.(?:int|float|bool|str|list|dict|tuple|type|object|getattr)"
)


def _classes(path: Path) -> list[tuple[Any, str]]:
    """Return a placeholder for each class that a file names and torch does not load; none is imported or run."""
    names = filter(_CLASS.fullmatch, torch.serialization.get_unsafe_globals_in_checkpoint(path))
    return [(type("Placeholder", (), {"__new__": partial(_placeholder, name)}), name) for name in names]


def _placeholder(name: str, cls: type, *args: Any) -> Any:
    """Return a mapping for torch to fill in an object's place: this type alone may have entries and attributes."""
    made = OrderedDict[Any, Any]()
    vars(made).update(of_class=name, args=args)
    return [*args[0]] if name == "collections.deque" else made


def _owners(value: Any, seen: set[int], owner: str = "") -> Iterator[str]:
    """Yield for every tensor in a value the class of the object that holds it, as a whole saved model does, or ""."""
    if isinstance(value, torch.Tensor):
        yield owner
    elif isinstance(value, Mapping | list | tuple | set) and id(value) not in seen:
        seen.add(id(value))  # a hostile pickle may hold one mapping many times
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _owners(part, seen, owner)
        attributes = getattr(value, "__dict__", {})
        for part in attributes.values():
            yield from _owners(part, seen, owner or str(attributes.get("of_class", "")))


def _refused(path: Path, start: bytes, reason: str) -> MergeflowError:
    """Return an error in place of torch's, which advises to run the file's code."""
    if other := mistaken(start, "pickle"):
        return MergeflowError(f"'{path}' {other}.")
    if cut_short(path, start, reason):
        size = path.stat().st_size
        return MergeflowError(f"'{path}' is cut short: it ends after {size} bytes. Copy or download it again.")
    if archive := other_archive(path) if is_pickled(start) else None:
        return MergeflowError(f"'{path}' is {archive}.")
    wanted = re.search(r"GLOBAL ([\w.]+)", reason)
    if wanted:
        what = f"it wants to load '{wanted.group(1)}', so it holds code, which is never run"
    elif "Unsupported operand" in reason:
        what = "it is damaged, or was saved with a `pickle_protocol` above 3"
    elif "weights_only" in reason:
        what = "it is damaged, or it holds code, which is never run"
    else:
        what = f"it is damaged ({reason.splitlines()[0].split('. ')[0][:120]})"
    return MergeflowError(
        f"'{path}' is not a plain state dict: {what}. Save the state dict alone where the file was made, best as "
        "safetensors: safetensors.torch.save_file(model.state_dict(), 'model.safetensors')."
    )


def _unwrap(loaded: Any, path: Path) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the model's state dict in a checkpoint, and a note that names the others."""
    if not isinstance(loaded, Mapping):
        kind = type(loaded).__name__
        raise MergeflowError(f"'{path}' holds a {kind}, not a state dict of named tensors. {_ADVICE}")
    states = _states(loaded)
    chosen = _chosen(list(states))
    if len(chosen) != 1:
        raise _no_state(loaded, path, chosen)
    state = states.pop(chosen[0])
    if any(value.layout != torch.strided or value.is_quantized for value in state.values()):
        raise MergeflowError(f"'{path}' holds sparse or quantised tensors, which cannot be merged: convert them first.")
    if any(value.is_meta for value in state.values()):
        raise MergeflowError(f"'{path}' holds tensors on torch's device `meta`, without data: save the loaded model.")
    return state, (*_others(path, chosen[0], list(states)), *_versions(reduce(getitem, chosen[0], loaded), path))


def _versions(state: Any, path: Path) -> Iterator[str]:
    """Yield a note where a module's version, which its class asks for, is in the file and in no file of a merge."""
    with suppress(AttributeError, TypeError):  # in a hostile file it is anything
        version = state._metadata[""]["version"]
        if type(version) is int and version != 1:  # torch.nn.Module's own
            yield (
                f"'{path}' is of a module of version {version}, which the result cannot say and some classes ask for "
                f"(MNASNet): `state = OrderedDict(state); state._metadata = {{'': {{'version': {version}}}}}`"
            )


def _states(
    loaded: Mapping[Any, Any], depth: int = 3, seen: set[int] | None = None
) -> dict[tuple[str, ...], dict[str, Tensor]]:
    """Return the state dicts in a checkpoint by the keys that lead to them, without plain numbers and texts."""
    inner: dict[tuple[str, ...], dict[str, Tensor]] = {}
    seen = set() if seen is None else seen
    tensors = {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}
    rest = [value for key, value in loaded.items() if key not in tensors and _may_hold_a_model(key)]
    has_arrays = any(value.ndim for value in tensors.values())  # else they may be counters of the run
    weights = has_arrays or (depth == 3 and tensors and len(tensors) == len(loaded))
    if weights and all(isinstance(key, str) for key in tensors) and not any(True for _ in _owners(rest, set())):
        return {(): tensors}
    for key in filter(_may_hold_a_model, loaded):
        value = loaded[key]
        if depth and isinstance(value, Mapping) and "param_groups" not in value and id(value) not in seen:
            seen.add(id(value))  # a hostile pickle may hold one mapping many times
            inner |= {(key, *keys): state for keys, state in _states(value, depth - 1, seen).items()}
    return {} if has_arrays and not any(keys[0] in _NESTED for keys in inner) else inner


def _chosen(states: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the keys of the state dict that a training run keeps its model under; several where none says which."""
    level = 0
    while key := next((key for key in _NESTED if any(keys[level : level + 1] == (key,) for keys in states)), None):
        states, level = [keys for keys in states if keys[level : level + 1] == (key,)], level + 1
    return states


def _others(path: Path, chosen: tuple[str, ...], others: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Name the state dicts that are not read, such as moving averages, and how to take one of them."""
    if not others:
        return ()
    listed = "', '".join(".".join(keys) for keys in others)
    return (f"'{path.name}' holds '{'.'.join(chosen)}', which is read, and '{listed}', not read: "
            f"{_file_of(path, others[0])} makes a file of it",)  # fmt: skip


def _file_of(path: Path, keys: Sequence[str]) -> str:
    """Return the line of Python that saves a state dict inside a file by itself."""
    with suppress(ValueError):  # of an older format
        if torch.serialization.get_unsafe_globals_in_checkpoint(path):
            loaded = f"torch.load({path.name!r}, weights_only=False)"
            return f"{_saved(loaded, keys)} (it runs the file's code: if you trust that)"
    return _saved(f"torch.load({path.name!r})", keys)


def _saved(loaded: str, keys: Sequence[str]) -> str:
    return f"torch.save({loaded}{''.join(f'[{key!r}]' for key in keys)}, 'other.pt')"


def _may_hold_a_model(key: Any) -> bool:
    return isinstance(key, str) and "optim" not in key and "scheduler" not in key


def _no_state(loaded: Mapping[Any, Any], path: Path, several: list[tuple[str, ...]]) -> MergeflowError:
    if several:
        listed = ", ".join(".".join(keys) for keys in several[:5])
        line = _file_of(path, several[0])
        return MergeflowError(f"'{path}' holds {len(several)} state dicts: {listed}. {_ADVICE[:-1]}: {line}")
    key = next((key for key in _NESTED if isinstance(loaded.get(key), Mapping)), None)
    if key is not None:
        return _no_state(loaded[key], path, [])
    if not loaded:
        return MergeflowError(f"'{path}' holds an empty state dict. {_ADVICE}")
    odd = [str(key) for key, value in loaded.items() if not (isinstance(key, str) and isinstance(value, torch.Tensor))]
    return MergeflowError(f"'{path}' has entries that are not named tensors: {', '.join(odd[:5])}. {_ADVICE}")


# The weights of a model folder in the order in which `from_pretrained` of transformers looks for them.
_TRANSFORMERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_OPEN_CLIP = ("open_clip_model.safetensors", "open_clip_pytorch_model.bin")
DIFFUSERS = "diffusion_pytorch_model"
# diffusers looks for an index first.
_DIFFUSERS = tuple(f"{DIFFUSERS}.{end}" for end in ("safetensors.index.json", "safetensors", "bin.index.json", "bin"))
_INDEX_SUFFIX = ".index.json"
_SHARD = re.compile(r"-\d+-of-\d+\.safetensors$")
_DESCRIBED = ("config.json", ADAPTER_CONFIG)  # what tells a folder with a model or an adapter
_MAX_INDEX_BYTES = 100_000_000
_MAX_DEPTH = 100


def open_checkpoint(path: str | Path) -> LazyStateDict:
    """Open a checkpoint without reading its data.

    Args:
        path: A safetensors file; an index of shards, or a folder with one; a state dict of `torch.save`, alone or
            inside a training run's file (no code is run; `module.` is unwrapped); a Hugging Face model folder; a PEFT
            LoRA adapter folder, which opens as a task vector. A name that is no path here may be a Hugging Face id,
            `owner/name` or `owner/name@revision`: the local cache is looked at first, then the network.
    """
    place = expanded(path)
    try:
        if place.is_dir():
            state = _open_folder(place)
            state.path = str(place)
            return state
        if not place.exists():
            return open_checkpoint(from_hub(str(path)))
    except OSError as error:  # no permission to look, or a name that is too long
        raise unreadable(place, error) from None
    state = _open_index(place) if place.name.endswith(_INDEX_SUFFIX) else _open_file(place)
    unwrap(state)
    return state


def _open_file(path: Path) -> LazyStateDict:
    return open_pickle(path) if is_pickle(path) else open_safetensors(path)


def read_state(path: str | Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, in memory of their own, by name."""
    with open_checkpoint(path) as state:
        return {name: state[name].clone() for name in state}


def weight_files(place: Path) -> list[Path]:
    """Return the files that opening a file or folder reads weights from, and the index that names them."""
    if place.is_dir():
        adapters = [name for name in (ADAPTER_WEIGHTS, ADAPTER_PICKLE) if (place / name).exists()]
        place = place / (adapters if (place / ADAPTER_CONFIG).exists() else weights_in(place))[0]
    if not place.name.endswith(_INDEX_SUFFIX):
        return [place]
    return [place, *(place.parent / shard for shard in sorted({*_weight_map(place).values()}))]


def _open_folder(folder: Path) -> LazyStateDict:
    if (folder / ADAPTER_CONFIG).exists():
        if model := next((name for name in _TRANSFORMERS if (folder / name).exists()), None):
            raise MergeflowError(
                f"folder '{folder}' holds an adapter and a model: name '{model}' if the model is meant, or move "
                "the adapter's files into a folder of their own."
            )
        return open_adapter(folder, read_json(folder / ADAPTER_CONFIG), _open_file)
    names = weights_in(folder)
    if not names:
        raise _no_weights(folder)
    try:
        return open_checkpoint(folder / names[0])
    except MergeflowError as error:
        if len(names) == 1:
            raise
        others = "', '".join(names[1:])
        raise MergeflowError(f"{error} The folder also holds '{others}': name that file if it is the one.") from None


# Files of other programs that hold weights, and what makes a checkpoint of them.
_ELSEWHERE = {
    ".distcp": "Join what torch.distributed.checkpoint wrote: python -m torch.distributed.checkpoint.format_utils "
    "dcp_to_torch FOLDER model.pt",
    ".gguf": "Make plain weights of the GGUF file: mergeflow convert FILE --out FOLDER",
    **dict.fromkeys((".h5", ".msgpack", ".ot", ".onnx", ".npz"), "Save the model as safetensors where it was made."),
}


def _no_weights(folder: Path) -> MergeflowError:
    files = [path.name for path in sorted(folder.glob("*.*")) if path.suffix in (".safetensors", *PICKLES, *_ELSEWHERE)]
    inner = [path.parent.relative_to(folder) for path in sorted(folder.glob("*/*.json")) if path.name in _DESCRIBED]
    inner += [path.relative_to(folder) for path in sorted(folder.glob("snapshots/*"))]  # of the Hub's cache
    inner += [path.relative_to(folder) for path in sorted(folder.glob("*/mp_rank_*_model_states.pt"))]  # DeepSpeed's
    way = next((way for end, way in _ELSEWHERE.items() if any(name.endswith(end) for name in files)), "")
    if any(_SHARD.search(name) for name in files):
        way = "Shards need their index, model.safetensors.index.json: copy it there."
    elif inner:
        way = f"Name what is below it: {', '.join(dict.fromkeys(map(str, inner[:5])))}."
    expected = ", ".join((*_TRANSFORMERS, *_OPEN_CLIP, f"{DIFFUSERS}.safetensors", ADAPTER_CONFIG))
    return MergeflowError(
        f"folder '{folder}' holds no checkpoint: expected one of {expected} or a single safetensors file, found "
        f"{', '.join(files[:5]) or 'no file of weights'}. {way or 'Name the file itself.'}"
    )


def weights_in(folder: Path) -> list[str]:
    """Return the weights that a folder holds by their file's name, or their index's; the first is what is loaded.

    A folder may hold a model twice: transformers' and open_clip's files, or a file that an older sharded save left.
    """
    open_clip_first = (folder / "open_clip_config.json").exists() and not (folder / "config.json").exists()
    order = (*_OPEN_CLIP, *_TRANSFORMERS) if open_clip_first else (*_TRANSFORMERS, *_OPEN_CLIP)
    names = [name for name in (*order, *_DIFFUSERS) if (folder / name).exists()]
    if names:
        return names
    others = [path.name for path in folder.glob("*.safetensors")]
    return others if len(others) == 1 else []


# A model once more, in another layout or type, and what its training left.
_NO_OTHER = re.compile(
    r"(?:adapter_|open_clip_|diffusion_)?(?:pytorch_)?(?:model|consolidated|training_args|optimizer|scheduler|scaler)(?:\b|_)"
    r"|rng_state"
)


def other_weights(folder: Path) -> list[str]:
    """Return the files of a model folder that hold other weights than the model's, such as `value_head.safetensors`."""
    maps = [read_json_if_whole(index).get("weight_map") for index in folder.glob("*.index.json")]
    parts = {str(shard) for places in maps if isinstance(places, dict) for shard in places.values()}
    files = sorted(path.name for path in folder.glob("*.*") if path.suffix in (*PICKLES, ".safetensors"))
    return [file for file in files if file not in parts.union(weights_in(folder)) and not _NO_OTHER.match(file)]


def _open_index(index: Path) -> LazyStateDict:
    """Open the shards that an index names; every name must be in the shard the index says."""
    places = _weight_map(index)
    shards: dict[str, LazyStateDict] = {}
    with ExitStack() as opened:  # closes what `_joined` did not take over
        for shard in sorted(set(places.values())):
            if shard in ("", ".") or PurePath(shard).is_absolute() or ".." in PurePath(shard).parts:
                raise MergeflowError(f"index '{index}' names the shard '{shard}', which is not a file of its folder.")
            if not (index.parent / shard).is_file():
                raise MergeflowError(f"index '{index}' names the shard '{shard}', which is missing. Copy it there.")
            shards[shard] = opened.enter_context(_open_file(index.parent / shard))
        return _joined(index, places, shards)


def _joined(index: Path, places: dict[str, str], shards: dict[str, LazyStateDict]) -> LazyStateDict:
    missing = sorted(name for name, shard in places.items() if name not in shards[shard])
    extra = sorted(name for shard, state in shards.items() for name in state if places.get(name) != shard)
    if missing or extra:
        raise MergeflowError(
            f"index '{index}' does not fit its shards: missing {missing[:5]}, not in the index {extra[:5]}. "
            "Some file belongs to another version: copy the folder again."
        )
    states = shards.values()
    entries = {name: entry for state in states for name, entry in state.entries.items()}
    infos = {name: info for state in states for name, info in state.infos.items()}
    metadata = {key: text for state in states for key, text in state.metadata.items()}
    files = tuple(file for state in states for file in state.detach_files())
    held = tuple(map(tuple, states)) if len(shards) > 1 else ()
    return LazyStateDict(str(index.parent), entries, infos, metadata, files, shards=held)


def _weight_map(index: Path) -> dict[str, str]:
    parsed = read_json(index)
    places = parsed.get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(shard, str) for shard in places.values()):
        raise MergeflowError(f"index '{index}' has no weight_map of names to files. Copy it again.")
    return places


def read_json_if_whole(path: Path) -> dict[str, Any]:
    """Read a small JSON object; empty where the file is missing or holds something else."""
    with suppress(MergeflowError):
        return read_json(path)
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a small JSON object."""
    try:
        if path.stat().st_size > _MAX_INDEX_BYTES:
            raise MergeflowError(f"'{path}' is too large for a JSON file of this kind.")
        content = path.read_bytes()
    except OSError as error:
        raise MergeflowError(f"cannot read '{path}': {error.strerror}. Check the path.") from None
    try:
        parsed = json.loads(content)
        if b"\\ud" in content.lower():  # an escape of half a character cannot be written again
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        if other := mistaken(content[:256], "JSON"):
            raise MergeflowError(f"'{path}' {other}.") from None
        raise MergeflowError(f"'{path}' is not a readable JSON file ({type(error).__name__}). Copy it again.") from None
    if not isinstance(parsed, dict):
        raise MergeflowError(f"'{path}' holds a {type(parsed).__name__}, not an object.")
    if _is_deeper(parsed):
        raise MergeflowError(f"'{path}' is nested more than {_MAX_DEPTH} levels deep: it is damaged. Copy it again.")
    return parsed


def _is_deeper(value: Any) -> bool:
    """Whether JSON is nested so deep that functions which call themselves on its parts might fail."""
    level = [value]
    for _ in range(_MAX_DEPTH):
        nested = [each for each in level if isinstance(each, (dict, list))]
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
    return bool(level)
