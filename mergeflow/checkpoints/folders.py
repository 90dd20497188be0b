"""Read what a model or adapter folder holds besides weights: config.json, and the base that an adapter names."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.formats import is_id, local_folder, read_json, read_json_if_whole
from mergeflow.checkpoints.lora import ADAPTER_CONFIG
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from torch import Tensor

# Files that a folder's config.json describes; next to any other file it may describe something else.
_WEIGHTS = re.compile(r"(?:model|(?:diffusion_)?pytorch_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)(?:\.index\.json)?$")


def folder_of(state: Mapping[str, Tensor]) -> Path | None:
    """Return the folder of the model or adapter that a state dict was opened from; None where there is none."""
    return folder_at(state.path) if isinstance(state, LazyStateDict) else None


def folder_at(place: str) -> Path | None:
    """Return the folder of a model or adapter by the path of its weights, or its own; None where there is none."""
    path = Path(place)
    return path if path.is_dir() else path.parent if _WEIGHTS.match(path.name) else None


def named_folders(folder: Path | None) -> list[str]:
    """Return the subfolders that a model's configurations name, as modules.json of sentence-transformers does."""
    if folder is None or not folder.is_dir():
        return []
    files = {folder / "modules.json", *folder.glob("config*.json"), *folder.glob("*_config.json")}
    texts: list[str] = []
    for file in files:
        with suppress(OSError, ValueError, RecursionError):  # what cannot be read names nothing
            texts += _texts(json.loads(file.read_bytes()))
    tops = {text.removeprefix("./").partition("/")[0] for text in texts}
    # Path.is_dir raises where a text is too long for a name.
    return sorted(name for name in tops if name not in ("", ".", "..") and os.path.isdir(folder / name))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


_IMPORTED = re.compile(r"^\s*from \.(?:(\w+)\S* import| import (\w+))", re.MULTILINE)


def code_files(folder: Path) -> list[str]:
    """Return the Python files of a folder that its `auto_map` names, as "modeling_x.XModel", and those they import."""
    files: list[str] = []
    for name in ("config.json", "tokenizer_config.json"):
        entries = read_json_if_whole(folder / name).get("auto_map")
        for entry in entries.values() if isinstance(entries, dict) else ():
            for code in entry if isinstance(entry, list) else [entry]:
                if isinstance(code, str) and re.fullmatch(r"\w+\.\w+", code):  # not "other/repository--module.Class"
                    files.append(f"{code.partition('.')[0]}.py")
    for name in files:  # grows on the way
        text = (folder / name).read_text(encoding="utf-8", errors="replace") if (folder / name).is_file() else ""
        imported = (f"{module}.py" for pair in _IMPORTED.findall(text) for module in pair if module)
        files += [file for file in dict.fromkeys(imported) if file not in files]
    return files


def config_of(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return config.json of the model that a state dict was opened from; {} in memory, or where there is none."""
    if isinstance(state, LazyStateDict) and state.config is not None:
        return dict(state.config)
    folder = folder_of(state)
    if folder is None or not (folder / "config.json").is_file():
        return {}
    return read_json(folder / "config.json")


def adapter_config_of(state: LazyStateDict) -> dict[str, Any]:
    """Return adapter_config.json of the folder that an adapter was opened from; {} for any other state."""
    file = Path(state.path) / ADAPTER_CONFIG
    return read_json(file) if state.is_task_vector and file.is_file() else {}


def class_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json as transformers' classes take it: infinities, which JSON lacks, as numbers.

    Example:
        >>> class_settings({"limit": [0.0, {"__float__": "Infinity"}]})
        {'limit': [0.0, inf]}
    """
    settings: dict[str, Any] = json.loads(
        json.dumps(config, default=str),
        object_hook=lambda value: float(value["__float__"]) if value.keys() == {"__float__"} else value,
    )
    return settings


@dataclass(frozen=True)
class NamedBase:
    """A base by its name, a path of the machine that made the adapter or a Hugging Face id, and an id's revision."""

    name: str
    revision: str | None

    @property
    def path(self) -> str:
        """What a recipe calls it: the path, `owner/name` or `owner/name@revision`."""
        return f"{self.name}@{self.revision}" if self.revision and is_id(self.name) else self.name

    def folder(self) -> Path | None:
        """Return its folder on this machine, or None; the network is not used."""
        return local_folder(self.path)


def named_base(adapter: str | Path) -> NamedBase | None:
    """Return the base that an adapter (a folder, or an id in the local cache) names; None where nothing does."""
    folder = local_folder(str(adapter))
    if folder is None or not (folder / ADAPTER_CONFIG).is_file():
        return None
    config = read_json(folder / ADAPTER_CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        return None
    return NamedBase(name, revision if isinstance(revision, str) and revision else None)


def common_base(experts: Mapping[str, str]) -> str | None:
    """Return the path or id of the base that all adapters among the experts name; None where none of them does."""
    named = _named_bases(experts)
    places = {base.folder() or base.path for base in named.values()}
    listed = "; ".join(f"'{name}' for '{base.path}'" for name, base in named.items())
    if len(places) > 1:
        raise MergeflowError(f"base: is missing, and the adapters were made for different ones: {listed}")
    absent = [base for base in named.values() if base.folder() is None and not is_id(base.path)]
    if absent:
        raise MergeflowError(f"base: is missing, and the bases of the adapters are not on this machine: {listed}")
    return next((base.path for base in named.values()), None)


def adapters_of(base: str, experts: Mapping[str, str]) -> str:
    """Return the adapters among the experts that name a base, by path or id, for a message; "" where none does."""
    return ", ".join(f"'{name}'" for name, named in _named_bases(experts).items() if named.path == base)


def _named_bases(experts: Mapping[str, str]) -> dict[str, NamedBase]:
    return {name: named for name, path in experts.items() if (named := named_base(path)) is not None}
