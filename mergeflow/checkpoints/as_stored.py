"""An expert's tensors under the names that the file of its base has for them, and as that file holds them."""

from __future__ import annotations

from collections.abc import Mapping

from mergeflow.checkpoints.adapted import ExpertsEntry
from mergeflow.checkpoints.config import config_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.lora import EXPERT_STACKS
from mergeflow.checkpoints.names_in_memory import names_in_memory
from mergeflow.checkpoints.naming import IN_OUT_EXPERTS, loaded_name, renamed
from mergeflow.checkpoints.reader import LazyStateDict
from mergeflow.checkpoints.ties import copies_of_embedding
from mergeflow.checkpoints.views import view


def as_stored(expert: str, base: LazyStateDict, state: LazyStateDict, notes: list[str]) -> LazyStateDict:
    """Return a state under the names of the base's file, where it has those in memory, and experts fused or listed.

    Args:
        expert: What notes call the state.
        base: The base, with the names and stacks that are wanted.
        state: An expert, of the base's architecture.
        notes: Gets a line where listed experts are read as stacks or the other way round.
    """
    config = config_of(base)
    # The bias of a masked model's head: its module's own, under the name that the head gives it.
    biases = {
        copy: name
        for copy, name in copies_of_embedding(config, base).items()
        if copy.endswith(".bias") and copy in state and name not in state
    }
    state = view(state, list(state), rename=biases) if biases else state
    state = _turned(config, _as_in_memory(config, base, state))
    found = renamed(config, base.infos, state.infos, state.entries)
    if not found:
        return state
    taken = {name for _, _, names in found.values() for name in names}
    kept = [name for name in state if name not in taken]
    absolute = {name for name, (_, _, names) in found.items() if state.absolute.issuperset(names)}
    if len(found) != len(taken):
        notes.append(f"{len(taken)} tensors of experts of '{expert}' are read as the {len(found)} that the base has")
    entries = {name: state.entries[name] for name in kept} | {name: one[0] for name, one in found.items()}
    infos = {name: state.infos[name] for name in kept} | {name: one[1] for name, one in found.items()}
    made = view(state, list(entries), entries, infos)
    made.absolute = state.absolute & set(kept) | absolute
    return made


def _as_in_memory(config: Mapping[str, object], base: LazyStateDict, state: LazyStateDict) -> LazyStateDict:
    """Return a state under the names of the base's file, where both are the same tensors in memory.

    transformers' tables are asked, and only where names are strange otherwise, because it is slow to import.
    """
    known = {*base, *(loaded_name(config, name) for name in base)}
    strange = [name for name in state if loaded_name(config, name) not in known and not name.endswith(EXPERT_STACKS)]
    if not strange:
        return state
    wanted, own = names_in_memory(config, base), names_in_memory(config, strange)
    names = {name: wanted[loaded] for loaded, name in own.items() if wanted.get(loaded, name) not in state}
    return view(state, list(state), rename=names) if names else state


def _turned(config: Mapping[str, object], state: LazyStateDict) -> LazyStateDict:
    """Return an adapter whose stacked experts are turned as the architecture holds them."""
    stacks = {name: one for name, one in state.entries.items() if isinstance(one, ExpertsEntry)}
    if not stacks or config.get("model_type") not in IN_OUT_EXPERTS:
        return state
    infos = {name: TensorInfo((one.experts, *one.shape[::-1]), state.infos[name].dtype) for name, one in stacks.items()}
    entries = {name: one.turned() for name, one in stacks.items()}
    return view(state, list(state), {**state.entries, **entries}, {**state.infos, **infos})
