"""Open PEFT LoRA and DoRA adapters as task vectors, which are zero for weights that are not adapted."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod, sqrt
from pathlib import Path
from threading import Lock, local
from typing import TYPE_CHECKING, Any
from weakref import ref

from mergeflow.checkpoints.header import FLOAT32, TensorInfo
from mergeflow.checkpoints.reader import Entry, LazyStateDict, unwrap, view
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Formed:
    """An entry whose tensor is formed whole, once for each thread that reads it from its first element on."""

    cache: local = field(default_factory=local, init=False, compare=False)

    def formed(self) -> Tensor:
        """Return the flattened tensor, [numel]."""
        raise NotImplementedError

    def read(self, start: int, stop: int) -> Tensor:
        if start == 0 or not hasattr(self.cache, "formed"):
            self.cache.formed = self.formed()
        piece: Tensor = self.cache.formed[start:stop]
        if stop >= self.cache.formed.numel():
            del self.cache.formed
        return piece


@dataclass(frozen=True)
class LoraEntry(Formed):
    """The difference one adapted weight makes, factor · B A, or its transpose.

    Of a convolution A holds the kernels, [r, in · kernel], and B mixes them at each place.

    It is `placed` where B A lies as the weight is stored, whatever its module: of embeddings, which are transposed, of
    convolutions, and of parameters that are adapted without their module.
    """

    down: Entry
    up: Entry
    shape: tuple[int, int]
    rank: int
    factor: float
    transposed: bool
    placed: bool = False

    @property
    def embedding(self) -> bool:
        return self.placed and self.transposed

    def delta(self) -> Tensor:
        """Return the difference as a matrix [out, in], float32, not transposed."""
        down, up = self.factors()
        return (up.float() @ down.float()) * self.factor

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return A [r, in] and B [out, r] as they are stored, without the factor."""
        rows, columns = self.shape
        down = self.down.read(0, self.rank * columns).reshape(self.rank, columns)
        return down, self.up.read(0, rows * self.rank).reshape(rows, self.rank)

    def formed(self) -> Tensor:
        """Return the flattened difference [numel] as the weight is stored, float32."""
        delta = self.delta()
        return (delta.T if self.transposed else delta).reshape(-1)


# The entries whose factors B were read last, by any thread: experts of several stacks are read in turns.
_RECENT: deque[ref[ExpertsEntry]] = deque()
_MOST = 16  # two stacks of four adapters in two threads
_LOCK = Lock()


@dataclass(frozen=True)
class ExpertsEntry:
    """The difference one adapter makes to the stacked experts of a mixture, factor · B_e A_e of each expert e.

    PEFT stores A as [experts · rank, in], and B as [out, rank · experts] with the experts innermost.
    """

    down: Entry
    up: Entry
    experts: int
    shape: tuple[int, int]
    rank: int
    factor: float
    transposed: bool = False  # whether the stack is stored as [experts, in, out]
    cache: list[Tensor] = field(default_factory=list, init=False, compare=False)

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor]:
        """Return A [rank, in] and B [out, rank] of one expert as they are stored, without the factor."""
        size = self.rank * self.shape[1]
        down = self.down.read(expert * size, (expert + 1) * size).reshape(self.rank, self.shape[1])
        return down, self.ups()[expert]

    def ups(self) -> Tensor:
        """Return B of all experts, [experts, out, rank], which is read whole for any of them."""
        with _LOCK:
            if self.cache:
                return self.cache[0]
        rows, size = self.shape[0], self.rank * self.experts
        ups = self.up.read(0, rows * size).reshape(rows, self.rank, self.experts).permute(2, 0, 1).contiguous()
        with _LOCK:
            if not self.cache:
                _RECENT.append(ref(self))
            self.cache[:] = [ups]
            while len(_RECENT) > _MOST:
                oldest = _RECENT.popleft()()
                if oldest is not None:
                    oldest.cache.clear()
        return ups

    def read(self, start: int, stop: int) -> Tensor:
        """Form only the experts that have some of these elements, [stop − start], float32."""
        (rows, columns), each = self.shape, self.rank * self.shape[1]
        size = rows * columns
        first, last = start // size, -(-stop // size)
        down = self.down.read(first * each, last * each).reshape(-1, self.rank, columns)
        formed = self.ups()[first:last].float() @ down.float() * self.factor
        flat = (formed.mT if self.transposed else formed).reshape(-1)
        return flat[start - first * size : stop - first * size]


@dataclass(frozen=True)
class AddedEntry(Formed):
    """A weight that the adapter stores whole, with its LoRA difference added, float32."""

    weight: Entry
    lora: LoraEntry

    def formed(self) -> Tensor:
        """Return the flattened adapted weight [numel]."""
        delta = self.lora.formed()
        return self.weight.read(0, delta.numel()).float() + delta


@dataclass(frozen=True)
class BiasEntry:
    """The bias of LoRA's B times the adapter's factor, float32; with the adapted module's bias where that is stored."""

    bias: Entry
    factor: float
    stored: Entry | None = None

    def read(self, start: int, stop: int) -> Tensor:
        change = self.bias.read(start, stop).float() * self.factor
        return change if self.stored is None else self.stored.read(start, stop).float() + change


@dataclass(frozen=True)
class DoraEntry(Formed):
    """A weight that DoRA adapts: magnitude · (W + Δ) / ‖W + Δ‖ for each of its outputs, float32; W is the base's.

    The base's weight is bound when the adapter meets its base in a merge.
    """

    magnitude: Entry
    lora: LoraEntry
    weight: Entry | None = None

    def formed(self) -> Tensor:
        """Return the flattened adapted weight [numel]."""
        if self.weight is None:
            raise MergeflowError("a DoRA adapter is a model only together with its base: give it as an expert.")
        rows, columns = self.lora.shape
        stored = self.weight.read(0, rows * columns).float()
        weight = stored.reshape(columns, rows).T if self.lora.transposed else stored.reshape(rows, columns)
        moved = weight + self.lora.delta()
        moved *= (self.magnitude.read(0, rows).float() / moved.norm(dim=1))[:, None]
        return (moved.T if self.lora.transposed else moved).reshape(-1)


@dataclass(frozen=True)
class TokensEntry:
    """An embedding, or a head, of which an adapter retrained the rows of some tokens, float32; others are the base's.

    PEFT calls these rows a delta, but they stand in the place of the base's. The base's weight is bound when the
    adapter meets its base in a merge.
    """

    rows: Entry
    tokens: tuple[int, ...]
    width: int
    weight: Entry | None = None

    def read(self, start: int, stop: int) -> Tensor:
        if self.weight is None:
            raise MergeflowError(
                "an adapter of single tokens is a model only together with its base: give it as an expert."
            )
        piece = self.weight.read(start, stop).float()
        rows = self.rows.read(0, len(self.tokens) * self.width).float()
        for row, token in enumerate(self.tokens):
            first, last = max(start, token * self.width), min(stop, (token + 1) * self.width)
            if first < last:
                offset = (row - token) * self.width
                piece[first - start : last - start] = rows[first + offset : last + offset]
        return piece


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS, ADAPTER_PICKLE = "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
# Keys of adapter_config.json that are read here.
READ = {
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
    "init_lora_weights", "target_parameters", "trainable_token_indices", "lora_bias",
}  # fmt: skip
# Keys whose value does not change what the stored tensors mean: training's, loading's, and which modules have factors.
HARMLESS = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "bias",
    "lora_dropout", "merge_weights", "megatron_config", "megatron_core", "runtime_config", "ensure_weight_tying",
    "qalora_group_size", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
}  # fmt: skip
# Ways to start an adapter that leave the base as it is; all others move the base's weight, so that B A is not the
# whole difference from it.
_STARTS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
# VeLoRA's own tensor is for the backward pass alone.
_OF_TRAINING = ".lora_velora_embed"
_A, _B, _BIAS = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias"
_EMBEDDING_A, _EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
_MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")
# PEFT also stores the weight of an adapted embedding or head, and stores biases under the wrapper's name.
_WRAPPED = ".base_layer."
# With a vocabulary that was extended PEFT stores retrained tables three times: plainly, in a wrapper, and as before;
# with `bias: all` biases of a retrained head of several modules again, and the adapter's name after the wrapper's.
_BEFORE = re.compile(r"\.original_module\.|\.token_adapter\.base_layer\.weight$")
_RETRAINED = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")
_WRAPPERS = re.compile(r"\.(?:base_layer|token_adapter|modules_to_save)(?=\.)")
_TOKENS = ".token_adapter.trainable_tokens_delta"
# In memory PEFT's names say which adapter a tensor is of; `save_pretrained` takes that out of them.
_OF_ADAPTER = re.compile(r"\.(?:lora_A\.([^.]+)\.weight|(?:lora_embedding_A|trainable_tokens_delta)\.([^.]+))$")
_NAMED = r"(\.(?:lora_\w+|modules_to_save|trainable_tokens_delta))\.{}(?=\.|$)"
ALL_LINEAR = "all-linear"  # PEFT's word for all linear modules but the head
INNER = ".base_layer.out_proj"  # of `nn.MultiheadAttention`, which PEFT adapts as one module
TWICE = "the change of out_proj in torch's own attention counts once; PEFT up to 0.21 moves it twice as far (peft 3774)"
# Stacks of a mixture's experts, in the order in which transformers' classes hold them: PEFT wraps a module once for
# each parameter that it adapts, the first of them innermost.
EXPERT_STACKS = ("gate_up_proj", "down_proj")


def open_adapter(folder: Path, config: dict[str, Any], open_file: Callable[[Path], LazyStateDict]) -> LazyStateDict:
    """Open a PEFT LoRA adapter folder, with its `adapter_config.json`, as a task vector over the base's names."""
    _refuse(folder, config)
    file = open_file(_weights_in(folder))
    unwrap(file)
    stored, notes = _as_saved(file, config)
    _check_pairs(folder, set(stored))
    entries: dict[str, Entry] = {}
    infos: dict[str, TensorInfo] = {}
    for name in sorted(stored):
        target = name.removeprefix(PREFIX)
        end = next((end for end in (_A, _EMBEDDING_A) if target.endswith(end)), None)
        if end is not None:
            module = target.removesuffix(end)
            stack = _stack_name(module, stored, config)
            if stack is not None:
                entries[stack], infos[stack] = _experts(stored, name, stack, config)
            else:
                weight = _weight_name(module, stored)
                lora, infos[weight] = _entry(stored, name, module, config)
                entries[weight] = _adapted(stored, module, lora, infos[weight], bool(config.get("use_dora")))
        elif target.endswith(_BIAS) and config.get("lora_bias"):
            bias = f"{target.removesuffix(_BIAS)}.bias"
            entries[bias], infos[bias] = _bias(stored, name, config)
        elif target.endswith(_TOKENS):
            weight = f"{target.removesuffix(_TOKENS)}.weight"
            entries[weight], infos[weight] = _tokens(stored, name, config)
        elif not target.endswith((_B, _EMBEDDING_B, _OF_TRAINING, *_MAGNITUDES)) and not _BEFORE.search(target):
            plain = _whole_name(stored, target)
            if plain not in entries:  # else it is part of an adapted weight
                entries[plain], infos[plain] = stored.entries[name], stored.infos[name]
    _check_entries(folder, config, entries)
    absolute = frozenset(name for name, entry in entries.items() if not _is_difference(entry))
    files = file.detach_files()
    return LazyStateDict(str(folder), entries, infos, stored.metadata, files, True, absolute=absolute, notes=notes)


def _is_difference(entry: Entry) -> bool:
    """Whether an adapter's entry is a difference from the base, and not the whole tensor."""
    return isinstance(entry, LoraEntry | ExpertsEntry) or (isinstance(entry, BiasEntry) and entry.stored is None)


def _weights_in(folder: Path) -> Path:
    files = [folder / name for name in (ADAPTER_WEIGHTS, ADAPTER_PICKLE) if (folder / name).exists()]
    if not files:
        others = sorted(str(path.relative_to(folder)) for path in folder.rglob("adapter_model*"))
        raise MergeflowError(
            f"adapter folder '{folder}' holds neither {ADAPTER_WEIGHTS} nor {ADAPTER_PICKLE}, but "
            f"{', '.join(others[:3]) or 'no weights'}: name the folder that has one, and join shards in one file."
        )
    return files[0]


def _as_saved(stored: LazyStateDict, config: Mapping[str, Any]) -> tuple[LazyStateDict, tuple[str, ...]]:
    """Return an adapter's tensors as PEFT saves them, and notes on what it would not find in the file as it is.

    A `state_dict()` names the adapter and may hold the base; other programs leave PEFT's prefix out.
    """
    notes = []
    if config.get("target_modules") in (None, ALL_LINEAR) and not _parameters(config):
        what = json.dumps(config.get("target_modules"))
        notes.append(
            f"adapter_config.json of '{stored.path}' lists no modules (target_modules = {what}): all factors of the "
            "file are merged, whichever of them PEFT would load"
        )
    # What the regime `lora` trains and saves here, with neither, moves it once.
    if (config.get("task_type") or config.get("auto_mapping")) and any(name.endswith(INNER + _A) for name in stored):
        notes.append(f"'{stored.path}': {TWICE}")
    bare = [name for name in stored if not name.startswith(PREFIX)]
    if twice := next((name for name in bare if PREFIX + name in stored), None):
        raise MergeflowError(f"'{stored.path}' holds '{twice}' with and without PEFT's prefix '{PREFIX}'.")
    if bare:
        notes.append(f"{len(bare)} names of '{stored.path}' lack PEFT's prefix '{PREFIX}', such as '{bare[0]}': added")
        stored = view(stored, rename={name: PREFIX + name for name in bare})
    for name, info in stored.infos.items():
        if ".lora_" in name and not info.dtype.is_floating_point:
            raise MergeflowError(
                f"adapter '{stored.path}': '{name}' is of {info.dtype}, expected floating-point numbers."
            )
    # PEFT takes a weight that is stored whole, and not the factors beside it.
    modules = {name: name.partition(".lora_")[0] for name in stored if ".lora_" in name}
    passed = {name for name, module in modules.items()
              if f"{module}.weight" in stored and _is_saved(config, module.removeprefix(PREFIX))}  # fmt: skip
    stored = view(stored, [name for name in stored if name not in passed]) if passed else stored
    return _of_one_adapter(stored, config), tuple(notes)


def _of_one_adapter(stored: LazyStateDict, config: Mapping[str, Any]) -> LazyStateDict:
    """Return the tensors of an adapter under names that do not say which one it is."""
    adapters = sorted({match[1] or match[2] for name in stored if (match := _OF_ADAPTER.search(name))})
    if not adapters:
        return stored
    if len(adapters) > 1:
        raise MergeflowError(
            f"'{stored.path}' holds several adapters ({', '.join(adapters)}). Save each into a folder of its own, with "
            "PEFT's save_pretrained(folder, selected_adapters=[name])."
        )
    named = re.compile(_NAMED.format(re.escape(adapters[0])))
    biases = config.get("bias") in ("all", "lora_only")
    names = [name for name in stored if named.search(name) or (biases and name.endswith(".bias"))]
    names = [name for name in names if name not in _tied_tokens(stored, names, config)]
    return view(stored, names, rename={name: named.sub(r"\1", name) for name in names})


def _tied_tokens(stored: LazyStateDict, names: Collection[str], config: Mapping[str, Any]) -> set[str]:
    """Return the retrained tokens of tied tables except their embedding's, of which alone PEFT saves them."""
    chosen = config.get("trainable_token_indices")
    ends = tuple(chosen) if isinstance(chosen, dict) else ()

    def order(name: str) -> tuple[bool, ...]:
        module = name.partition(".token_adapter.")[0]
        return (bool(ends) and not module.endswith(ends), ".base_layer" in name, "shared" not in module,
                not re.search("emb|wte", module))  # fmt: skip

    first: list[Tensor] = []
    copies = set()
    for name in sorted((name for name in names if _TOKENS in name), key=order):
        rows = stored[name]
        copies |= {name} if any(torch.equal(rows, other) for other in first) else set()
        first.append(rows)
    return copies


# What belongs to each end of a name: one of these.
_NEEDS: dict[str, tuple[str, ...]] = {
    _A: (_B,),
    _B: (_A,),
    _EMBEDDING_A: (_EMBEDDING_B,),
    _EMBEDDING_B: (_EMBEDDING_A,),
    **dict.fromkeys(_MAGNITUDES, (_A, _EMBEDDING_A)),
}


def _check_pairs(folder: Path, stored: Collection[str]) -> None:
    for name in stored:
        end = next((end for end in _NEEDS if name.endswith(end)), "")
        if end and not any(name.removesuffix(end) + need in stored for need in _NEEDS[end]):
            lacking = _NEEDS[end][0].removeprefix(".").removesuffix(".weight")
            raise MergeflowError(f"adapter '{folder}' holds '{name}' without its {lacking}: copy the adapter again.")


def _check_entries(folder: Path, config: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
    """Check that there are some, and that factors of tables that PEFT was to tie make one change."""
    if not entries:
        raise MergeflowError(f"adapter '{folder}' holds no LoRA weights.")
    if not config.get("ensure_weight_tying"):
        return
    loras = {name: entry for name, entry in entries.items() if isinstance(entry, LoraEntry)}
    sides = {name: tuple(side.T for side in lora.factors()[::-1]) if lora.embedding else lora.factors()
             for name, lora in loras.items()}  # fmt: skip
    first = next((name for name, lora in loras.items() if lora.embedding), "")
    for name, lora in loras.items() if first else ():
        table = lora.embedding or lora.shape == loras[first].shape[::-1]
        if table and not all(map(torch.equal, sides[name], sides[first])):
            raise MergeflowError(
                f"adapter '{folder}' was made with ensure_weight_tying, but its factors of '{name}' and '{first}' make "
                "different changes, so that PEFT itself computes with neither. Train it without ensure_weight_tying."
            )


def _whole_name(stored: LazyStateDict, target: str) -> str:
    """Return the base's name of a tensor that an adapter stores whole: a retrained module's, a bias, a copy."""
    if "lora_" in target or "trainable_tokens" in target:
        raise MergeflowError(
            f"adapter '{stored.path}' holds '{target}': only LoRA and DoRA of linear weights, convolutions and "
            "embeddings can be merged. Merge the adapter into its base first."
        )
    again = _RETRAINED.sub("", target)
    return again if again != target and PREFIX + again in stored else _WRAPPERS.sub("", target)


def _adapted(stored: LazyStateDict, module: str, lora: LoraEntry, info: TensorInfo, dora: bool) -> Entry:
    """Return the entry of an adapted weight: a difference, or with a copy or magnitudes beside it the whole weight."""
    rows, kernel = lora.shape[0], info.shape[2:]
    stem = PREFIX + module
    copy, magnitude = f"{stem}{_WRAPPED}weight", next((stem + end for end in _MAGNITUDES if stem + end in stored), None)
    lengths = (1, rows, *(1 for _ in kernel)) if kernel else (rows,)
    for name, shape in ((copy, info.shape), (magnitude, lengths)):
        if name is not None and name in stored and stored.infos[name].shape != shape:
            actual = list(stored.infos[name].shape)
            raise MergeflowError(f"adapter '{stored.path}': '{name}' has shape {actual}, expected {list(shape)}.")
    if dora != (magnitude is not None):
        says, has = ("a DoRA", "no magnitudes") if dora else ("no DoRA", "magnitudes, which PEFT would pass over")
        raise MergeflowError(
            f"adapter '{stored.path}' says it is {says} (use_dora), but '{module}' has {has}: copy both of its files "
            "again."
        )
    weight = stored.entries.get(copy)
    if magnitude is not None:
        return DoraEntry(stored.entries[magnitude], lora, weight)
    return lora if weight is None else AddedEntry(weight, lora)


def _weight_name(module: str, stored: LazyStateDict) -> str:
    """Return the base's name of an adapted weight; PEFT adapts `nn.MultiheadAttention` as one module with two."""
    if f"{PREFIX}{module}{INNER}{_A}" in stored:
        return f"{module}.in_proj_weight"
    return f"{module.removesuffix(INNER)}.out_proj.weight" if module.endswith(INNER) else f"{module}.weight"


def _parameters(config: Mapping[str, Any]) -> list[str]:
    """Return the parameters that an adapter adapts without their module; most have none."""
    parameters = config.get("target_parameters") or []
    return [str(name) for name in parameters] if isinstance(parameters, list | tuple) else [str(parameters)]


def _adapts(config: dict[str, Any], parameter: str) -> bool:
    return any(f".{parameter}".endswith(f".{end}") for end in _parameters(config))


def _stack_name(module: str, stored: LazyStateDict, config: dict[str, Any]) -> str | None:
    """Return the name of the stacked experts that a module's factors adapt; None for any other module."""
    plain = module.replace(".base_layer", "")
    if plain.rpartition(".")[2] != "experts":
        return None
    wanted = [stack for stack in EXPERT_STACKS if _adapts(config, f"{plain}.{stack}")]
    held = [depth for depth in range(len(wanted)) if f"{PREFIX}{plain}{'.base_layer' * depth}{_A}" in stored]
    depth = module.count(".base_layer")
    if len(held) != len(wanted) or depth not in held:
        raise MergeflowError(
            f"adapter '{stored.path}' adapts other parameters of '{plain}' than {' and '.join(EXPERT_STACKS)}, or "
            "lacks factors of one: only these stacks of experts can be merged. Merge the adapter into its base first."
        )
    return f"{plain}.{wanted[-1 - depth]}"


def _refuse(folder: Path, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        raise MergeflowError(
            f"adapter_config.json of '{folder}' says peft_type = {json.dumps(kind):.60}, expected a type of PEFT's "
            'such as "LORA": copy the adapter again, or say there what it is.'
        )
    if kind != "LORA":
        raise MergeflowError(
            f"adapter '{folder}' is of the type {kind!r}; only LORA is merged as it is. Make it part of its base: "
            f"mergeflow convert {folder} --out MODEL. Prompts and prefixes are no change of weights."
        )
    strange = [name for name in _parameters(config) if name.rpartition(".")[2] not in (*EXPERT_STACKS, "weight")]
    if strange:
        raise MergeflowError(
            f"adapter '{folder}' adapts parameters ({', '.join(sorted(strange))}); of parameters only weights and "
            f"stacks of experts ({', '.join(EXPERT_STACKS)}) can be merged. Merge it into its base first."
        )
    start = str(config.get("init_lora_weights", True)).lower()
    if start not in _STARTS:
        raise MergeflowError(
            f"adapter '{folder}' was started by {start!r}, which also changes the base (of these ways only "
            f"{', '.join(_STARTS[3:])} are known not to), so it is not the difference from your base. "
            "Convert it when it is saved (PEFT's path_initial_model_for_weight_conversion), or merge it first."
        )
    # An empty configuration of a part, such as `kasa_config: {}`, stands for its defaults.
    unread = {key: value for key, value in config.items() if key not in READ | HARMLESS}
    acting = sorted(key for key, value in unread.items() if value or (value == {} and key.endswith("_config")))
    if acting:
        listed = ", ".join(f"{key} = {json.dumps(config[key], ensure_ascii=False):.60}" for key in acting)
        raise MergeflowError(
            f"adapter '{folder}' has settings that make it more than plain LoRA, or are unknown: {listed}. Merge it "
            "into its base with PEFT first; where a setting only concerns training, take it out of adapter_config.json."
        )


def _entry(stored: LazyStateDict, name: str, module: str, config: dict[str, Any]) -> tuple[LoraEntry, TensorInfo]:
    embedding = name.endswith(_EMBEDDING_A)
    partner = name.removesuffix(_EMBEDDING_A) + _EMBEDDING_B if embedding else name.removesuffix(_A) + _B
    if embedding and config.get("use_dora"):
        raise MergeflowError(
            f"adapter '{stored.path}' is a DoRA of the embedding '{module}'. Merge it into its base first."
        )
    down, up = stored.infos[name].shape, stored.infos[partner].shape
    kernel = down[2:]  # of a convolution; B's is 1 everywhere
    if len(down) < 2 or len(up) != len(down) or up[1] != down[0] or any(size != 1 for size in up[2:]):
        grouped = ", but of a grouped convolution, which PEFT cannot merge either" if kernel and len(up) > 2 else ""
        raise MergeflowError(
            f"adapter '{stored.path}': '{name}' {list(down)} and its lora_B {list(up)} are not factors of a "
            f"linear weight or a convolution{grouped}; only LoRA and DoRA of such weights can be merged."
        )
    weight = f"{module}.weight"
    owner = weight if _adapts(config, weight) else module.removesuffix(INNER)
    if owner != weight:
        _check_target(stored, config, owner, up[0] if not embedding else down[1])
    rank, factor = _rank_and_factor(config, owner, down[0])
    if rank != down[0]:
        raise MergeflowError(f"adapter '{stored.path}': '{name}' has rank {down[0]}, its configuration says {rank}.")
    shape = (up[0], prod(down[1:]))
    said = bool(config.get("fan_in_fan_out"))
    placed = embedding or bool(kernel) or owner == weight
    transposed = embedding or (not placed and _inputs_first(stored, module, shape, said))
    info = TensorInfo((shape[1], shape[0]) if transposed else (up[0], *down[1:]), FLOAT32)
    return LoraEntry(stored.entries[name], stored.entries[partner], shape, down[0], factor, transposed, placed), info


# Settings that say which modules PEFT adapts.
_TARGETS = ("target_modules", "exclude_modules", "modules_to_save", "layers_to_transform", "layers_pattern")


def _check_target(stored: LazyStateDict, config: Mapping[str, Any], module: str, rows: int) -> None:
    """Check that the settings name a module that has factors; PEFT adds those of tables that it was to tie.

    Args:
        rows: Of its weight [out, in].
    """
    if is_target(config, module):
        return
    tables = [info.shape[-1:] for name, info in stored.infos.items() if name.endswith(_EMBEDDING_A)]
    if not config.get("ensure_weight_tying") or (rows,) not in tables:
        settings = {key: config[key] for key in _TARGETS if config.get(key) not in (None, [])}
        raise MergeflowError(
            f"adapter '{stored.path}' holds factors of '{module}', which its adapter_config.json does not adapt "
            f"({json.dumps(settings, ensure_ascii=False):.200}), so that PEFT would pass over them: name the module "
            "there, or take its factors out of the file."
        )


def is_target(config: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT adapts a module by its name; of one that lists no modules, each that has factors."""
    targets = _names(config, "target_modules")
    if _is_saved(config, module) or _ends(config, "exclude_modules", module):
        return False
    if targets == ALL_LINEAR or config.get("target_modules") is None:
        return not _parameters(config)
    if isinstance(targets, str) or module in targets:  # then PEFT looks at no layers
        return _ends(config, "target_modules", module)
    return _ends(config, "target_modules", module) and _is_in_layers(config, module)


def _is_saved(config: Mapping[str, Any], module: str) -> bool:
    """Whether a module is one of `modules_to_save`, or inside one."""
    names = _names(config, "modules_to_save")
    return any(_match(rf"(^|.*\.){name}($|\..*)", module, "modules_to_save") for name in names)


def _ends(config: Mapping[str, Any], key: str, module: str) -> bool:
    """Whether a module's name fits the expression, or ends in one of the names, that a setting gives."""
    names = _names(config, key)
    if isinstance(names, str):
        return _match(rf"({names})\Z", module, key) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)


def _is_in_layers(config: Mapping[str, Any], module: str) -> bool:
    layers, patterns = config.get("layers_to_transform"), _names(config, "layers_pattern")
    if layers is None or layers == []:
        return True
    starts = [rf"(?:^|.*?\.){name}" for name in ([patterns] if isinstance(patterns, str) else patterns)]
    starts = [rf"{start}\.(\d+)\." for start in starts or [r".*?\.[^.]*"]]
    match = next(filter(None, (_match(start, module, "layers_pattern") for start in starts)), None)
    return match is not None and int(match[match.lastindex or 0]) in (layers if isinstance(layers, list) else [layers])


def _names(config: Mapping[str, Any], key: str) -> str | list[str]:
    names = config.get(key) or []
    if not isinstance(names, str | list) or any(not isinstance(name, str) for name in names):
        raise MergeflowError(f"the adapter's configuration gives {key} = {names!r:.60}, expected names of modules.")
    return names


def _match(expression: str, module: str, key: str) -> re.Match[str] | None:
    try:
        return re.match(expression, module)
    except (re.error, RecursionError) as error:
        raise MergeflowError(f"the adapter's {key} has an invalid expression, {expression!r:.60}: {error}.") from None


def _bias(stored: LazyStateDict, name: str, config: dict[str, Any]) -> tuple[BiasEntry, TensorInfo]:
    """Return the bias that an adapter with `lora_bias` gives a module."""
    module = name.removesuffix(_BIAS)
    down = stored.infos.get(module + _A)
    _, factor = _rank_and_factor(config, module.removeprefix(PREFIX), down.shape[0] if down and down.shape else 1)
    copy = stored.entries.get(f"{module}{_WRAPPED}bias")
    return BiasEntry(stored.entries[name], factor, copy), TensorInfo(stored.infos[name].shape, FLOAT32)


def _inputs_first(stored: LazyStateDict, module: str, shape: tuple[int, int], said: bool) -> bool:
    """Return whether an adapted weight is stored [in, out]: as the adapter's copy, else as `said`."""
    copy = stored.infos.get(f"{PREFIX}{module}{_WRAPPED}weight")
    if copy is None or shape[0] == shape[1] or copy.shape not in (shape, shape[::-1]):
        return said
    return copy.shape != shape


def _experts(stored: LazyStateDict, name: str, stack: str, config: dict[str, Any]) -> tuple[ExpertsEntry, TensorInfo]:
    """Return the factors of stacked experts, and the stack's shape [experts, out, in]."""
    partner = name.removesuffix(_A) + _B
    down, up = stored.infos[name].shape, stored.infos[partner].shape
    rank, factor = _rank_and_factor(config, stack, down[0] if down else 1)
    if len(down) != 2 or len(up) != 2 or up[1] != down[0] or down[0] % rank:
        raise MergeflowError(
            f"adapter '{stored.path}': '{name}' {list(down)} and its lora_B {list(up)} are not factors of rank "
            f"{rank} of stacked experts."
        )
    count, shape = down[0] // rank, (up[0], down[1])
    entry = ExpertsEntry(stored.entries[name], stored.entries[partner], count, shape, rank, factor)
    return entry, TensorInfo((count, *shape), FLOAT32)


def _tokens(stored: LazyStateDict, name: str, config: dict[str, Any]) -> tuple[TokensEntry, TensorInfo]:
    """Return the retrained rows of an embedding, and its shape: that of its copy, else up to the last row of them."""
    given, module = config.get("trainable_token_indices"), name.removesuffix(_TOKENS)
    if isinstance(given, dict):
        given = next((ids for end, ids in given.items() if module.endswith(end)), None)
    tokens = given if isinstance(given, list) and all(type(token) is int and token >= 0 for token in given) else []
    shape = stored.infos[name].shape
    if len(shape) != 2 or shape[0] != len(tokens) or len(set(tokens)) != len(tokens):
        raise MergeflowError(
            f"adapter '{stored.path}': '{name}' {list(shape)} has not one row for each token of "
            f"`trainable_token_indices` ({given!r:.60}) in its configuration."
        )
    copy = f"{name.removesuffix(_TOKENS)}.token_adapter.base_layer.weight"
    height = stored.infos[copy].shape[0] if copy in stored else max(tokens, default=0) + 1
    entry = TokensEntry(stored.entries[name], tuple(tokens), shape[1], stored.entries.get(copy))
    return entry, TensorInfo((height, shape[1]), FLOAT32)


def _rank_and_factor(config: dict[str, Any], owner: str, default: int) -> tuple[int, float]:
    """Return the rank and the factor α / r, or α / √r of rsLoRA, of a module or parameter."""
    rank = _number(config, "rank_pattern", "r", owner, default)
    alpha = _number(config, "alpha_pattern", "lora_alpha", owner, 8)  # PEFT's own default
    return int(rank), alpha / (sqrt(rank) if config.get("use_rslora") else rank)


def _number(config: dict[str, Any], pattern: str, key: str, module: str, default: float) -> float:
    value, patterns = config.get(key, default), config.get(pattern) or {}
    if not isinstance(patterns, dict):
        raise MergeflowError(f"the adapter's configuration gives {pattern} = {patterns!r:.60}, expected a mapping.")
    for expression, number in patterns.items():
        if _match(rf"(.*\.)?({expression})$", module, pattern):
            value = number
            break
    # PEFT takes any alpha, 0 and negative ones too.
    least, kinds, expected = (0, int, "positive whole number") if key == "r" else (-1e9, int | float, "number")
    if isinstance(value, bool) or not isinstance(value, kinds) or not least < value < 1e9:
        raise MergeflowError(
            f"the adapter's configuration gives {key} = {value!r:.60} for '{module}', expected a {expected}."
        )
    return float(value)
