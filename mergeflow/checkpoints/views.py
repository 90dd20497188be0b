"""Some tensors of a state dict over files, under other names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import Entry, LazyStateDict
from mergeflow.errors import MergeflowError


def view(
    state: LazyStateDict,
    names: Sequence[str],
    entries: Mapping[str, Entry] | None = None,
    infos: Mapping[str, TensorInfo] | None = None,
    tied: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
) -> LazyStateDict:
    """Return some tensors of a state, under other names where asked for; the files stay the state's own.

    Args:
        state: The state; its metadata, path and configuration go along.
        names: Of the tensors that are kept.
        entries: Where their data come from, by name; the state's by default.
        infos: Their shapes and types, by name; the state's by default.
        tied: Names that share storage, each with the first of its group; the state's by default.
        rename: New names, by the state's own.
    """
    entries, infos, rename = entries or state.entries, infos or state.infos, rename or {}
    ties = state.tied if tied is None else tied
    chosen = set(names)
    made = LazyStateDict(
        state.path,
        {name: entries[name] for name in names},
        {name: infos[name] for name in names},
        state.metadata,
        is_task_vector=state.is_task_vector,
        tied={name: first for name, first in ties.items() if name in chosen and first in chosen},
        absolute=state.absolute & chosen,
        shards=state.shards,
        config=state.config,
    )
    made.rename(rename)
    return made


_WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_PARALLEL = "module."


def unwrap(state: LazyStateDict) -> None:
    """Take out of names what torch.compile, FSDP and DataParallel put into them, and no model has.

    Raises:
        MergeflowError: Two tensors then have one name.
    """
    plain = {name: _WRAPPERS.sub("", name) for name in state}
    if plain and all(name.startswith(_PARALLEL) for name in plain.values()):
        plain = {name: _WRAPPERS.sub("", other.removeprefix(_PARALLEL)) for name, other in plain.items()}
    names: dict[str, str] = {}
    for name, other in plain.items():
        if names.setdefault(other, name) != name:
            raise MergeflowError(f"'{state.path}' holds '{name}' and '{names[other]}', which are both '{other}'.")
    if any(name != other for name, other in plain.items()):
        state.rename(plain)
