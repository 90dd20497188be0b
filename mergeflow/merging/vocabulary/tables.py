"""Which tensors of a model have a row for each token, and states whose tables are read in another order of rows."""

from collections.abc import Mapping
from typing import Any

from mergeflow.checkpoints.folders import config_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.reader import Entry, LazyStateDict
from mergeflow.errors import MergeflowError
from mergeflow.late import np
from mergeflow.merging.architectures.architecture import Architecture
from mergeflow.merging.vocabulary.alignment import Alignment
from mergeflow.merging.vocabulary.choice import BASE
from mergeflow.merging.vocabulary.rows import AlignedEntry, Picked

States = Mapping[str, LazyStateDict]


def rows_of(state: LazyStateDict, architecture: Architecture, owner: str) -> int:
    """Return the number of rows that a model's tables of tokens have.

    Args:
        state: The model.
        architecture: What its tensors are.
        owner: What messages call the model.

    Raises:
        MergeflowError: No tensor is such a table.
    """
    lengths = [
        info.shape[0]
        for name, info in state.infos.items()
        if len(info.shape) == 2 and architecture.role(name, info.shape) == "embedding"
    ]
    declared = [size for size in vocab_sizes(config_of(state)) if size in lengths]
    if not lengths:
        raise MergeflowError(
            f"'{owner}' ({state.path}) has no embeddings of tokens: `tokenizer` is for language models. Remove it."
        )
    return declared[0] if declared else max(lengths)


def vocab_sizes(config: Mapping[str, Any]) -> list[int]:
    """Return every `vocab_size` of config.json, those of its parts too."""
    found = [config["vocab_size"]] if isinstance(config.get("vocab_size"), int) else []
    return found + [size for part in config.values() if isinstance(part, dict) for size in vocab_sizes(part)]


def token_axes(state: LazyStateDict, architecture: Architecture, rows: int) -> dict[str, int]:
    """Return the tensors with one row for each token (embeddings, heads and their biases), with the axis of the rows.

    An axis that is not the first has only axes of length 1 before it, as in `final_logits_bias` [1, V].

    Args:
        state: The model.
        architecture: What its tensors are.
        rows: How many rows its tables of tokens have.
    """
    found = {}
    for name, info in state.infos.items():
        if architecture.role(name, info.shape) in ("embedding", "head") and rows in info.shape:
            axis = info.shape.index(rows)
            if all(length == 1 for length in info.shape[:axis]):
                found[name] = axis
    return found


def aligned(
    name: str, states: States, axes: Mapping[str, int], held: Mapping[str, int], plan: Alignment
) -> LazyStateDict:
    """Return one model's state with its tables in the rows of the merged vocabulary.

    Args:
        name: The model.
        states: All models by name, the base among them.
        axes: As `token_axes` gives them for the base.
        held: Rows of each model's tables.
        plan: Which rows are taken.
    """
    state = states[name]
    entries, infos = dict(state.entries), dict(state.infos)
    for tensor, axis in axes.items():
        info = state.infos.get(tensor)
        if info is None or not _fits(info, states[BASE].infos[tensor], axis, held[name]):
            continue
        taken_from_base = name != BASE and state.entries[tensor] is states[BASE].entries[tensor]
        rows = BASE if taken_from_base else name
        if plan.is_identity(rows, info.shape[axis]):
            continue
        shape = tuple(plan.rows if at == axis else length for at, length in enumerate(info.shape))
        difference = state.is_task_vector and tensor not in state.absolute
        donors = () if difference else _donors(tensor, states, axis, held, plan)
        width = int(np.prod(info.shape[axis + 1 :], dtype=np.int64))
        own = Picked(state.entries[tensor], plan.own[rows])
        entries[tensor] = AlignedEntry(own, donors, width, info.dtype, plan.spare)
        infos[tensor] = TensorInfo(shape, info.dtype)
    return _with(state, entries, infos)


def _donors(tensor: str, states: States, axis: int, held: Mapping[str, int], plan: Alignment) -> tuple[Picked, ...]:
    """Return the models that give rows of a tensor to others; a difference from the base cannot."""
    base, found = states[BASE].infos[tensor], []
    for name, state in states.items():
        whole = tensor in state and not (state.is_task_vector and tensor not in state.absolute)
        if whole and _fits(state.infos[tensor], base, axis, held[name]) and bool((plan.donors[name] >= 0).any()):
            found.append(Picked(state.entries[tensor], plan.donors[name]))
    return tuple(found)


def _fits(info: TensorInfo, base: TensorInfo, axis: int, held: int) -> bool:
    """Whether a tensor is the base's but for its number of rows."""
    return len(info.shape) == len(base.shape) and info.shape == (*base.shape[:axis], held, *base.shape[axis + 1 :])


def _with(state: LazyStateDict, entries: Mapping[str, Entry], infos: Mapping[str, TensorInfo]) -> LazyStateDict:
    return LazyStateDict(
        state.path,
        entries,
        infos,
        state.metadata,
        is_task_vector=state.is_task_vector,
        tied=state.tied,
        absolute=state.absolute,
        shards=state.shards,
        config=state.config,
    )
