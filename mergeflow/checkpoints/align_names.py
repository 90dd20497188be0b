"""Bring inputs to their base's names and layout: prefixes, ties, buffers, listed or fused experts, Conv1D."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.checks import FACTOR, check_compatible, infos_of, lacking, same_values
from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.folders import adapter_config_of, config_of
from mergeflow.checkpoints.header import TensorInfo
from mergeflow.checkpoints.lora import EXPERT_STACKS, AddedEntry, DoraEntry, ExpertsEntry, LoraEntry, TokensEntry
from mergeflow.checkpoints.names import (
    converted,
    in_out_experts,
    loaded_name,
    may_be_tied,
    module_in_memory,
    names_in_memory,
    renamed,
    stores_inputs_first,
    tied_copies,
    tied_weights,
    untied_config,
)
from mergeflow.checkpoints.reader import Entry, LazyStateDict, TensorEntry, view
from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from torch import Tensor

# Model types whose classes use Conv1D, and the modules that are of it there.
_TYPES = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp", "clvp_decoder")
_MODULES = re.compile(r"\.(?:c_attn|q_attn|c_proj|c_fc)\.weight$")


def is_conv1d(config: Mapping[str, object], name: str) -> bool | None:
    """Return whether the model's class stores a linear weight as [in, out]; None if `model_type` does not tell."""
    return bool(_MODULES.search(name)) if config.get("model_type") in _TYPES else None


def oriented(expert: str, base: Mapping[str, Tensor], state: LazyStateDict) -> LazyStateDict:
    """Transpose an adapter's changes, under the base's names, of the linear weights that it stores as [in, out]."""
    entries, infos = dict(state.entries), dict(state.infos)
    stored, config = infos_of(base), config_of(base)
    linear = {name: lora for name, lora in _linear(state).items() if name in stored}
    ways = {name: _way(stored[name].shape, lora.shape) for name, lora in linear.items()}
    for name, lora in linear.items():
        inputs_first = ways[name]
        if inputs_first is None:
            inputs_first = _of_square(name, config, stored, ways)
        contradicted = any(way not in (None, lora.transposed) for way in ways.values())
        if inputs_first is None and (contradicted or lora.transposed or _MODULES.search(name)):
            inputs_first = _by_class(config, name)
        if inputs_first is None and (contradicted or (lora.transposed and not _MODULES.search(name))):
            raise MergeflowError(
                f"'{expert}' adapts the square '{name}', and it is unknown whether the base stores it [in, out] or "
                "[out, in]: give a base with its config.json, or merge the adapter into its base with PEFT first."
            )
        if inputs_first is not None and inputs_first != lora.transposed:
            entries[name] = _reoriented(entries[name], inputs_first)
            infos[name] = TensorInfo(stored[name].shape, infos[name].dtype)
    return view(state, entries=entries, infos=infos) if entries != state.entries else state


def doubtful(state: LazyStateDict) -> str | None:
    """Return the name of a weight that an adapter alone cannot orient; None if all are clear."""
    square = {name: lora for name, lora in _linear(state).items() if lora.shape[0] == lora.shape[1]}
    return next((name for name, lora in square.items() if lora.transposed or _MODULES.search(name)), None)


def _linear(state: LazyStateDict) -> dict[str, LoraEntry]:
    """Return the factors of an adapter's linear weights that may have to be turned."""
    wrapped = (AddedEntry, DoraEntry)
    loras = {name: entry.lora if isinstance(entry, wrapped) else entry for name, entry in state.entries.items()}
    return {name: lora for name, lora in loras.items() if isinstance(lora, LoraEntry) and not lora.placed}


def _way(stored: tuple[int, ...], shape: tuple[int, int]) -> bool | None:
    """Return whether the shape shows that a weight is stored [in, out]; None if it is square or does not fit."""
    return stored != shape if shape[0] != shape[1] and stored in (shape, shape[::-1]) else None


def _of_square(
    name: str, config: Mapping[str, object], infos: Mapping[str, TensorInfo], ways: Mapping[str, bool | None]
) -> bool | None:
    """Return whether a square weight is stored [in, out]: by its class, or like others of that module name."""
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


def _by_class(config: Mapping[str, Any], name: str) -> bool | None:
    """Return whether a weight is stored [in, out], as transformers says, which is slow to import."""
    (in_memory,) = names_in_memory(config, [name])
    module = module_in_memory(config, in_memory.removesuffix(".weight"))
    return None if module is None else stores_inputs_first(module)


def _reoriented(entry: Entry, inputs_first: bool) -> Entry:
    if isinstance(entry, LoraEntry):
        return replace(entry, transposed=inputs_first)
    assert isinstance(entry, AddedEntry | DoraEntry)
    return replace(entry, lora=replace(entry.lora, transposed=inputs_first))


def as_stored(expert: str, base: LazyStateDict, state: LazyStateDict, notes: list[str]) -> LazyStateDict:
    """Rename and reshape an expert's tensors to match the base's file: names in memory, fused or listed experts."""
    config = config_of(base)
    # The bias of a masked model's head: its module's own, under the name that the head gives it.
    strange = [name for name in state if name not in base and name.endswith(".bias")]
    ties = tied_copies(config, base) if strange else {}
    biases = {name: ties[name] for name in strange if name in ties and ties[name] not in state}
    state = view(state, rename=biases) if biases else state
    state = _turned(config, _as_linear(config, base, _as_in_memory(config, base, state)))
    placed = renamed(config, base, state)
    for name, (_, _, parts) in placed.items():
        whole = state.absolute.intersection(parts) if state.is_task_vector and len(parts) > 1 else ()
        if whole and (len(whole) < len(parts) or any(isinstance(state.entries[part], DoraEntry) for part in whole)):
            raise MergeflowError(
                f"'{expert}' gives '{min(whole)}' whole, as DoRA and modules_to_save do, and the base holds it in the "
                f"stack '{name}': merge the adapter into its base with PEFT first (merge_and_unload)."
            )
    used = {name for _, _, names in placed.values() for name in names}
    placed |= converted(config, base, view(state, [name for name in state if name not in used]))
    if not placed:
        return state
    taken = {name for _, _, names in placed.values() for name in names}
    others = [name for name in state if name not in taken]
    absolute = {name for name, (_, _, names) in placed.items() if state.absolute.intersection(names)}
    if len(placed) != len(taken):
        notes.append(f"{len(taken)} tensors of '{expert}' are read as the {len(placed)} that the base has for them")
    entries = {name: state.entries[name] for name in others} | {name: entry for name, (entry, _, _) in placed.items()}
    infos = {name: state.infos[name] for name in others} | {name: info for name, (_, info, _) in placed.items()}
    made = view(state, entries=entries, infos=infos)
    made.absolute = state.absolute & set(others) | absolute
    return made


def _as_in_memory(config: Mapping[str, object], base: LazyStateDict, state: LazyStateDict) -> LazyStateDict:
    """Return a state under the names of the base's file, where both are the same tensors in memory.

    transformers' tables decide; they are read only if names are still unknown, because transformers is slow to import.
    """
    held = {*base, *(loaded_name(config, name) for name in base)}
    strange = [name for name in state if loaded_name(config, name) not in held and not name.endswith(EXPERT_STACKS)]
    if not strange:
        return state
    wanted, loads = names_in_memory(config, base), names_in_memory(config, strange)
    names = {name: wanted[loaded] for loaded, name in loads.items() if wanted.get(loaded, name) not in state}
    return view(state, rename=names) if names else state


def _as_linear(config: Mapping[str, Any], base: LazyStateDict, state: LazyStateDict) -> LazyStateDict:
    """Return an adapter that says fan_in_fan_out without the turning of linear modules that the base's file fuses."""
    said = [name for name, lora in _linear(state).items() if lora.transposed and name not in base]
    entries, infos = dict(state.entries), dict(state.infos)
    for name in said:
        if _by_class(config, name) is False:
            entries[name] = _reoriented(entries[name], False)
            infos[name] = TensorInfo(infos[name].shape[::-1], infos[name].dtype)
    return view(state, entries=entries, infos=infos) if said else state


def _turned(config: Mapping[str, object], state: LazyStateDict) -> LazyStateDict:
    """Return an adapter whose stacked experts are turned as the architecture holds them."""
    stacks = {name: entry for name, entry in state.entries.items() if isinstance(entry, ExpertsEntry)}
    if not stacks or not in_out_experts(config):
        return state
    infos = {
        name: TensorInfo((entry.experts, *entry.shape[::-1]), state.infos[name].dtype) for name, entry in stacks.items()
    }
    entries = {name: replace(entry, transposed=True) for name, entry in stacks.items()}
    return view(state, entries={**state.entries, **entries}, infos={**state.infos, **infos})


# A part of a weight that torch computes from several: in `parametrizations`, and as older versions of it name them.
_PART = re.compile(r"(.+\.)?(?:parametrizations\.(\w+)\.original\d*|(weight\w*)_(?:g|orig))$")


@dataclass(frozen=True)
class Fitted:
    """The inputs of a merge under the base's names."""

    base: LazyStateDict
    experts: dict[str, LazyStateDict]
    base_only: frozenset[str]  # names of the base's tensors that no expert takes part in
    notes: tuple[str, ...]  # what was done to make them fit, a sentence each

    def check(self) -> None:
        """Check that the tensors to be merged have the same names and shapes everywhere."""
        check_compatible(view(self.base, [name for name in self.base if name not in self.base_only]), self.experts)


def fit_inputs(
    base: LazyStateDict,
    experts: Mapping[str, LazyStateDict],
    ignore: Sequence[str] = (),
    only: Sequence[str] = (),
    missing: str = "refuse",
) -> Fitted:
    """Rename experts' tensors to the base's names, where the renaming is certain or an argument asks for it.

    A prefix that all names of an expert have, or lack, is put right where no name fits.

    Args:
        ignore: Patterns of tensors that stay the base's, whatever experts hold; those that the base lacks are left out.
        only: Patterns of the tensors that are merged, where not all are.
        missing: `base`: a tensor that an expert lacks is the base's; `refuse`: that is a mismatch.
    """
    notes: list[str] = []
    states = {name: as_stored(name, base, state, notes) for name, state in experts.items()}
    states = {name: _without_prefix(name, base, state, notes, ignore) for name, state in states.items()}
    states = {name: oriented(name, base, state) for name, state in states.items()}
    names = {*base, *(name for state in states.values() for name in state)}
    _check_patterns(names, ignore, only)
    left_out = frozenset(name for name in names if _any(name, ignore) or (only and not _any(name, only)))
    if left_out.issuperset(base):
        raise MergeflowError("`only` and `ignore` leave no tensor of the base to merge: the result would be the base.")
    if left_out:
        states = {name: view(state, [n for n in state if n not in left_out]) for name, state in states.items()}
        base, states = _parted(base, states, left_out, notes)
    states = {name: _with_buffers_of(name, base, state, left_out, notes) for name, state in states.items()}
    base, states = _with_ties(base, states, left_out, notes)
    states = {name: bound(base, state) for name, state in states.items()}
    for name, state in states.items():
        _check_whole(name, base, state, left_out, missing == "base", notes)
    if missing == "base":
        states = {name: _completed(name, base, state, left_out, notes) for name, state in states.items()}
    return Fitted(base, states, left_out & set(base), (*notes, *_types(base, states), *_in_parts(base, left_out)))


def _types(base: LazyStateDict, states: Mapping[str, LazyStateDict]) -> list[str]:
    """Note the experts whose floating-point types are not the base's."""
    other = {
        expert: f"{state.infos[name].dtype}".removeprefix("torch.")
        for expert, state in states.items()
        for name in base
        if name in state and not state.is_task_vector and state.infos[name].dtype != base.infos[name].dtype
    }
    wide = "float64" if any("float64" in kind for kind in other.values()) else "float32 or wider"
    listed = ", ".join(f"'{expert}' {kind}" for expert, kind in other.items())
    result = "the result has the base's, or the recipe's `dtype`"
    return [f"types differ from the base's ({listed}): arithmetic is {wide}, {result}"] if other else []


def bound(base: Mapping[str, Tensor], state: LazyStateDict) -> LazyStateDict:
    """Bind an adapter to its base: the orientation of weights, and the weights that DoRA and retrained tokens adapt."""
    state = oriented(state.path, base, state)
    open_ends = {
        name: entry
        for name, entry in state.entries.items()
        if isinstance(entry, DoraEntry | TokensEntry) and entry.weight is None and name in base
    }
    entries, infos = dict(state.entries), dict(state.infos)
    for name, entry in open_ends.items():
        in_base, shape = infos_of(base)[name], infos[name].shape
        rows_lie_in = isinstance(entry, TokensEntry) and len(in_base.shape) == 2 and shape[0] <= in_base.shape[0]
        if in_base.shape == shape or (rows_lie_in and in_base.shape[1] == shape[1]):
            weight = base.entries[name] if isinstance(base, LazyStateDict) else TensorEntry(base[name].detach())
            entries[name] = replace(entry, weight=weight)
            infos[name] = TensorInfo(in_base.shape, infos[name].dtype)
    return view(state, entries=entries, infos=infos) if open_ends else state


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _check_patterns(names: set[str], ignore: Sequence[str], only: Sequence[str]) -> None:
    faults = [
        f"the pattern '{pattern}' of `{key}` fits no tensor of the base or the experts"
        for key, patterns in (("ignore", ignore), ("only", only))
        for pattern in patterns
        if not any(fnmatchcase(name, pattern) for name in names)
    ]
    if faults:
        some = "', '".join(sorted(names)[:: max(1, len(names) // 4)][:4])
        raise MergeflowError(f"{'; '.join(faults)}. Tensors are such as '{some}'.")


def _without_prefix(
    expert: str, base: LazyStateDict, state: LazyStateDict, notes: list[str], ignore: Sequence[str]
) -> LazyStateDict:
    """Remove or add a constant prefix of an expert's names, if without this none of them is the base's."""
    if any(name in base for name in state):
        return state
    names = [name for name in state if not _any(name, ignore)]
    ends = Counter(name[: -len(ending)] for name in names for ending in base if name.endswith(f".{ending}"))
    if ends:
        prefix = _commonest(expert, ends)
        notes.append(f"names of '{expert}' are taken without their prefix '{prefix}'")
        return view(state, rename={name: name.removeprefix(prefix) for name in state})
    starts = Counter(ending[: -len(name)] for name in names for ending in base if ending.endswith(f".{name}"))
    if starts:
        prefix = _commonest(expert, starts)
        notes.append(f"names of '{expert}' are taken with the prefix '{prefix}'")
        fits = {name: prefix + name if prefix + name in base else name for name in state}
        return view(state, rename=fits)
    return state


def _commonest(expert: str, prefixes: Counter[str]) -> str:
    """Return the prefix with which most names fit; with several, as of equal towers, nothing tells which is meant."""
    (first, most), *others = prefixes.most_common(2)
    if others and others[0][1] == most:
        raise MergeflowError(
            f"names of '{expert}' fit the base's with the prefix '{first}' and as well with '{others[0][0]}': save it "
            f"under the names that the base has for it, or leave one out by `ignore: ['{others[0][0]}*']`."
        )
    return first


# Buffers that a class computes and that some of its versions store; nothing in them was learned.
_BUFFERS = re.compile(
    r"(?:^|\.)(?:position_ids|token_type_ids|inv_freq|original_inv_freq|masked_bias|relative_position_index|"
    r"relative_coords_table|attn_mask|causal_mask|num_batches_tracked|n_averaged|_float_tensor)$"
)
_MASK = re.compile(r"\.(?:attn|attention|attn\.attention)\.bias$")  # GPT-2's causal mask, [1, 1, n, n]


def _is_buffer(name: str, info: TensorInfo) -> bool:
    square = len(info.shape) == 4 and info.shape[:2] == (1, 1) and info.shape[2] == info.shape[3]
    return bool(_BUFFERS.search(name)) or (square and bool(_MASK.search(name)))


def _with_buffers_of(
    expert: str, base: LazyStateDict, state: LazyStateDict, left_out: frozenset[str], notes: list[str]
) -> LazyStateDict:
    """Leave out buffers that the base lacks, and take those that the expert lacks from the base."""
    strange = [name for name in state if name not in base and _is_buffer(name, state.infos[name])]
    lacking = [] if state.is_task_vector else [name for name in base if name not in state and name not in left_out]
    lacking = [name for name in lacking if _is_buffer(name, base.infos[name])]
    for names, what in ((strange, "left out"), (lacking, "the base's")):
        if names:
            more = f" and {len(names) - 1} more buffers" if len(names) > 1 else ", a buffer,"
            notes.append(f"'{names[0]}'{more} of '{expert}' {'are' if len(names) > 1 else 'is'} {what}")
    state = view(state, [name for name in state if name not in strange]) if strange else state
    return _with_those_of(base, state, lacking) if lacking else state


def _check_whole(
    expert: str, base: LazyStateDict, state: LazyStateDict, left_out: frozenset[str], allowed: bool, notes: list[str]
) -> None:
    """Check that an adapter holds what its settings say; what PEFT takes from the base in silence becomes a note."""
    weights = [name for name in base if name not in left_out and not _is_buffer(name, base.infos[name])]
    for setting, names in lacking(adapter_config_of(state), weights, state).items():
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        text = f"'{expert}' lacks '{names[0]}'{more}, which its adapter_config.json names by `{setting}`"
        if not allowed and setting not in ("bias", "target_modules"):
            raise MergeflowError(f"{text}: copy the adapter again, or take the base's by `missing: base` in a recipe.")
        notes.append(f"{text}: the base's, as in PEFT")


def _with_those_of(base: LazyStateDict, state: LazyStateDict, names: Sequence[str]) -> LazyStateDict:
    entries = {**state.entries, **{name: base.entries[name] for name in names}}
    infos = {**state.infos, **{name: base.infos[name] for name in names}}
    return view(state, entries=entries, infos=infos)


def _in_parts(base: LazyStateDict, left_out: frozenset[str]) -> list[str]:
    """Note that parts of a weight, such as length and direction, are merged each by itself, not as their product."""
    named = [name for name in base if name not in left_out]
    matches = [match for name in named if (match := _PART.match(name))]
    weights = {f"{match[1] or ''}{match[2] or match[3]}" for match in matches}
    factored = {match.string[: match.start()] for name in named if (match := FACTOR.search(name))}
    kinds = {"with weight norm, spectral norm or pruning": weights, "with factors of adapters": factored}
    return [f"parts of {len(names)} weights {kind}, such as '{min(names)}', are merged apart: the result is near the "
            "merged weights at best" for kind, names in kinds.items() if names]  # fmt: skip


def _with_ties(
    base: LazyStateDict, states: dict[str, LazyStateDict], left_out: frozenset[str], notes: list[str]
) -> tuple[LazyStateDict, dict[str, LazyStateDict]]:
    """Make inputs agree if some store a tied weight (an embedding that is also the head) once and others twice."""
    base = _with_head_apart(base, states, left_out, notes)
    class_ties = _class_ties(base, states)
    states = _heads_with_tokens(base, states, class_ties)
    base = _untied(base, states, class_ties, notes)
    states = _heads_with_embedding(base, states, class_ties)
    unknown = any(name not in base for state in states.values() for name in state)
    by_class = tied_copies(config_of(base), base) if unknown else {}
    for expert, state in states.items():
        copies = {name: twin for name in state if name not in base and (twin := _twin(state, name, base, by_class))}
        if copies:
            states[expert] = view(state, [name for name in state if name not in copies])
            notes += [f"'{name}' of '{expert}' is left out: it is '{twin}' once more" for name, twin in copies.items()]
    needed: dict[str, str] = {}
    for state in states.values():
        if not state.is_task_vector:
            lacking = [name for name in base if name not in state and name not in left_out]
            needed |= {name: twin for name in lacking if name not in needed and (twin := _twin(base, name, state))}
    if not needed:
        return base, states
    ties = {max(pair): min(pair) for pair in needed.items()}
    for expert, state in states.items():
        entries, infos, tied = dict(state.entries), dict(state.infos), dict(state.tied)
        for name, twin in needed.items():
            if name not in state and twin in state and not state.is_task_vector:
                entries[name], infos[name] = entries[twin], infos[twin]
                notes.append(f"'{name}' of '{expert}' is its '{twin}', to which the base ties it")
            if name in entries and twin in entries and _equal(entries[name], entries[twin], infos[name].numel):
                tied[max(name, twin)] = min(name, twin)
        states[expert] = view(state, entries=entries, infos=infos, tied=tied)
    return view(base, tied={**base.tied, **ties}), states


def _with_head_apart(
    base: LazyStateDict, states: dict[str, LazyStateDict], left_out: frozenset[str], notes: list[str]
) -> LazyStateDict:
    """Give every model a head of its own, where some whole models have one and others tie it to their embedding."""
    inputs = {"": base, **{name: state for name, state in states.items() if not state.is_task_vector}}
    heads = {name for state in inputs.values() for name in state if may_be_tied(name, name) and name not in left_out}
    for head in sorted(heads):
        lacking = [owner for owner, state in inputs.items() if head not in state]
        having = {name: state for name, state in inputs.items() if head in state} if lacking else {}
        apart = next((name for name, state in having.items() if _parts(head, state)), None)
        for owner in lacking if apart is not None else ():
            origin = tied_copies(config_of(inputs[owner]), inputs[owner]).get(head)
            if origin is not None:
                named, other = (f"'{name}'" if name else "the base" for name in (owner, apart))
                notes.append(f"{other} has '{head}' apart, and {named} ties it to '{origin}': the result has both")
                inputs[owner] = _says_untied(_with(inputs[owner], head, origin))
    states |= {name: state for name, state in inputs.items() if name}
    return inputs[""]


def _parts(head: str, state: LazyStateDict) -> bool:
    """Whether a model stores a head that is no embedding once more, and computes with it as with a tied one."""
    config = config_of(state)
    return (
        config.get("tie_word_embeddings") is False
        and untied_config({**config, "tie_word_embeddings": True}) == untied_config(config)
        and not _twin(state, head, [name for name in state if may_be_tied(name, head)])
    )


_SHARING = ("zamba", "zamba2")  # classes that tie whole blocks


def _class_ties(base: LazyStateDict, states: Mapping[str, LazyStateDict]) -> dict[str, str]:
    """Return the weights that the base's class ties, stored or not; none where no adapter can part or follow them."""
    adapters = [state for state in states.values() if state.is_task_vector]
    shared, config = bool(adapters), config_of(base)
    if config.get("model_type") not in _SHARING:  # asking transformers, which is slow to import, may be of no use
        shared = any(state.absolute or any(map(_is_table, state.entries.items())) for state in adapters)
    return tied_weights(config, base) if shared else {}


def _untied(
    base: LazyStateDict, states: dict[str, LazyStateDict], ties: Mapping[str, str], notes: list[str]
) -> LazyStateDict:
    """Store a base's tied weights one by one, if an adapter changes only some of them.

    A head, the embeddings of T5's and BART's towers and a head's bias are then all stored, because nothing is tied in a
    model whose config.json says so.
    """
    adapters = {name: state for name, state in states.items() if state.is_task_vector}
    copies = {copy: origin for copy, origin in ties.items() if copy not in base}
    weights = {copy: origin for copy, origin in copies.items() if copy.endswith(".weight")}
    alone = [
        (name, copy, origin)
        for name, state in adapters.items()
        for copy, origin in weights.items()
        if (copy in state and _twin(state, copy, base) != origin)
        or (copy not in state and _embedding_alone(state, origin))
    ]
    if not alone:
        return base
    name, copy, origin = alone[0]
    notes.append(f"'{name}' changes one of '{copy}' and '{origin}', which are tied: the result has both, untied")
    for copy, origin in copies.items():
        for name, state in states.items():
            follows = copy.endswith(".bias") or not _embedding_alone(state, origin)
            if copy not in state and origin in state and (name not in adapters or follows):
                states[name] = _with(state, copy, origin)
        base = _with(base, copy, origin)
    for name in states.keys() - adapters.keys():
        states[name] = _says_untied(states[name])
    return _says_untied(base)


def _parted(
    base: LazyStateDict, states: dict[str, LazyStateDict], left_out: frozenset[str], notes: list[str]
) -> tuple[LazyStateDict, dict[str, LazyStateDict]]:
    """Store tied weights one by one, if some of them are merged and others are not."""
    parted = {name: first for name, first in base.tied.items() if (name in left_out) != (first in left_out)}
    if not parted:
        return base, states
    name, first = min(parted.items())
    notes.append(f"one of '{name}' and '{first}', which are tied, stays the base's: the result has both, untied")
    made = _says_untied(base)
    made.tied = {name: first for name, first in base.tied.items() if name not in parted}
    return made, {name: state if state.is_task_vector else _says_untied(state) for name, state in states.items()}


def _is_table(tensor: tuple[str, Entry]) -> bool:
    """Whether a tensor of an adapter, by its name and entry, is an embedding or a head."""
    name, entry = tensor
    return may_be_tied(name, name) or (isinstance(entry, LoraEntry) and entry.embedding)


def _says_untied(state: LazyStateDict) -> LazyStateDict:
    made = view(state)
    made.config = untied_config(config_of(state))
    return made


def _heads_with_embedding(
    base: LazyStateDict, states: Mapping[str, LazyStateDict], ties: Mapping[str, str]
) -> dict[str, LazyStateDict]:
    """Apply an adapter's change of the embedding to the tied head too, if the base's file holds both."""
    changed = dict(states)
    for head, embedding in _still_tied(base, ties):
        for name, state in changed.items():
            lacks = state.is_task_vector and embedding in state and head not in state
            if head in base and lacks and not _embedding_alone(state, embedding):
                changed[name] = _with(state, head, embedding)
    return changed


def _still_tied(base: LazyStateDict, ties: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the ties of weights that hold: those of a file that stores both are equal."""
    tied = config_of(base).get("tie_word_embeddings") is not False
    return [pair for pair in ties.items() if tied and pair[0].endswith(".weight")
            and (pair[0] not in base or _twin(base, pair[0], [pair[1]], ties))]  # fmt: skip


def _embedding_alone(state: LazyStateDict, embedding: str) -> bool:
    """Whether an adapter changes an embedding and not the head that is tied to it, as PEFT computes with it.

    PEFT changes single retrained tokens in the tied head as well; a difference from a base is of both.
    """
    entry = state.entries.get(embedding)
    return isinstance(entry, LoraEntry) or (embedding in state.absolute and not isinstance(entry, TokensEntry))


def _heads_with_tokens(
    base: LazyStateDict, states: Mapping[str, LazyStateDict], ties: Mapping[str, str]
) -> dict[str, LazyStateDict]:
    """Start LoRA of a tied head from the tokens that the adapter retrained, which PEFT changes in the head too."""
    changed = dict(states)
    for head, embedding in _still_tied(base, ties):
        for name, state in states.items():
            lora, tokens = state.entries.get(head), state.entries.get(embedding)
            if isinstance(lora, LoraEntry) and isinstance(tokens, TokensEntry):
                rows = replace(tokens, weight=tokens.weight or base.entries[embedding])
                changed[name] = view(state, entries={**state.entries, head: AddedEntry(rows, lora)})
                changed[name].absolute |= {head}
    return changed


def _with(state: LazyStateDict, name: str, source: str) -> LazyStateDict:
    """Return a state with one of its tensors under a second name."""
    entries = {**state.entries, name: state.entries[source]}
    infos = {**state.infos, name: state.infos[source]}
    shards = (*state.shards[:-1], (*state.shards[-1], name)) if state.shards else ()
    made = view(state, entries=entries, infos=infos)
    made.shards = shards
    made.absolute |= {name} if source in state.absolute else set()
    return made


def _twin(
    state: LazyStateDict, name: str, candidates: Collection[str], ties: Mapping[str, str] | None = None
) -> str | None:
    """Return the candidate that shares its tensor in `state` with `name`.

    The file says so; or the two hold the same values and are a head and an embedding, which some models tie, or tied by
    the class (`ties`). Other tensors may be equal by chance, as norms are before training.
    """
    info, first = state.infos[name], state.tied.get(name, name)
    for other in candidates:
        if other == name or other not in state or state.infos[other] != info or not info.numel:
            continue
        noted = state.tied.get(other, other) == first
        tied = may_be_tied(name, other) or (ties or {}).get(name) == other
        if noted or (tied and _equal(state.entries[name], state.entries[other], info.numel)):
            return other
    return None


def _equal(a: Entry, b: Entry, count: int) -> bool:
    """Whether two tensors hold the same values; block by block, so that unequal ones cost one read each."""
    spans = ((start, min(start + BLOCK, count)) for start in range(0, count, BLOCK))
    return all(same_values(a.read(*span), b.read(*span)) for span in spans)


def _completed(
    expert: str, base: LazyStateDict, state: LazyStateDict, left_out: frozenset[str], notes: list[str]
) -> LazyStateDict:
    """Take what an expert lacks from the base, so that its task vector is zero there."""
    lacking = [] if state.is_task_vector else [name for name in base if name not in state and name not in left_out]
    if not lacking:
        return state
    more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    notes.append(f"'{lacking[0]}'{more}, which '{expert}' lacks, {'are' if more else 'is'} the base's")
    return _with_those_of(base, state, lacking)
