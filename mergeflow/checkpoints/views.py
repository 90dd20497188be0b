"""Some tensors of a state dict over files, under other names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import Entry, LazyStateDict


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
    return LazyStateDict(
        state.path,
        {rename.get(name, name): entries[name] for name in names},
        {rename.get(name, name): infos[name] for name in names},
        state.metadata,
        is_task_vector=state.is_task_vector,
        tied={rename.get(n, n): rename.get(m, m) for n, m in ties.items() if n in chosen and m in chosen},
        absolute=frozenset(rename.get(name, name) for name in state.absolute if name in chosen),
        shards=state.shards,
        config=state.config,
    )
