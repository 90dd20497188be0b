"""PEFT LoRA adapters as task vectors: τ = (α / r) · B A for the weights they adapt, zero elsewhere."""

import re
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from threading import local
from typing import Any

import torch
from torch import Tensor

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.pickles import open_pickle
from mergeflow.checkpoints.reader import Entry, LazyStateDict, open_safetensors
from mergeflow.errors import MergeflowError

ADAPTER_CONFIG = "adapter_config.json"
_PREFIX = "base_model.model."
# Ways to start an adapter that move its weight in the base as well, so that B A is not the whole difference.
_MOVED = ("pissa", "olora", "corda", "loftq")
_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class LoraEntry:
    """The difference one adapted weight makes, formed when it is read."""

    down: Entry
    up: Entry
    shape: tuple[int, int]
    rank: int
    factor: float
    transposed: bool
    kept: local = field(default_factory=local)

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened difference, float32."""
        if start == 0 or not hasattr(self.kept, "delta"):
            rows, columns = self.shape
            down = self.down.read(0, self.rank * columns).reshape(self.rank, columns).float()
            up = self.up.read(0, rows * self.rank).reshape(rows, self.rank).float()
            delta = (up @ down) * self.factor
            self.kept.delta = (delta.T if self.transposed else delta).reshape(-1)
        piece: Tensor = self.kept.delta[start:stop]
        if stop >= self.kept.delta.numel():
            del self.kept.delta
        return piece


def open_adapter(folder: Path) -> LazyStateDict:
    """Open a PEFT LoRA adapter folder as a task vector over the base's names.

    Raises:
        MergeflowError: Another kind of adapter, or a part of LoRA that is not a plain low-rank difference.
    """
    from mergeflow.checkpoints.formats import read_json

    config = read_json(folder / ADAPTER_CONFIG)
    _refuse(folder, config)
    weights = folder / "adapter_model.safetensors"
    pickled = folder / "adapter_model.bin"
    if not weights.exists() and not pickled.exists():
        raise MergeflowError(f"adapter folder '{folder}' holds neither {weights.name} nor {pickled.name}.")
    stored = open_safetensors(weights) if weights.exists() else open_pickle(pickled)
    entries: dict[str, Entry] = {}
    infos: dict[str, TensorInfo] = {}
    absolute = set()
    for name in sorted(stored):
        target = name.removeprefix(_PREFIX)
        if target.endswith(_A):
            module = target.removesuffix(_A)
            weight = _weight_name(module, stored)
            entries[weight], infos[weight] = _entry(stored, name, module, config)
        elif not target.endswith(_B):
            if "lora_" in target:
                raise MergeflowError(
                    f"adapter '{folder}' holds '{name}': only plain LoRA of linear weights can be merged."
                )
            entries[target], infos[target] = stored.entries[name], stored.infos[name]
            absolute.add(target)
    if not entries:
        raise MergeflowError(f"adapter '{folder}' holds no LoRA weights.")
    files = stored.detach_files()
    return LazyStateDict(str(folder), entries, infos, stored.metadata, files, True, absolute=frozenset(absolute))


def _weight_name(module: str, stored: LazyStateDict) -> str:
    """Return the base's name of an adapted weight; PEFT adapts `nn.MultiheadAttention` as one module with two."""
    inner = ".base_layer.out_proj"
    if f"{_PREFIX}{module}{inner}{_A}" in stored:
        return f"{module}.in_proj_weight"
    return f"{module.removesuffix(inner)}.out_proj.weight" if module.endswith(inner) else f"{module}.weight"


def _refuse(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise MergeflowError(
            f"adapter '{folder}' is of type {kind!r}; only LORA can be merged. Merge it into its base first."
        )
    if config.get("use_dora"):
        raise MergeflowError(
            f"adapter '{folder}' is a DoRA, not a difference of weights. Merge it into its base first."
        )
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_MOVED):
        raise MergeflowError(
            f"adapter '{folder}' was started by {start!r}, which changes the base too: it is no difference from yours. "
            "Convert it when it is saved (PEFT's path_initial_model_for_weight_conversion), or merge it first."
        )


def _entry(stored: LazyStateDict, name: str, module: str, config: dict[str, Any]) -> tuple[LoraEntry, TensorInfo]:
    partner = name.removesuffix(_A) + _B
    down = stored.infos[name].shape
    up = stored.infos[partner].shape if partner in stored else ()
    if len(down) != 2 or len(up) != 2 or up[1] != down[0]:
        raise MergeflowError(
            f"adapter '{stored.path}': '{name}' {list(down)} and its lora_B {list(up)} are not factors of a "
            "linear weight; only plain LoRA can be merged."
        )
    rank = _number(config, "rank_pattern", "r", module, down[0])
    if int(rank) != down[0]:
        raise MergeflowError(f"adapter '{stored.path}': '{name}' has rank {down[0]}, its configuration says {rank}.")
    alpha = _number(config, "alpha_pattern", "lora_alpha", module, rank)
    factor = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    transposed = bool(config.get("fan_in_fan_out"))
    shape = (up[0], down[1])
    info = TensorInfo((shape[1], shape[0]) if transposed else shape, torch.float32)
    return LoraEntry(stored.entries[name], stored.entries[partner], shape, down[0], factor, transposed), info


def _number(config: dict[str, Any], pattern: str, key: str, module: str, default: float) -> float:
    value = config.get(key, default)
    for expression, own in _mapping(config, pattern).items():
        try:
            matches = re.match(rf"(.*\.)?({expression})$", module)
        except (re.error, RecursionError) as error:
            raise MergeflowError(
                f"the adapter's {pattern} has the wrong expression {expression!r:.60}: {error}."
            ) from None
        if matches:
            value = own
            break
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise MergeflowError(
            f"the adapter's configuration gives {key} = {value!r:.60} for '{module}', expected a positive number."
        )
    return float(value)


def _mapping(config: dict[str, Any], key: str) -> dict[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, dict):
        raise MergeflowError(f"the adapter's configuration gives {key} = {found!r:.60}, expected a mapping.")
    return found
