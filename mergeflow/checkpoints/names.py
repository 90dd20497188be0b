"""Map tensor names between files of transformers 4 and 5 and memory, and find tied weights."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.folders import class_settings
from mergeflow.checkpoints.header import FLOAT32, TensorInfo
from mergeflow.checkpoints.lora import AddedEntry, DoraEntry, Formed, LoraEntry, TokensEntry
from mergeflow.checkpoints.reader import Entry, LazyStateDict, view
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

# Names of the head by `model_type`, for the classes whose head has another name than `lm_head`.
_MASKED = {
    "bert": "cls.predictions.decoder",
    "deberta-v2": "cls.predictions.decoder",
    "deberta": "cls.predictions.decoder",
    "roberta": "lm_head.decoder",
    "xlm-roberta": "lm_head.decoder",
    "distilbert": "vocab_projector",
    "electra": "generator_lm_head",
    "albert": "predictions.decoder",
    "modernbert": "decoder",
}
_GENERATING = {
    "whisper": "proj_out",
    "moonshine": "proj_out",
    "modernbert-decoder": "decoder",
    "biogpt": "output_projection",
    "trocr": "output_projection",
    "t5gemma": "lm_head.out_proj",
    "t5gemma2": "lm_head.out_proj",
    "gpt_neox_japanese": "embed_out",
    "xlm": "pred_layer.proj",
    "flaubert": "pred_layer.proj",
}
_CLASS = re.compile(r"For(?:CausalLM|ConditionalGeneration)$|LMHeadModel$")
# Embeddings of words in order of preference: T5's and BART's first, whose towers hold copies of their own.
_WORDS = re.compile(
    r"(?:^|\.)(?:shared|embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings|transformer\.w)\.weight$"
)
_TOWERS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def head_and_embedding(config: Mapping[str, Any], names: Collection[str]) -> tuple[str, str] | None:
    """Return the names in memory of a language model's head and of the embedding that transformers may tie it to."""
    made = config.get("architectures")
    cls = made[0] if isinstance(made, list) and made and isinstance(made[0], str) else ""
    kind = str(config.get("model_type"))
    embedding = _embedding(names)
    masked = _MASKED.get(kind) if cls.endswith("ForMaskedLM") else None
    head = masked or (_GENERATING.get(kind, "lm_head") if _CLASS.search(cls) else None)
    return (f"{head}.weight", embedding) if head is not None and embedding is not None else None


def _embedding(names: Collection[str]) -> str | None:
    words = [name for name in names if _WORDS.search(name)]
    return next((name for name in words if name.endswith("shared.weight")), min(words, default=None))


_HEADS = {"lm_head", "output", "head", *_MASKED.values(), *_GENERATING.values()}


def may_be_tied(a: str, b: str) -> bool:
    """Whether two names are among a language model's head, embeddings of words, and biases of the head.

    Example:
        >>> may_be_tied("lm_head.weight", "model.embed_tokens.weight"), may_be_tied("h.0.ln.weight", "h.1.ln.weight")
        (True, False)
    """
    return _is_table(a) and _is_table(b)


def _is_table(name: str) -> bool:
    module, _, end = name.rpartition(".")
    head = any(f".{module}".endswith(f".{head_name}") for head_name in _HEADS)
    biased = any(
        f".{head_name}".endswith(f".{module}.decoder") or f".{module}".endswith(f".{head_name}") for head_name in _HEADS
    )
    return bool(_WORDS.search(name)) or (head and end == "weight") or (biased and end == "bias")


def copies_of_embedding(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return the names of weights that transformers ties to stored ones, `names` in memory, each with that one."""
    copies: dict[str, str] = {}
    pair, embedding = head_and_embedding(config, names), _embedding(names)
    if pair is not None:
        copies[pair[0]] = pair[1]
        decoder = module_of(pair[0])
        if f"{module_of(decoder)}.bias" in names:  # the bias of a masked model's decoder is its module's
            copies[f"{decoder}.bias"] = f"{module_of(decoder)}.bias"
    if embedding is not None and embedding.endswith("shared.weight"):
        copies |= {embedding.removesuffix("shared.weight") + tower: embedding for tower in _TOWERS}
    return {name: origin for name, origin in copies.items() if name not in names}


def module_of(name: str) -> str:
    """Return the module that holds a tensor, or a module; "" for the model itself."""
    return name.rpartition(".")[0]


# Architectures whose classes declare stacked experts as [experts, in, out]; PEFT follows the declaration.
_IN_OUT_EXPERTS = {"gpt_oss", "aria_text", "aria", "openai_privacy_filter"}


def in_out_experts(config: Mapping[str, Any]) -> bool:
    """Whether a model, or a part of it such as the language model of a vision-language model, is of such a type.

    Example:
        >>> in_out_experts({"model_type": "internvl", "text_config": {"model_type": "gpt_oss"}})
        True
    """
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    return any(part.get("model_type") in _IN_OUT_EXPERTS for part in parts)


# What transformers 5 renames when it reads a file, by `model_type`; it writes the file's names again.
_LOADED = {
    "gpt_neox": (("embed_out.", "lm_head."),),
    "mixtral": ((".block_sparse_moe.", ".mlp."),),
    "phimoe": ((".block_sparse_moe.", ".mlp."), (".mlp.gate.weight", ".mlp.router.weight")),
    "granitemoe": (
        (".block_sparse_moe.input_linear.weight", ".block_sparse_moe.experts.gate_up_proj"),
        (".block_sparse_moe.output_linear.weight", ".block_sparse_moe.experts.down_proj"),
        (".block_sparse_moe.router.layer.weight", ".block_sparse_moe.router.weight"),
    ),
}
_LISTED = re.compile(r"^(.*\.experts)\.(\d+)\.(w[123]|gate_proj|up_proj|down_proj)\.weight$")
# Of each listed matrix, the fused stack [E, ·, d] that holds it; gate rows stand before up rows.
_PARTS = {"gate_up_proj": (("w1", "w3"), ("gate_proj", "up_proj")), "down_proj": (("w2",), ("down_proj",))}


# Older names of any architecture: layer norms of TensorFlow's BERT, and weight norm before torch 2.
_OLDER = (
    (re.compile(r"(?<=\.)LayerNorm\.gamma$"), "LayerNorm.weight"),
    (re.compile(r"(?<=\.)LayerNorm\.beta$"), "LayerNorm.bias"),
    (re.compile(r"(?<=\.)weight_g$"), "parametrizations.weight.original0"),
    (re.compile(r"(?<=\.)weight_v$"), "parametrizations.weight.original1"),
)


def loaded_name(config: Mapping[str, Any], name: str) -> str:
    """Return the name by which transformers 5 has a tensor of a file in memory.

    Example:
        >>> loaded_name({"model_type": "gpt_neox"}, "embed_out.weight")
        'lm_head.weight'
    """
    for stored, loaded in _LOADED.get(str(config.get("model_type")), ()):
        name = name.replace(stored, loaded) if stored in f".{name}" else name
    for older, loaded in _OLDER:
        name = older.sub(loaded, name)
    return name


def piece_of_stack(loaded: str, names: Collection[str]) -> str | None:
    """Return the name of a listed expert's weight as a part of the stack that transformers has in memory.

    Example:
        >>> piece_of_stack("mlp.experts.3.up_proj.weight", ["mlp.experts.gate_up_proj"])
        'mlp.experts.gate_up_proj[3].up'
    """
    match = _LISTED.match(loaded)
    if match is None:
        return None
    stem, expert, projection = match.groups()
    fused, way = next((fused, way) for fused, ways in _PARTS.items() for way in ways if projection in way)
    half = (".gate", ".up")[way.index(projection)] if len(way) == 2 else ""
    return f"{stem}.{fused}[{expert}]{half}" if f"{stem}.{fused}" in names else None


@dataclass(frozen=True)
class JoinedEntry:
    """Flattened tensors, concatenated."""

    parts: tuple[Entry, ...]
    ends: tuple[int, ...]  # the number of elements up to the end of each

    def read(self, start: int, stop: int) -> Tensor:
        pieces = []
        for at in range(bisect_right(self.ends, start), len(self.parts)):
            begin = self.ends[at - 1] if at else 0
            if begin >= stop:
                break
            pieces.append(self.parts[at].read(max(start, begin) - begin, min(stop, self.ends[at]) - begin))
        return torch.cat(pieces) if len(pieces) != 1 else pieces[0]


@dataclass(frozen=True)
class PartEntry:
    """A part of a flattened tensor, from an element on."""

    whole: Entry
    offset: int

    def read(self, start: int, stop: int) -> Tensor:
        return self.whole.read(self.offset + start, self.offset + stop)


Found = dict[str, tuple[Entry, TensorInfo, tuple[str, ...]]]
"""By the wanted name: where the data is, its shape, and the names that it comes from."""


def renamed(config: Mapping[str, Any], base: LazyStateDict, state: LazyStateDict) -> Found:
    """Rename the tensors of a state to the base's, joining or cutting stacks of experts."""
    named = {loaded_name(config, name): name for name in base}
    strange = {name: loaded_name(config, name) for name in state if name not in base}
    placed: Found = {
        named[loaded]: (state.entries[name], state.infos[name], (name,))
        for name, loaded in strange.items()
        if loaded in named and named[loaded] not in state
    }
    left = {loaded: name for name, loaded in strange.items() if loaded not in named}
    return placed | _fused(named, left, state) | _listed(named, left, base, state)


def _matrices(stem: str, experts: int, way: Sequence[str]) -> list[str]:
    return [f"{stem}.{expert}.{part}.weight" for expert in range(experts) for part in way]


def _fused(named: Mapping[str, str], left: Mapping[str, str], state: LazyStateDict) -> Found:
    """Join listed experts into the stacks that are wanted."""
    placed: Found = {}
    for stem in sorted({match.group(1) for name in left if (match := _LISTED.match(name))}):
        for fused, ways in _PARTS.items():
            wanted = named.get(f"{stem}.{fused}")
            way = next((way for way in ways if f"{stem}.0.{way[0]}.weight" in left), None)
            if wanted is None or way is None:
                continue
            count = sum(name in left for name in _matrices(stem, len(left), way[:1]))
            listed = _matrices(stem, count, way)
            if not all(name in left for name in listed):
                continue
            names = tuple(left[name] for name in listed)
            infos = [state.infos[name] for name in names]
            rows = sum(info.shape[0] for info in infos[: len(way)])
            stack = TensorInfo((count, rows, *infos[0].shape[1:]), infos[0].dtype)
            ends = tuple(accumulate(info.numel for info in infos))
            if ends[-1] == stack.numel:
                placed[wanted] = (JoinedEntry(tuple(state.entries[name] for name in names), ends), stack, names)
    return placed


def _listed(named: Mapping[str, str], left: Mapping[str, str], base: LazyStateDict, state: LazyStateDict) -> Found:
    """Cut stacks into the listed experts that are wanted."""
    parts: Found = {}
    for loaded, name in left.items():
        stem, _, fused = loaded.rpartition(".")
        info = state.infos[name]
        if fused not in _PARTS or len(info.shape) != 3:
            continue
        way = next((way for way in _PARTS[fused] if f"{stem}.0.{way[0]}.weight" in named), ())
        listed = [named.get(matrix, "") for matrix in _matrices(stem, info.shape[0], way)]
        if not listed or not all(listed):
            continue
        shapes = [base.infos[matrix] for matrix in listed]
        if sum(shape.numel for shape in shapes) == info.numel:
            offsets = accumulate((shape.numel for shape in shapes), initial=0)
            for matrix, shape, offset in zip(listed, shapes, offsets, strict=False):
                parts[matrix] = PartEntry(state.entries[name], offset), TensorInfo(shape.shape, info.dtype), (name,)
    return parts


def names_in_memory(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the names that files have for tensors, by the names that these have in memory.

    Where transformers is installed and knows the class that config.json names, its own conversion tables say it: a
    ViT's `vit.encoder.layer.0.…` is `vit.layers.0.…` in memory since transformers 5. Else the renamings known here do.
    A weight of a listed expert that is part of a stack in memory is called so: `mlp.experts.gate_up_proj[3].up`.
    """
    tables = _tables(config)
    return {loaded_name(config, name) if tables is None else tables.in_memory(name): name for name in names}


@dataclass(frozen=True)
class _Tables:
    """What transformers renames and converts when it reads a file of one class, and when it writes one."""

    config: Mapping[str, Any]  # config.json
    model: Any  # the class, without data
    tensors: dict[str, Tensor]  # its state dict: by their names in memory, without data
    loading: list[Any]  # the transforms of reading
    saving: list[Any]  # those of writing

    def in_memory(self, name: str) -> str:
        """Return the name in memory of a file's tensor that no conversion changes."""
        from transformers.core_model_loading import WeightRenaming, rename_source_key

        renamings = [each for each in self.loading if isinstance(each, WeightRenaming)]
        loaded, _ = rename_source_key(name, renamings, [], self.model.base_model_prefix, self.tensors)
        piece = piece_of_stack(loaded, self.tensors)
        loaded = loaded if piece or loaded in self.tensors else loaded_name(self.config, name)
        return piece or piece_of_stack(loaded, self.tensors) or loaded

    def groups(self, names: Iterable[str], saving: bool) -> Iterator[_Group]:
        """Yield the tensors that reading a file, or writing one, converts together."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            apply_converters,
            dot_natural_key,
            rename_source_key,
        )

        transforms = self.saving if saving else self.loading
        converters = [each for each in transforms if isinstance(each, WeightConverter)]
        renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        members: dict[str, list[tuple[str, str]]] = {}
        for name in sorted(names, key=dot_natural_key):
            if saving:
                target, pattern = apply_converters(name, converters)
            else:
                prefix = self.model.base_model_prefix
                target, pattern = rename_source_key(name, renamings, converters, prefix, self.tensors)
            if pattern is not None:
                members.setdefault(target, []).append((name, pattern))
        for target, held in members.items():
            yield _Group(self.model, by_pattern[held[0][1]], target, tuple(held), renamings if saving else [])


@dataclass(frozen=True)
class _Group:
    """Tensors that transformers converts together, such as the three that it fuses into one."""

    model: Any  # the class, without data
    converter: Any  # what it does
    target: str  # the name that the converter gives its result, or the first of them
    members: tuple[tuple[str, str], ...]  # the names of the tensors, each with the converter's pattern for it
    renamings: list[Any]  # what is renamed afterwards

    def convert(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the results of the members' tensors, in their order, by name."""
        from transformers.core_model_loading import apply_renamings

        converter = deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.members, tensors, strict=True):
            converter.add_tensor(self.target, name, pattern, tensor)
        made = converter.convert(self.target, model=self.model, config=self.model.config)
        return {apply_renamings(name, self.renamings): value[0] if isinstance(value, list) else value
                for name, value in made.items()}  # fmt: skip


def _tables(config: Mapping[str, Any]) -> _Tables | None:
    """Return transformers' tables; None without it, for a class that it lacks, or where config.json is not its own."""
    if not isinstance(config.get("architectures"), list) or find_spec("transformers") is None:
        return None
    return _tables_of(json.dumps(config, default=str))


@lru_cache(2)
def _tables_of(text: str) -> _Tables | None:
    import transformers

    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # a version without conversions
        return None
    config = json.loads(text)
    kind: Any = getattr(transformers, str(next(iter(config["architectures"]), "")), None)
    if getattr(kind, "config_class", None) is None:
        return None
    try:
        with torch.device("meta"):
            model = kind(kind.config_class.from_dict(class_settings(config)))
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        written = [transform for transform in transforms if not isinstance(transform, PrefixChange)]
        saving = [transform.reverse_transform() for transform in reversed(written)]
        return _Tables(config, model, model.state_dict(), get_model_conversion_mapping(model), saving)
    except Exception:  # whatever a class raises of settings that it does not take
        return None


# T5's classes treat an untied model as T5 1.1, which does not scale the head's input; this setting restores it.
_SCALING, _SCALED = "scale_decoder_outputs", ("t5", "longt5", "pop2piano")


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json of a model whose head is not its embedding: else transformers ties the two again."""
    tied, kind = config.get("tie_word_embeddings") is not False, config.get("model_type")
    if kind == "switch_transformers" and tied:
        raise MergeflowError(
            "the result has a head of its own, which switch_transformers does not scale as it does a tied one: change "
            "head and embedding alike, or leave both as the base has them."
        )
    scaling = {_SCALING: config.get(_SCALING, tied)} if kind in _SCALED else {}
    return {**config, **scaling, "tie_word_embeddings": False}


def module_in_memory(config: Mapping[str, Any], module: str) -> Any:
    """Return a module of the model, without data, where transformers knows its class; else None."""
    tables = _tables(config)
    try:
        return None if tables is None else tables.model.get_submodule(module)
    except AttributeError:
        return None


def stores_inputs_first(module: Any) -> bool:
    """Whether a module is transformers' Conv1D, a linear layer with its weight stored as [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def unknown_in_memory(config: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return the names that no tensor has in memory, such as three weights of memory that a file fuses."""
    tables = _tables(config)
    return [] if tables is None else [name for name in names if name not in tables.tensors]


def tied_copies(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return the names of weights that a model ties to stored ones, by its class where transformers knows it."""
    return {copy: origin for copy, origin in tied_weights(config, names).items() if copy not in names}


def tied_weights(config: Mapping[str, Any], names: Collection[str]) -> dict[str, str]:
    """Return the copies of `tied_copies`, and those that are stored too; without transformers only a head of these."""
    tables = _tables(config)
    ties = None if tables is None else getattr(tables.model, "all_tied_weights_keys", None)
    if tables is None or ties is None:
        loaded = {loaded_name(config, name): name for name in names}
        head, embedding = head_and_embedding(config, loaded) or ("", "")
        pair = {loaded.get(head, head): loaded[embedding]} if embedding else {}
        return copies_of_embedding(config, names) | pair
    stored = {tables.in_memory(name): name for name in names}
    return {stored.get(copy, copy): stored[origin] for copy, origin in ties.items() if origin in stored}


@dataclass(frozen=True)
class ConvertedEntry(Formed):
    """A tensor that transformers' conversion makes of others; parts without data are 0."""

    group: _Group
    name: str
    parts: tuple[tuple[Entry | None, TensorInfo], ...]

    def formed(self) -> Tensor:
        """Return the flattened tensor [numel]."""
        tensors = [
            torch.zeros(info.shape, dtype=info.dtype.torch)
            if entry is None
            else entry.read(0, info.numel).to(info.dtype.torch).reshape(info.shape)
            for entry, info in self.parts
        ]
        return self.group.convert(tensors)[self.name].reshape(-1)


def converted(config: Mapping[str, Any], base: LazyStateDict, state: LazyStateDict) -> Found:
    """Return the tensors of the base's file that transformers' conversion makes of a state's under strange names.

    The base may be as in files and the state as in memory, as adapters are, or the other way round. Of a task vector a
    part that is missing is a difference of 0; or the base's part, where the adapter gives another part whole.
    """
    strange = {name for name in state if name not in base}
    tables = _tables(config) if strange else None
    if tables is None:
        return {}
    stored = {tables.in_memory(name): name for name in base}
    made: Found = {
        stored[name]: (state.entries[name], state.infos[name], (name,))
        for name in strange
        if name in stored and stored[name] not in state
    }
    for saving in (False, True):
        for group in tables.groups({*tables.tensors, *strange} if saving else strange, saving):
            if strange.intersection(name for name, _ in group.members):
                made |= _of_group(group, tables, base, state, stored)
    return made


def _of_group(
    group: _Group, tables: _Tables, base: LazyStateDict, state: LazyStateDict, stored: Mapping[str, str]
) -> Found:
    """Convert a group of a state's tensors to those of the base's file; to none where it is not whole, or unlike."""
    names = [name for name, _ in group.members]
    held = [name for name in names if name in state]
    if len(held) < len(names) and not state.is_task_vector:
        return {}
    entries: Mapping[str, Entry] = state.entries
    if state.is_task_vector and state.absolute.intersection(held):
        whole = _whole_parts(names, tables, base, state)
        if whole is None:
            return {}
        entries, infos, dtype = *whole, FLOAT32
    elif len({state.infos[name].dtype for name in held}) > 1:
        return {}
    else:
        dtype = state.infos[held[0]].dtype
        infos = {n: state.infos[n] if n in held else TensorInfo(tuple(tables.tensors[n].shape), dtype) for n in names}
    try:
        shapes = group.convert(torch.empty(infos[name].shape, dtype=dtype.torch, device="meta") for name in names)
    except Exception:  # tensors that are not those of the class: they are told as mismatches
        return {}
    parts = tuple((entries.get(name), infos[name]) for name in names)
    made: Found = {}
    for result, value in shapes.items():
        name = result if result in base else stored.get(tables.in_memory(result), "")
        info = TensorInfo(tuple(value.shape), dtype)
        if name not in base or base.infos[name].shape != info.shape:
            return {}
        made[name] = ConvertedEntry(group, result, parts), info, tuple(held)
    return made


def _whole_parts(
    names: Sequence[str], tables: _Tables, base: LazyStateDict, state: LazyStateDict
) -> tuple[dict[str, Entry], dict[str, TensorInfo]] | None:
    """Return a group's weights as an adapter that gives some of them whole, such as DoRA, makes them of the base's.

    None where the base has not all of them.
    """
    wanted = {name: TensorInfo(tuple(value.shape), FLOAT32) for name, value in tables.tensors.items()}
    in_memory = view(base, entries=dict.fromkeys(wanted, next(iter(base.entries.values()))), infos=wanted)
    of_base = {name: entry for name, (entry, _, _) in converted(tables.config, in_memory, base).items()}
    entries: dict[str, Entry] = {}
    for name in names:
        weight, entry = base.entries.get(name, of_base.get(name)), state.entries.get(name)
        if name not in wanted or weight is None:
            return None
        if entry is None:
            entries[name] = weight
        elif isinstance(entry, LoraEntry):
            entries[name] = AddedEntry(weight, entry)
        elif isinstance(entry, DoraEntry | TokensEntry) and entry.weight is None:
            entries[name] = replace(entry, weight=weight)
        elif name in state.absolute:
            entries[name] = entry
        else:
            return None
    return entries, {name: wanted[name] for name in names}
