"""Steps of a recipe: merges, layers put together and mixtures of experts, whose results others read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from operator import eq
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PlainSerializer, field_validator, model_validator

from mergeflow.checkpoints.folders import config_of, folder_of
from mergeflow.checkpoints.formats import read_json_if_whole
from mergeflow.checkpoints.header import DType, TensorInfo
from mergeflow.checkpoints.names import tied_weights
from mergeflow.checkpoints.reader import ComputedEntry, Entry, LazyStateDict, TensorEntry
from mergeflow.errors import MergeflowError, together, unknown_name
from mergeflow.late import torch
from mergeflow.merging.architectures.architecture import Config, architecture_of
from mergeflow.merging.architectures.blocks import BLOCK, check_alike, count_key, depth, settings_of, stacked_config
from mergeflow.merging.architectures.mixtures import TARGETS, Target, mixture_config
from mergeflow.merging.execution.direction import cast
from mergeflow.merging.files.fields import Location, shown
from mergeflow.merging.files.output import shards_like
from mergeflow.merging.preflight import check_findings, config_findings, resized, tokenizer_findings
from mergeflow.schema import Frozen, Seed, refusal, validated

if TYPE_CHECKING:
    from torch import Tensor


class Slice(Frozen):
    """Blocks of one model.

    Attributes:
        stack: The module of the blocks, where a model has several stacks of them: `encoder`, `language_model`.
        layers: First block, and the one behind the last, counted from 0; all blocks by default.
    """

    model: Location
    stack: str | None = None
    layers: tuple[int, int] | None = None

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: tuple[int, int] | None) -> tuple[int, int] | None:
        if layers is not None and not 0 <= layers[0] < layers[1]:
            raise ValueError(f"expected [first, end] with 0 ≤ first < end, such as [0, 8], found {list(layers)}")
        return layers


class ModelOfStacks:
    """A model of whose stacks of blocks one is taken."""

    def __init__(self, path: str, state: LazyStateDict, stack: str | None) -> None:
        if state.is_task_vector:
            raise MergeflowError(f"'{path}' is a task vector or an adapter: layers are taken from whole models.")
        self.path, self.state = path, state
        self.architecture = architecture_of(state)
        self.outside: dict[str, float] = {}
        self.stacks: dict[str, dict[int, dict[str, str]]] = {}
        for name in state:
            match = BLOCK.match(name)
            # T5's first blocks hold the table of distances that all blocks of their stacks read.
            if match is None or (self.architecture.family.name == "t5" and "relative_attention_bias" in name):
                self.outside[name] = depth(name, {name: state.infos[name].shape}, self.architecture)
            else:
                blocks = self.stacks.setdefault(name[: match.start(2)], {})
                blocks.setdefault(int(match.group(2)), {})[name[match.end() :]] = name
        self.tower = self._named(stack)
        self.blocks = self.stacks.get(self.tower, {})
        self.section, self.settings = settings_of(self.architecture.config, self.tower)
        self.key = count_key(self.settings, self.tower, len(self.blocks), path)
        if sorted(self.blocks) != list(range(len(self.blocks))):
            raise MergeflowError(f"'{path}' does not have one row of blocks 0 … n: its layers cannot be taken.")

    def _named(self, stack: str | None) -> str:
        """Return where the blocks of a stack are, such as "model.layers."."""
        within = [tower for tower in self.stacks if stack is None or f".{stack}." in f".{tower}"]
        towers = [tower for tower in within if tower.startswith(f"{stack}.")] or within
        if len(towers) == 1 or not self.stacks:
            return "".join(towers)
        modules = {tower: tower.split(".")[:-2] for tower in self.stacks}
        names = [
            next((part for part in parts if sum(part in other for other in modules.values()) == 1), tower[:-1])
            for tower, parts in modules.items()
        ]
        raise MergeflowError(
            f"'{self.path}' has {len(names)} stack{'s' * (len(names) > 1)} of layers, {', '.join(names)}: "
            + (f"`stack: {stack}` is {'several' if towers else 'none'} of them." if stack else "a slice is of one.")
            + f" Name one, such as `stack: {names[0]}`; what no slice names is the first model's."
        )

    def owner(self, name: str) -> str | None:
        """Return the stack that a tensor outside the blocks comes before or behind; None for what lies between them."""
        path = name.split(".")
        shared = {tower: len([*takewhile(bool, map(eq, path, tower.split(".")))]) for tower in self.stacks}
        nearest = [tower for tower in self.stacks if shared[tower] == max(shared.values())]
        role = self.architecture.role(name, self.state.infos[name].shape)
        head = role == "head" or re.search(r"(?:text|visual)_projection", name)
        if len(nearest) > 1 and head:
            side = r"vis|image" if "vis" in name else r"text|language|decoder"
            nearest = [tower for tower in nearest if re.search(side, tower)]
        return nearest[0] if len(nearest) == 1 else None

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """The copies among its tensors; its class, which is slow to import, is asked where it may tie any."""
        roles = {self.architecture.role(name, self.state.infos[name].shape) for name in self.outside}
        config = self.architecture.config
        asked = ("head" in roles or len(self.stacks) > 1) and config.get("tie_word_embeddings") is not False
        declared = tied_weights(config, self.state) if asked else {}
        return {name: origin for name, origin in self.state.tied.items() if origin not in declared} | declared

    def taken(self, layers: tuple[int, int] | None) -> range:
        first, end = layers or (0, len(self.blocks))
        if end > len(self.blocks):
            raise MergeflowError(
                f"layers [{first}, {end}] of '{self.path}': it has {len(self.blocks)} blocks, 0 to "
                f"{len(self.blocks) - 1}, so that the end is {len(self.blocks)} at most."
            )
        return range(first, end)


def stacked(slices: Sequence[Slice], states: Sequence[LazyStateDict]) -> LazyStateDict:
    """Return the model of some slices, in their order.

    What comes before the blocks of a stack (embeddings, positions) is the model's of its first slice, what comes behind
    them (norm, head) the last one's; a head that is tied to the embedding follows it. What no slice names, and
    config.json, are the first model's, with the numbers of blocks, and the lists that have an entry per block, as they
    are now.
    """
    given = {part.model: state for part, state in zip(slices, states, strict=True)}
    model_of = cache(lambda path, stack: ModelOfStacks(path, given[path], stack))
    models = [model_of(part.model, part.stack) for part in slices]
    first = models[0]
    rows: dict[str, list[tuple[ModelOfStacks, int]]] = {}
    wholes: dict[str, ModelOfStacks] = {}
    for part, model in zip(slices, models, strict=True):
        whole = model_of(first.path, part.stack)
        wholes.setdefault(whole.tower, whole)
        rows.setdefault(whole.tower, []).extend((model, block) for block in model.taken(part.layers))
    entries: dict[str, Entry] = {}
    infos: dict[str, TensorInfo] = {}

    def put(name: str, model: ModelOfStacks, source: str) -> None:
        entries[name], infos[name] = model.state.entries[source], model.state.infos[source]

    config = first.architecture.config if first.section else first.settings
    for tower, row in rows.items():
        config = _config(config, wholes[tower], row)
    others = [blocks for tower, blocks in first.stacks.items() if tower not in rows]
    unnamed = {name: first for blocks in others for block in blocks.values() for name in block.values()}
    for name, model in (unnamed | _outside(first, rows)).items():
        put(name, model, name)
    for tower, row in rows.items():
        for index, (model, block) in enumerate(row):
            _check_block((wholes[tower], 0), (model, block))
            for rest, name in model.blocks[block].items():
                put(f"{tower}{index}.{rest}", model, name)
    return LazyStateDict(
        first.state.path,
        entries,
        dict(sorted(infos.items())),
        {},
        tied={name: origin for name, origin in first.state.tied.items() if name in infos and origin in infos},
        shards=shards_like(states, infos),
        config=dict(config),
        notes=(*_types(models), *_by_number(first, rows)),
    )


def _by_number(first: ModelOfStacks, rows: Iterable[str]) -> Iterator[str]:
    """Yield a note where the settings of generation name layers that are others now."""
    generation = read_json_if_whole((folder_of(first.state) or Path()) / "generation_config.json")
    if "alignment_heads" in generation and any("decoder" in tower for tower in rows):
        yield "`alignment_heads` of generation_config.json name layers of the decoder as it was: set them anew"


def _config(config: Config, whole: ModelOfStacks, row: Sequence[tuple[ModelOfStacks, int]]) -> Config:
    """Return config.json with a stack's settings as they are with its new blocks."""
    models = list(dict.fromkeys([whole, *(model for model, _ in row)]))
    check_alike({model.path: model.settings for model in models}, whole.key)
    chosen = [(models.index(model), block) for model, block in row]
    changes = stacked_config([model.settings for model in models], whole.key, chosen)
    return {**config, **({whole.section: {**config[whole.section], **changes}} if whole.section else changes)}


def _types(models: Sequence[ModelOfStacks]) -> tuple[str, ...]:
    """Return a note where models have other types than the first."""
    types = {model.path: {str(info.dtype) for info in model.state.infos.values()} for model in models}
    if len(set(map(frozenset, types.values()))) == 1:
        return ()
    listed = ", ".join(f"'{path}' {' and '.join(sorted(kinds))}" for path, kinds in types.items())
    return (f"types of the slices' models differ ({listed}): without a `dtype` each tensor keeps its type",)


def _outside(first: ModelOfStacks, rows: Mapping[str, Sequence[tuple[ModelOfStacks, int]]]) -> dict[str, ModelOfStacks]:
    """Return whose each tensor outside the blocks is; a copy, such as a tied head, is its original's."""
    copies, outside, same = first.copies, {}, {first.path}
    groups: dict[str, list[str]] = {}
    for name in first.outside:
        groups.setdefault(copies.get(name, name), []).append(name)
    for name in first.outside:
        group = groups[copies.get(name, name)]
        tower, *others = {first.owner(copy) for copy in group}
        before, tower = any(first.outside[copy] == 0 for copy in group), None if others else tower
        source = first if tower is None or tower not in rows else rows[tower][0 if before else -1][0]
        if name not in source.outside:
            raise MergeflowError(f"'{source.path}' lacks '{name}', which '{first.path}' has outside its blocks.")
        outside[name], info = source, first.state.infos[name]
        role = first.architecture.role(name, info.shape)
        tokens = role in ("head", "embedding") and not re.search("vis|conv", f"{tower}{name}")
        if tokens and source.path not in same:
            _check_same_tokens(first, source, role)
            same.add(source.path)
        if (shape := source.state.infos[name].shape) != info.shape:
            raise MergeflowError(
                f"'{name}' is {list(shape)} in '{source.path}' and {list(info.shape)} in '{first.path}'"
            )
    for row in rows.values():
        last = row[-1][0]
        extra = last.outside.keys() - outside.keys() - last.copies.keys()
        if strange := sorted(name for name in extra if last.owner(name) == last.tower):
            raise MergeflowError(f"'{last.path}' has '{strange[0]}' outside its blocks, which '{first.path}' lacks.")
    return outside


def _check_same_tokens(first: ModelOfStacks, last: ModelOfStacks, role: str | None) -> None:
    """Check that the rows of another model's head or embedding are of the tokens of the first model's tokenizer."""
    config, other = first.architecture.config, last.architecture.config
    findings = tokenizer_findings(
        folder_of(first.state), {last.path: folder_of(last.state)}, resized(config, {last.path: other})
    )
    if faults := [finding.text.partition(";")[0] for finding in findings if finding.refused]:
        raise MergeflowError(
            f"the tokenizer is of '{first.path}' and the {role} of '{last.path}', whose rows are of other tokens "
            f"({'; '.join(faults)}): take these blocks from a model with the tokens of the first."
        )


def _check_block(first: tuple[ModelOfStacks, int], other: tuple[ModelOfStacks, int]) -> None:
    """Check that a block has the tensors and shapes of the first one."""
    (model, block), (strange, index) = first, other
    wanted = {part: model.state.infos[name].shape for part, name in model.blocks[block].items()}
    shapes = {part: strange.state.infos[name].shape for part, name in strange.blocks[index].items()}
    odd = sorted(part for part in wanted.keys() | shapes.keys() if wanted.get(part) != shapes.get(part))
    if odd:
        raise MergeflowError(
            f"block {index} of '{strange.path}' does not fit block {block} of '{model.path}': '{odd[0]}' "
            f"is {list(shapes.get(odd[0], ())) or 'missing'}, there {list(wanted.get(odd[0], ())) or 'missing'}."
        )


_EMBEDDING = "model.embed_tokens.weight"
_ROUNDING = 1e-5  # of a prompt's own row: what float32 leaves where prompts cancel out


class Router:
    """The routers of all blocks, found when the first is read, by a base's hidden states or embeddings."""

    def __init__(self, mixture: Mixture, base: LazyStateDict, width: int, blocks: int) -> None:
        self.mixture, self.base, self.width, self.blocks = mixture, base, width, blocks
        self.prompts = [(expert.prompts, expert.negative_prompts) for expert in mixture.experts]
        self._lock = Lock()
        self._rows: Tensor | None = None

    def entry(self, block: int, dtype: DType) -> Entry:
        """Return the router of a block, [experts, width]."""

        def read(start: int, stop: int) -> Tensor:
            with self._lock:
                if self._rows is None:
                    self._rows = self._random() if self.mixture.gate == "random" else self._prompted()
            return self._rows[block].reshape(-1)[start:stop].to(dtype.torch)

        return ComputedEntry(read)

    def _random(self) -> Tensor:
        """Normal numbers of the deviation that the model was initialised with."""
        generator = torch.Generator().manual_seed(self.mixture.seed)
        deviation = float(config_of(self.base).get("initializer_range", 0.02))
        return deviation * torch.randn(self.blocks, len(self.prompts), self.width, generator=generator)

    def _prompted(self) -> Tensor:
        """Unit vectors of the means over prompts, less those over negative ones."""
        folder = folder_of(self.base)
        texts = sorted({text for pair in self.prompts for side in pair for text in side})
        tokens = _tokens(folder, texts, self.mixture.gate)
        if self.mixture.gate == "hidden":
            seen = _mlp_inputs(folder, tokens)
        else:
            embedding = self.base[_EMBEDDING].float()
            seen = [embedding[ids].mean(0).expand(self.blocks, -1) for ids in tokens]
        by_text = dict(zip(texts, seen, strict=True))

        def mean(side: Sequence[str]) -> Tensor:
            return torch.stack([by_text[text] for text in side]).mean(0) if side else torch.zeros(1)

        wanted = torch.stack([mean(good) for good, _ in self.prompts], 1)
        directions = torch.stack([mean(good) - mean(bad) for good, bad in self.prompts], 1)
        lengths = directions.norm(dim=-1, keepdim=True)
        if not bool((lengths > _ROUNDING * wanted.norm(dim=-1, keepdim=True)).all()):
            raise MergeflowError(
                "the prompts of an expert cancel out, so that its row of the router is 0: change them."
            )
        return directions / lengths


def _tokens(folder: Path | None, texts: Sequence[str], gate: str) -> list[Tensor]:
    tokenizer = _transformers(gate).AutoTokenizer
    try:
        tokenize = tokenizer.from_pretrained(str(folder), local_files_only=True)
        return [torch.tensor(tokenize(text)["input_ids"]) for text in texts]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise MergeflowError(
            f"gate {gate}: no tokenizer can be opened in '{folder}' ({str(error).splitlines()[0]:.120}). Put the "
            "base's tokenizer files there, or choose gate: random."
        ) from None


def _mlp_inputs(folder: Path | None, tokens: Sequence[Tensor]) -> list[Tensor]:
    """Return, of each text, the mean over tokens of what the MLP of each block gets, [blocks, width]."""
    options = {"local_files_only": True, "output_loading_info": True}
    model, loading = _transformers("hidden").AutoModelForCausalLM.from_pretrained(str(folder), **options)
    if missing := sorted(loading["missing_keys"]):  # transformers draws them
        raise MergeflowError(f"gate hidden computes with '{folder}', which lacks '{missing[0]}': copy it again.")
    held: list[Tensor] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, given: held.append(given[0][0].float().mean(0)))
    inputs = []
    with torch.no_grad():
        for ids in tokens:
            held.clear()
            model(ids[None], use_cache=False)
            inputs.append(torch.stack(held))
    return inputs


def _transformers(gate: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise MergeflowError(
            f"gate {gate} needs the package 'transformers' to read prompts: pip install transformers, or choose "
            "gate: random."
        ) from None
    return transformers


Gate = Literal["hidden", "cheap_embed", "random"]


class Expert(Frozen):
    """One dense model of a mixture.

    Attributes:
        prompts: Texts that it should answer; gates other than `random` need some.
        negative_prompts: Texts that it should not answer.
    """

    model: Location
    prompts: tuple[str, ...] = ()
    negative_prompts: tuple[str, ...] = ()


class Shared(Frozen):
    """The expert that every token passes through; `scale` is the factor of its output."""

    model: Location
    scale: float = 1.0


class Mixture(Frozen):
    """A mixture of experts.

    Attributes:
        base: The model that gives embeddings, attention, norms and head.
        experts: The models that give the MLPs.
        gate: What the router's rows are: `hidden`, what the base's MLPs see of the prompts; `cheap_embed`, the
            prompts' embeddings; `random`, for a training to come.
        experts_per_token: How many experts a token passes through.
        shared: An expert that every token passes through, where the architecture has one.
        seed: Of the random router.
    """

    base: Location
    experts: tuple[Expert, ...] = Field(min_length=2)
    gate: Gate = "hidden"
    experts_per_token: int = Field(2, ge=1)
    shared: Shared | None = None
    seed: Seed = 0

    @field_validator("experts", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        """Take a plain path for an expert without prompts."""
        if isinstance(value, list | tuple):
            return [{"model": path} if isinstance(path, str) else path for path in value]
        return value

    @model_validator(mode="after")
    def _fits(self) -> Mixture:
        faults = []
        if self.experts_per_token > len(self.experts):
            faults.append(f"experts_per_token is {self.experts_per_token}, of {len(self.experts)} experts")
        bare = [str(index) for index, expert in enumerate(self.experts) if not expert.prompts]
        if self.gate != "random" and bare:
            faults.append(f"gate {self.gate} needs `prompts` of every expert; {', '.join(bare)} (from 0) has none")
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def paths(self) -> Iterator[str]:
        yield self.base
        yield from (expert.model for expert in self.experts)
        yield from (expert.model for expert in (self.shared,) if expert is not None)


def _changed(name: str, entry: Entry, dtype: DType, factor: float) -> Entry:

    def read(start: int, stop: int) -> Tensor:
        values = entry.read(start, stop)
        return cast(name, values.float() * factor if factor != 1 else values, dtype.torch)

    return ComputedEntry(read)


def mixed(mixture: Mixture, states: Mapping[str, LazyStateDict], allow: Iterable[str] = ()) -> LazyStateDict:
    """Return the mixture as a state dict; nothing is copied or read.

    Router row of expert e in block l: the unit vector of mean(x over its prompts) − mean(x over its negative prompts),
    x as `gate` says. The weights of the chosen experts sum to 1, so that equal experts give the dense model. `allow`
    has patterns of the settings in which experts may differ from the base, whose counts.
    """
    base = states[mixture.base]
    config = config_of(base)
    target = _target(mixture, config)
    blocks = _blocks(mixture.base, base, target)
    together(*(partial(_check, path, states[path], base) for path in mixture.paths()))
    # MLPs see what the attention of their own models made; whichever model is of a type, its MLP has the base's form.
    configs = {path: {**config_of(states[path]), "model_type": config["model_type"]} for path in mixture.paths()}
    findings = config_findings(config, configs, {})
    check_findings(findings, allow)
    new_config = mixture_config(
        config, target, len(mixture.experts), mixture.experts_per_token, mixture.shared is not None
    )
    entries: dict[str, Entry] = {name: entry for name, entry in base.entries.items() if ".mlp." not in name}
    infos = {name: info for name, info in base.infos.items() if ".mlp." not in name}
    for name, (entry, info) in _moe_tensors(mixture, target, states, blocks).items():
        entries[name], infos[name] = entry, info
    return LazyStateDict(
        base.path,
        entries,
        dict(sorted(infos.items())),
        {},
        tied={name: first for name, first in base.tied.items() if name in infos and first in infos},
        shards=shards_like(list(states.values()), infos),
        config=new_config,
        notes=tuple(finding.text for finding in findings),
    )


def _target(mixture: Mixture, config: Mapping[str, Any]) -> Target:
    target = TARGETS.get(str(config.get("model_type")))
    if target is None:
        raise MergeflowError(
            f"'{mixture.base}' has model_type {config.get('model_type', 'of no config.json')}: mixtures are made of "
            f"dense models of {', '.join(TARGETS)}, in folders with config.json."
        )
    if mixture.shared is not None and not target.shared:
        raise MergeflowError(
            f"`shared`: a {target.model_type} has no expert that every token passes through; remove it."
        )
    return target


def _moe_tensors(
    mixture: Mixture, target: Target, states: Mapping[str, LazyStateDict], blocks: int
) -> dict[str, tuple[Entry, TensorInfo]]:
    base = states[mixture.base]
    tensors: dict[str, tuple[Entry, TensorInfo]] = {}

    def put(name: str, path: str, source: str, factor: float = 1.0) -> None:
        info, stored, entry = base.infos[source], states[path].infos[source], states[path].entries[source]
        plain = stored.dtype == info.dtype and factor == 1
        tensors[name] = (entry if plain else _changed(name, entry, info.dtype, factor), info)

    first = base.infos[f"model.layers.0.mlp.{target.parts[0]}.weight"]
    width = first.shape[1]
    router = Router(mixture, base, width, blocks)
    for block in range(blocks):
        dense = f"model.layers.{block}.mlp."
        for part in target.parts:
            for index, expert in enumerate(mixture.experts):
                put(target.expert(block, index, part), expert.model, f"{dense}{part}.weight")
            if mixture.shared is not None:
                scale = mixture.shared.scale if part == "down_proj" else 1.0
                put(f"{dense}shared_expert.{part}.weight", mixture.shared.model, f"{dense}{part}.weight", scale)
        info = TensorInfo((len(mixture.experts), width), first.dtype)
        tensors[target.router(block)] = (router.entry(block, first.dtype), info)
        if target.shared:
            zeros = _shared_zeros(target, f"{dense}shared_expert", width, mixture.shared is None)
            for name, shape in zeros.items():
                tensors[name] = (
                    TensorEntry(torch.zeros(shape, dtype=first.dtype.torch)),
                    TensorInfo(shape, first.dtype),
                )
    return tensors


def _blocks(path: str, base: LazyStateDict, target: Target) -> int:
    """Return the number of blocks, whose MLPs must all be there."""
    config = config_of(base)
    count = int(config.get("num_hidden_layers") or 0)
    wanted = [f"model.layers.{block}.mlp.{part}.weight" for block in range(count) for part in target.parts]
    missing = [name for name in wanted if name not in base]
    strange = [name for name in base if ".mlp." in name and name not in wanted]
    if not wanted or missing or strange:
        odd = f"lacks '{missing[0]}'" if missing else f"has '{strange[0]}'" if strange else "says no number of layers"
        raise MergeflowError(
            f"'{path}' {odd}: a mixture is made of models with {', '.join(target.parts)} in model.layers.*.mlp, "
            "without biases, as many as config.json says."
        )
    return count


def _check(path: str, state: LazyStateDict, base: LazyStateDict) -> None:
    if state.is_task_vector:
        raise MergeflowError(
            f"'{path}' is an adapter or a task vector: merge it first, in a step (task_arithmetic with scale 1)."
        )
    names = sorted(name for name in {*base, *state} if ".mlp." in name)
    odd = [
        name
        for name in names
        if name not in state or name not in base or state.infos[name].shape != base.infos[name].shape
    ]
    if odd:
        shape, wanted = (list(held.infos[odd[0]].shape) if odd[0] in held else "missing" for held in (state, base))
        raise MergeflowError(
            f"'{path}': '{odd[0]}' is {shape}, the base's is {wanted}"
            + (f", and {len(odd) - 1} more" if len(odd) > 1 else "")
            + ": experts of a mixture have the base's sizes."
        )


def _shared_zeros(target: Target, place: str, width: int, alone: bool) -> dict[str, tuple[int, ...]]:
    """Return shapes of zeros: a gate of the shared expert, open by half; where there is none an expert that adds 0."""
    shapes: dict[str, tuple[int, ...]] = {f"{place}_gate.weight": (1, width)}
    if alone:
        shapes |= {f"{place}.{part}.weight": (width, 1) if part == "down_proj" else (1, width) for part in target.parts}
    return shapes


PREFIX = "step:"
# Keys of a recipe whose value is the one step that it passes through.
ASSEMBLED = ("slices", "mixture")
_ONLY_WHOLE = ("out", "steps", "device", "shard_size", "adapter", "chat_template", "tokenizer", "tokenizer_source")


class Slices(tuple[Slice, ...]):
    """A step that puts blocks of models one behind the other."""

    def paths(self) -> Iterator[str]:
        yield from (part.model for part in self)


def step_named(path: str) -> str | None:
    """Return the step that a path names, or None.

    Example:
        >>> step_named("step:first"), step_named("models/first")
        ('first', None)
    """
    return path.removeprefix(PREFIX) if path.startswith(PREFIX) else None


def lifted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's values with `slices` or `mixture` as its one step and expert, which is taken as it is."""
    recipe = dict(values)
    for key in ASSEMBLED:
        if key in recipe:
            if "experts" in recipe or "steps" in recipe:
                raise ValueError(
                    f"`{key}` is the whole model: in a recipe with experts or steps it is a step of its own"
                )
            recipe |= {"steps": {key: {key: recipe.pop(key)}}, "experts": {key: PREFIX + key}}
            recipe.setdefault("method", "passthrough")
    return recipe


def check_steps(steps: Mapping[str, Any], paths: Iterable[str]) -> None:
    """Check that steps and what is read of them fit: every name is a step, every step is read, none reads itself."""
    reads = {name: [n for path in step.paths() if (n := step_named(path))] for name, step in steps.items()}
    top = [name for path in paths if (name := step_named(path))]
    asked = {name for names in (*reads.values(), top) for name in names}
    faults = [str(unknown_name("step", name, steps)).removesuffix(".") for name in sorted(asked - steps.keys())]
    faults += [f"the step '{name}' is read by nothing: remove it, or name it as {PREFIX}{name}"
               for name in steps if name not in asked]  # fmt: skip
    try:
        tuple(TopologicalSorter(reads).static_order())
    except CycleError as error:
        faults.append(f"steps read each other in a circle: {' ← '.join(error.args[1])}")
    if faults:
        raise MergeflowError("\n".join(faults))


def parse_steps(value: Any, merge: type, parse_merge: Callable[[Any, str], Any]) -> Any:
    """Return steps as pairs of a name and a checked record."""
    if value is None or isinstance(value, tuple):
        return value or None
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping of names to steps, found {shown(value)}")
    return tuple((_name(name), _step(str(name), step, merge, parse_merge)) for name, step in value.items()) or None


def _name(name: Any) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", name):
        raise ValueError(f"the name {name!r:.60} of a step: use letters, digits, dots, dashes and underscores")
    return name


def _step(name: str, value: Any, merge: type, parse_merge: Callable[[Any, str], Any]) -> Any:
    origin = f"step '{name}'"
    if isinstance(value, merge | Slices | Mixture):
        return value
    if isinstance(value, Mapping) and set(value) == {"mixture"}:
        return validated(Mixture, value["mixture"], origin)
    if isinstance(value, Mapping) and set(value) == {"slices"}:
        value = value["slices"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not value:
            raise MergeflowError(f"{origin}: no slices")
        return Slices(validated(Slice, part, f"{origin}, slice {index + 1}") for index, part in enumerate(value))
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{origin}: expected a merge (method, experts …), a list of slices, or a mixture, found {shown(value)}"
        )
    strange = [f"`{key}` belongs to the whole recipe, not to a step" for key in _ONLY_WHOLE if key in value]
    if strange:
        raise refusal(origin, strange)
    return parse_merge(value, origin)


def _plain_steps(value: Any) -> Any:
    return value and {
        name: [part.model_dump(mode="json", exclude_none=True) for part in step]
        if isinstance(step, Slices)
        else {"mixture": step.model_dump(mode="json", exclude_none=True)}
        if isinstance(step, Mixture)
        else step.model_dump(mode="json", exclude_none=True, exclude=set(_ONLY_WHOLE))
        for name, step in value
    }


Steps = Annotated[tuple[tuple[str, Any], ...] | None, PlainSerializer(_plain_steps)]
