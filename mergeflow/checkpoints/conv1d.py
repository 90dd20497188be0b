"""Which weights of a base are stored [in, out], as transformers' Conv1D has them, so that adapters are turned alike.

PEFT turns the change module by module, but notes one `fan_in_fan_out` for all of them: that of the module it met last.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from threading import local
from typing import TYPE_CHECKING

from mergeflow.checkpoints.adapted import AddedEntry, DoraEntry, LoraEntry
from mergeflow.checkpoints.checks import infos_of
from mergeflow.checkpoints.config import config_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import Entry, LazyStateDict
from mergeflow.checkpoints.views import view
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from torch import Tensor

# Model types whose classes use Conv1D, and the modules that are of it there.
_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder")
_MODULES = re.compile(r"\.(?:c_attn|q_attn|c_proj|c_fc)\.weight$")


def is_conv1d(config: Mapping[str, object], name: str) -> bool | None:
    """Whether a linear weight is stored [in, out], by the model's class; None where `model_type` does not tell."""
    return bool(_MODULES.search(name)) if config.get("model_type") in _TYPES else None


def oriented(expert: str, base: Mapping[str, Tensor], state: LazyStateDict) -> LazyStateDict:
    """Return an adapter whose changes of linear weights are turned as the base stores these weights.

    Args:
        expert: What messages call the adapter.
        base: The base.
        state: The adapter, under the base's names; any other state comes back as it is.

    Raises:
        MergeflowError: Nothing tells how a square matrix is stored.
    """
    entries, infos = dict(state.entries), dict(state.infos)
    stored, config = infos_of(base), config_of(base)
    linear = {name: lora for name, lora in _linear(state).items() if name in stored}
    ways = {name: _way(stored[name].shape, lora.shape) for name, lora in linear.items()}
    for name, lora in linear.items():
        inputs_first = ways[name]
        if inputs_first is None:
            inputs_first = _of_square(name, config, stored, ways)
        contradicted = any(way not in (None, lora.transposed) for way in ways.values())
        if inputs_first is None and (contradicted or (lora.transposed and not _MODULES.search(name))):
            raise MergeflowError(
                f"'{expert}' adapts the square '{name}', and nothing tells whether the base stores it [in, out] or "
                "[out, in]: give a base with its config.json, or merge the adapter into its base with PEFT first."
            )
        if inputs_first is not None and inputs_first != lora.transposed:
            entries[name] = _turned(entries[name], inputs_first)
            infos[name] = TensorInfo(stored[name].shape, infos[name].dtype)
    return view(state, list(state), entries, infos) if entries != state.entries else state


def doubtful(state: LazyStateDict) -> str | None:
    """Return a weight of which an adapter alone does not tell whether it is stored [in, out]; None if there is none."""
    square = {name: lora for name, lora in _linear(state).items() if lora.shape[0] == lora.shape[1]}
    return next((name for name, lora in square.items() if lora.transposed or _MODULES.search(name)), None)


def _linear(state: LazyStateDict) -> dict[str, LoraEntry]:
    """Return the factors of an adapter's linear weights."""
    wrapped = (AddedEntry, DoraEntry)
    loras = {name: entry.lora if isinstance(entry, wrapped) else entry for name, entry in state.entries.items()}
    return {name: lora for name, lora in loras.items() if isinstance(lora, LoraEntry) and not lora.embedding}


def _way(stored: tuple[int, ...], shape: tuple[int, int]) -> bool | None:
    """Whether a weight is stored [in, out] by its shape; None where it is square, or does not fit."""
    return stored != shape if shape[0] != shape[1] and stored in (shape, shape[::-1]) else None


def _of_square(
    name: str, config: Mapping[str, object], infos: Mapping[str, TensorInfo], ways: Mapping[str, bool | None]
) -> bool | None:
    """Whether a square weight is stored [in, out]: by its class, or as others are whose module has the same name."""
    by_class = is_conv1d(config, name)
    if by_class is not None:
        return by_class
    end = name.split(".")[-2:]
    alike = [way for other, way in ways.items() if way is not None and other.split(".")[-2:] == end]
    for other, info in infos.items():
        bias = infos.get(f"{other.removesuffix('.weight')}.bias")
        if other.split(".")[-2:] == end and bias is not None and len(info.shape) == 2 and len(set(info.shape)) == 2:
            alike.append(bias.shape == info.shape[1:])
    return alike[0] if alike and len(set(alike)) == 1 else None


def _turned(entry: Entry, inputs_first: bool) -> Entry:
    if isinstance(entry, LoraEntry):
        return replace(entry, transposed=inputs_first, kept=local())
    assert isinstance(entry, AddedEntry | DoraEntry)
    return replace(entry, lora=replace(entry.lora, transposed=inputs_first, kept=local()), kept=local())
