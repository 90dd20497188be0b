"""mergekit's configurations as recipes: equal settings are carried over, all others are named.

Three parts: configurations as mergekit documents them; their normal form, slices whose sources have all parameters that
count for them; the recipe.
"""

from __future__ import annotations

import fnmatch
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mergeflow.checkpoints import open_checkpoint
from mergeflow.checkpoints.formats import expanded, read_json_if_whole
from mergeflow.checkpoints.names import names_in_memory
from mergeflow.checkpoints.writer import write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.architectures.blocks import BLOCK, COUNTS
from mergeflow.merging.catalog import MERGEKIT, is_configuration
from mergeflow.merging.files.recipe import make_recipe
from mergeflow.merging.files.steps import ASSEMBLED, PREFIX, ModelOfStacks
from mergeflow.merging.vocabulary.companions import NAMED
from mergeflow.schema import faults_of
from mergeflow.yaml_text import read_documents

# --- configurations ---

Setting = tuple[tuple[str, tuple[float, ...]], ...]
"""A parameter: filters, `*` for all tensors, each with its number or numbers over depth."""
Scope = Mapping[str, Setting]  # parameters by name


def _setting(value: Any) -> Setting:
    filters = isinstance(value, list) and any(isinstance(part, Mapping) for part in value)
    return tuple(map(_filter, value if filters else [value]))


def _filter(value: Any) -> tuple[str, tuple[float, ...]]:
    given = value if isinstance(value, Mapping) else {"value": value}
    name, numbers = given.get("filter", "*"), given.get("value")
    try:
        if not given.keys() <= {"filter", "value"} or not isinstance(name, str | None):
            raise TypeError
        # YAML reads 1e-5 as a text, which mergekit takes for the number.
        return name or "*", tuple(map(float, numbers if isinstance(numbers, list) and numbers else [numbers]))
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, a list of them, or filters with a `value`, found {value!r:.60}") from None


def _reference(value: Any) -> str:
    """Return a model as one text: `path`, `path@revision`, or `path+adapter`.

    Example:
        >>> _reference({"model": {"path": "a/b", "revision": "v1"}, "lora": "c/d"})
        'a/b@v1+c/d'
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a path, or a mapping with `path`, found {value!r:.60}")
    given = {key: item for key, item in value.items() if item is not None}
    inner = "path" if "path" in value else "model"
    if inner not in given:
        raise ValueError(f"`{inner}` is missing")
    if strange := sorted(given.keys() - {"path", "revision", "model", "lora"}):
        raise ValueError(f"`{strange[0]}` of a model has no counterpart in a recipe")
    if inner == "path":
        return "@".join(str(given[key]) for key in ("path", "revision") if given.get(key))
    return "+".join(_reference(given[key]) for key in ("model", "lora") if given.get(key))


def _row(value: Any) -> Any:
    """Return whose row a token has: a model's, or what a mapping with `kind` says."""
    if isinstance(value, Mapping) and "kind" in value:
        return {key: _reference(item) if key == "model" else item for key, item in value.items()}
    return value if value is None else _reference(value)


def _range(value: Any) -> Any:
    """Return the first block and the one behind the last; mergekit takes numbers as texts, too."""
    listed = value if isinstance(value, list) else []
    ends = [int(end) if isinstance(end, str) and end.isdecimal() else end for end in listed]
    if len(ends) != 2 or any(type(end) is not int for end in ends) or not 0 <= ends[0] < ends[1]:
        raise ValueError(f"two numbers of blocks such as [0, 16], the second larger, found {value!r:.60}")
    return tuple(ends)


Reference = Annotated[str, BeforeValidator(_reference)]
Settings = Annotated[
    dict[str, Annotated[Any, BeforeValidator(_setting)]], BeforeValidator(lambda value: {} if value is None else value)
]


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class _Input(_Record):
    model: Reference
    parameters: Settings = {}


class _Source(_Input):
    layer_range: Annotated[tuple[int, int], BeforeValidator(_range)] | None = None


class _Slice(_Record):
    sources: list[_Source] = Field(min_length=1)
    base_model: Reference | None = None
    residual_weight: float | None = None
    parameters: Settings = {}


class _Module(_Record):
    slices: list[_Slice] | None = None
    models: list[_Input] | None = None
    parameters: Settings = {}

    @model_validator(mode="after")
    def _has_one_form(self) -> _Module:
        keys = [key for key in ("models", "slices", "modules") if key in type(self).model_fields]
        given, forms = [key for key in keys if getattr(self, key)], [f"`{key}`" for key in keys]
        if len(given) != 1:
            listed = " and ".join(given) or "none of them: there is nothing to merge"
            raise ValueError(f"give one of {', '.join(forms[:-1])} and {forms[-1]}, found {listed}")
        return self


class _Token(_Record):
    source: Annotated[Any, BeforeValidator(_row)] = None
    force: bool = False


class _Tokenizer(_Record):
    source: Reference = "union"
    tokens: dict[str, _Token] | None = None
    pad_to_multiple_of: int | None = None


class _Merge(_Module):
    """A configuration of `mergekit-yaml`, or one document of `mergekit-multi`."""

    merge_method: str
    name: str | None = None
    modules: dict[str, _Module] | None = None
    base_model: Reference | None = None
    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: Reference | None = None
    tokenizer: Annotated[
        _Tokenizer | None, BeforeValidator(lambda value: {"source": value} if isinstance(value, str) else value)
    ] = None
    chat_template: str | None = None

    @model_validator(mode="after")
    def _has_one_tokenizer(self) -> _Merge:
        if self.tokenizer is not None and self.tokenizer_source is not None:
            raise ValueError("`tokenizer` and `tokenizer_source` are both given: keep one")
        return self

    @property
    def vocabulary(self) -> _Tokenizer | None:
        """The tokenizer in its newer form."""
        return self.tokenizer or (None if self.tokenizer_source is None else _Tokenizer(source=self.tokenizer_source))


class _Expert(_Record):
    source_model: Reference
    positive_prompts: list[str] | None = None
    negative_prompts: list[str] | None = None
    residual_scale: float | None = None
    noise_scale: float | None = None


class _Mixture(_Record):
    """A configuration of `mergekit-moe`."""

    base_model: Reference
    experts: list[_Expert]
    name: str | None = None
    gate_mode: str = "hidden"
    dtype: str | None = None
    experts_per_token: int | None = None
    shared_experts: list[_Expert] | None = None
    architecture: str | None = None


def write_recipe(
    source: str | Path, out: str | Path, *, dtype: str | None = None, shard_size: str | None = None, force: bool = False
) -> list[str]:
    """Write the recipe of a configuration in a file, with its notes as comments.

    Args:
        source: One document, or several as `mergekit-multi` takes them, or one of `mergekit-moe`.
        dtype: Type of the result, instead of the configuration's.
        shard_size: Largest shard of the result, such as 5GB.

    Returns:
        The notes: what means something else here.
    """
    documents, target = read_documents(Path(source), "configuration"), Path(out)
    if not documents or not all(map(is_configuration, documents)):
        raise MergeflowError(f"'{source}' is not a configuration of mergekit: it has no merge_method.")
    if target.suffix not in (".yaml", ".yml", ".json"):
        raise MergeflowError(f"out '{out}': a recipe is a text file, end its name in .yaml.")
    if target.exists() and not force:
        raise MergeflowError(f"out '{out}' exists: choose another name, or give --force to replace it.")
    recipe, notes = converted(documents, f"configuration '{source}'")
    recipe |= {key: value for key, value in (("dtype", dtype), ("shard_size", shard_size)) if value is not None}
    make_recipe(recipe, f"the recipe of configuration '{source}'")
    if target.suffix == ".json":
        text = json.dumps(recipe, indent=2, ensure_ascii=False) + "\n"
    else:
        comments = [f"# {line}\n" for line in (f"From {Path(source).name}, a configuration of mergekit.", *notes)]
        text = "".join(comments) + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    write_text(target, text)
    return notes


def converted(
    documents: Sequence[Mapping[str, Any]], origin: str = "configuration"
) -> tuple[dict[str, Any], list[str]]:
    """Convert a configuration to a recipe, with notes on settings that have another meaning here.

    Args:
        documents: Its documents: merges, all but one with a name by which others read their results.
    """
    work = _Conversion()
    parsed = _parsed(documents, origin, work.notes)
    names = [document.name for document in parsed] if len(parsed) > 1 else [None]
    if twice := [name for name, count in Counter(names).items() if name is not None and count > 1]:
        raise MergeflowError(f"{origin} has several merges named '{twice[0]}': rename them.")
    read = set().union(*map(_models, parsed)) if None not in names else {*names} - {None}
    last = [document for document, name in zip(parsed, names, strict=True) if name not in read]
    if len(last) != 1:
        raise MergeflowError(
            f"{origin} has {len(last)} merges that no other reads, and a recipe has one result: give one file each."
        )
    inner = [document for document in parsed if document is not last[0]]
    for document in inner:
        work.names[str(document.name)] = _free(str(document.name), work.names.values())
    for document in inner:
        work.steps[work.names[str(document.name)]] = step = work.passed(work.document(document))
        work.faults += [f"`{key}` of a merge that another one reads" for key in ("chat_template", "tokenizer")
                        if step.pop(key, None) is not None]  # fmt: skip
    recipe = work.document(last[0])
    if work.faults:
        raise _listing(f"{origin} cannot be carried over whole; a recipe has nothing for", work.faults)
    if work.steps:
        recipe = work.passed(recipe) | {"steps": work.steps}
    return recipe, list(dict.fromkeys(work.notes))


def _listing(what: str, faults: Iterable[str]) -> MergeflowError:
    return MergeflowError("\n  - ".join([f"{what}:", *dict.fromkeys(faults)]))


def _parsed(documents: Sequence[Mapping[str, Any]], origin: str, notes: list[str]) -> list[_Merge | _Mixture]:
    """Return the documents as records, with all that is wrong with their form in one error, and note unknown keys."""
    records: list[_Merge | _Mixture] = []
    faults: list[str] = []
    for document in documents:
        keys = {*(document or ())}
        kind = _Merge if "merge_method" in keys or not keys & {"experts", "gate_mode"} else _Mixture
        try:
            records.append(kind.model_validate(document))
        except ValidationError as error:
            faults += faults_of(error, kind)
            continue
        for place, record in _inside(records[-1]):
            for key in record.model_extra or {}:
                of_it = f" of {place}" if place else ""
                if near := get_close_matches(str(key), type(record).model_fields, n=1, cutoff=0.55):
                    faults.append(f"unknown key '{key}'{of_it}: did you mean '{near[0]}'?")
                else:
                    notes.append(f"`{key}`{of_it} means nothing to mergekit, and is left out")
    if faults:
        raise _listing(f"{origin} is not of the form that mergekit documents", faults)
    return records


def _inside(record: BaseModel, place: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Yield a record and all records in it, with their places."""
    yield place, record
    for key, value in record:
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for at, part in [("", value), *parts]:
            if isinstance(part, BaseModel):
                yield from _inside(part, ".".join(filter(None, (place, key, str(at)))))


def _models(document: BaseModel) -> set[str]:
    """Return the models that a document reads, without their adapters."""
    keys = ("model", "base_model", "source_model")
    paths = (getattr(record, key, None) for _, record in _inside(document) for key in keys)
    return {path.partition("+")[0] for path in paths if path is not None}


# --- normal form ---


@dataclass
class _Part:
    """A slice in normal form, or a whole model.

    Attributes:
        sources: Models whose layers are merged, with all parameters that count for them.
        shared: Parameters of all sources.
        whole: Whether it is the whole model.
        stack: Whose layers they are, where a model has several stacks.
    """

    document: _Merge
    sources: Sequence[_Source]
    shared: Scope
    base: str | None
    whole: bool
    stack: str | None = None

    @property
    def settings(self) -> list[Setting]:
        """All values of parameters."""
        scopes = [self.shared, *(source.parameters for source in self.sources)]
        return [setting for scope in scopes for setting in scope.values()]

    def of_whole_models(self) -> _Part:
        """Return it without layers."""
        sources = [each.model_copy(update={"layer_range": None}) for each in self.sources]
        return replace(self, sources=sources, whole=True)


def _parts(document: _Merge, module: _Module, notes: list[str]) -> list[_Part]:
    """Return the slices of a module; models are one slice."""
    above = module.parameters if module is document else _over(module.parameters, document.parameters)
    base, slices = document.base_model, module.slices or [_of_models(module.models or [], document.base_model)]
    if any(each.residual_weight is not None for each in slices):
        notes.append("`residual_weight` means nothing to mergekit, and is left out")
    if len(slices[0].sources) < len(slices[-1].sources):
        notes.append(
            "what follows the last block is merged of all sources of the last slice; mergekit takes as many "
            "of them as the first slice has"
        )
    scaled = any(each.parameters or any(source.parameters for source in each.sources) for each in slices)
    stacked = module.slices and document.merge_method == "passthrough" and not document.modules and not scaled
    parts = []
    for each in slices:
        shared = _over(each.parameters, above)
        _note_unread(document.merge_method, each.sources, shared, notes)
        scopes = [_over(source.parameters, shared) for source in each.sources]
        sources = [source.model_copy(update={"parameters": scope})
                   for source, scope in zip(each.sources, scopes, strict=True)]  # fmt: skip
        part = _Part(document, sources, shared, each.base_model or base, whole=False)
        whole = not stacked and len(slices) == 1 and _is_whole(each, notes)
        parts.append(part.of_whole_models() if whole else part)
    return parts


def _of_models(models: Sequence[_Input], base: str | None) -> _Slice:
    sources = [_Source.model_construct(**dict(model)) for model in models]
    if base is not None and all(source.model != base for source in sources):
        sources.append(_Source(model=base))  # mergekit adds it
    return _Slice.model_construct(sources=sources)


def _over(inner: Scope, outer: Scope) -> dict[str, Setting]:
    """Return the parameters of two scopes; an outer one follows the filters of an inner one."""
    return {key: inner.get(key, ()) + outer.get(key, ()) for key in {**inner, **outer}}


def _note_unread(merge_method: str, sources: Sequence[_Source], shared: Scope, notes: list[str]) -> None:
    """Note the parameters that mergekit does not read for this method, or not of one model."""
    of_one = dict.fromkeys(key for source in sources for key in source.parameters)
    for key in {**of_one, **shared}:
        if key not in MERGEKIT[merge_method].reads:
            notes.append(f"mergekit's {merge_method} does not read `{key}`: it is left out")
        elif key in of_one and key not in MERGEKIT[merge_method].by_model:
            notes.append(f"mergekit's {merge_method} does not read `{key}` of one model: there it is left out")


def _is_whole(part: _Slice, notes: list[str]) -> bool:
    """Whether a slice is its models as they are."""
    ranges = {source.layer_range for source in part.sources}
    layers = next(iter(ranges))
    if layers is None or len(ranges) > 1 or layers[0] != 0:
        return ranges == {None}
    counts = [numbers for source in part.sources if (numbers := _counts(_config(source.model)))]
    if not counts:
        notes.append(f"layer_range {list(layers)} is taken for the whole model, whose config.json is not here")
    return all(layers[1] in numbers for numbers in counts)


def _in_place(parts: Sequence[_Part], counts: Collection[int]) -> bool:
    """Whether slices are a module's layers in their order, of all models alike, without lists over depth."""
    end = 0
    for part in parts if not parts[0].whole else ():
        ranges = {source.layer_range or (0, 0) for source in part.sources}
        if ranges != {(end, stop := max(ranges)[1])} or any(map(_over_depth, part.settings)):
            return False
        end = stop
    return parts[0].whole or end in counts


def _config(path: str) -> dict[str, Any]:
    """Return a model folder's config.json, empty where it is not here."""
    return read_json_if_whole(expanded(path) / "config.json")


def _counts(config: Any) -> set[int]:
    """Return the numbers of blocks that a config.json says of a model's parts."""
    if not isinstance(config, dict):
        return set()
    counts = {config[key] for key in (*COUNTS, "depth") if isinstance(config.get(key), int)}
    return counts.union(*map(_counts, config.values()))


# What final norms, heads and projectors are called, and what follows the blocks of a module.
_TAILS = (
    *("model.language_model.norm.weight", "model.norm.bias", "lm_head.weight", "model.final_layernorm.weight"),
    *("transformer.ln_f.bias", "gpt_neox.final_layer_norm.bias", "decoder.final_layer_norm.weight", "backbone.norm_f."),
    *("embed_out.weight", "output_layer.weight", "bert.pooler.dense.bias", "score.weight", "classifier.out_proj.bias"),
    *("vision_tower.vision_model.post_layernorm.bias", "vision_model.layernorm_post.bias", "visual.merger.norm.bias"),
    *("multi_modal_projector.linear_1.weight", "multi_modal_projector.norm.weight", "patch_merger.merging_layer."),
)
_BEHIND = re.compile(r"lm_head|norm\.(?:weight|bias)$|layernorm_post|vision_adapter")


def _pattern(module: str, model_type: str) -> str:
    """Return the pattern of a module's tensors, where it lies over modules with all the rest; empty if not known."""
    patterns = dict.fromkeys(("default", "text_decoder", "shared"), "*")
    apart = ("vision_tower", "vision_model", "multi_modal_projector", "encoder", "decoder")
    patterns |= {name: f"*{name}.*" for name in apart}
    if model_type.startswith("qwen"):
        patterns |= {"vision_tower": "*visual.*", "multi_modal_projector": "*visual.*merger*"}
    return patterns.get(module, "")


def _patterns(modules: Iterable[str], path: str, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the patterns of modules, empty where none is known; the last that fits a tensor decides."""
    patterns = {
        name: _pattern(name, str(config.get("model_type")))
        or (_inferred(name, path, config) if "." in name and config else "")
        for name in modules
    }
    return dict(sorted(patterns.items(), key=lambda item: (item[1] != "*", "merger" in item[1])))


def _inferred(module: str, path: str, config: Mapping[str, Any]) -> str:
    """Return the pattern of a module that mergekit infers, which it calls as transformers has it in memory."""
    state = open_checkpoint(path)
    ends = {name: memory[len(module) :] for memory, name in names_in_memory(config, state).items()
            if memory.startswith(f"{module}.")}  # fmt: skip
    places = {name.removesuffix(end) for name, end in ends.items() if name.endswith(end)}
    places = places or {module for name in state if name.startswith(f"{module}.")}
    return f"{places.pop()}.*" if len(places) == 1 else ""


def _laid(parts: Sequence[_Part], model: str, pattern: str) -> Iterator[tuple[list[str], _Part]]:
    """Yield merges of whole models with the tensors that a module has of each, those that win last.

    Args:
        model: One that has the module.
        pattern: Of the module's tensors.
    """
    wholes = [part.of_whole_models() for part in parts]
    yield [pattern], wholes[0]
    if parts[0].whole:
        return
    names = fnmatch.filter(open_checkpoint(model), pattern)
    blocks = {name: match for name in names if (match := BLOCK.match(name))}
    if behind := [name for name in names if name not in blocks and _BEHIND.search(name)]:
        yield behind, wholes[-1]
    for part, whole in zip(parts, wholes, strict=True):
        inside = range(*(part.sources[0].layer_range or (0, 0)))
        yield sorted({f"{match[0]}*" for match in blocks.values() if int(match[2]) in inside}), whole


def _stacks(path: str, name: str, patterns: Mapping[str, str]) -> tuple[str, str]:
    """Return the stack of a module's layers and another one; slices of the first have all that the module has.

    Args:
        path: A model that has the module.
        patterns: Of all modules; the last that fits a tensor decides.
    """
    state = open_checkpoint(path)
    modules = {tensor: module for module, pattern in patterns.items() for tensor in fnmatch.filter(state, pattern)}
    blocks = {tensor: match for tensor in state if (match := BLOCK.match(tensor))}
    stacks = {match.string[: match.start(2) - 1]: modules.get(tensor) for tensor, match in blocks.items()}
    inside, others = ([stack for stack in stacks if (stacks[stack] == name) is within] for within in (True, False))
    if len(inside) != 1 or not others:
        raise MergeflowError(
            f"slices of '{name}' move layers of {len(inside)} stacks ({', '.join(inside) or 'none'}) of {len(stacks)}; "
            "here they are of one stack among several"
        )
    model = ModelOfStacks(path, state, inside[0])
    for tensor in model.outside:
        if (model.owner(tensor) == model.tower) != (modules.get(tensor) == name):
            raise MergeflowError(
                f"slices of '{name}' move layers, and '{tensor}' is of '{modules.get(tensor)}'; here it is of the "
                f"models of '{name if model.owner(tensor) == model.tower else 'another module'}'"
            )
    return inside[0], others[0]


# --- recipes ---

# What a router's rows are for each `gate_mode`.
_ROUTERS = {
    "hidden": "means of what the MLPs see of the prompts, in mergekit layers' inputs at the last token",
    "cheap_embed": "means over prompts less those over negative ones; mergekit counts each token of several prompts "
    "alike, and scales both sides to length 1 first",
    "random": "drawn by another generator",
}

# What a method does otherwise here with tensors that are rare.
_ELSEWHERE = {
    "model_stock": "where task vectors point apart (a negative mean cosine), the base's weights stay as they are",
    "slerp": "a tensor that is 0 in one model has no direction, and is interpolated linearly",
}


@dataclass
class _Conversion:
    """The documents of a configuration on their way to one recipe.

    Attributes:
        names: The step of each document that has a name.
        steps: Those of the recipe so far.
        notes: What means something else here.
        faults: What a recipe has nothing for.
    """

    names: dict[str, str] = field(default_factory=dict)
    steps: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def passed(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return a recipe with its slices or mixture as a step, which a type or a scale needs a merge around."""
        for key in ASSEMBLED:
            if key in recipe:
                inner = self.step({key: recipe[key]}, key)
                rest = {name: value for name, value in recipe.items() if name != key}
                return {"method": "passthrough", "experts": {inner.removeprefix(PREFIX): inner}, **rest}
        return dict(recipe)

    def document(self, document: _Merge | _Mixture) -> dict[str, Any]:
        """Return one document as a recipe."""
        if isinstance(document, _Mixture):
            return self._mixture(document)
        if document.merge_method not in MERGEKIT:
            self.faults.append(f"merge_method '{document.merge_method}'")
            return {}
        modules = document.modules or {"default": document}
        parts = {name: _parts(document, module, self.notes) for name, module in modules.items()}
        first, *others = parts.values()
        if any(other != first or not first[0].whole for other in others):
            return self._layered(document, parts)
        if len(parts) == 1 and (name := next(iter(parts))) != "default":
            self.notes.append(f"the module `{name}` is taken for the whole model; mergekit writes its tensors alone")
        return self._module(first)

    def _module(self, parts: Sequence[_Part]) -> dict[str, Any]:
        """Return one module, or several that are alike, as a recipe."""
        document, scales = parts[0].document, [part.sources[0].parameters.get("scale", ()) for part in parts]
        stack = {"stack": parts[0].stack} if parts[0].stack else {}
        if stack and _config(parts[0].sources[0].model).get("model_type") in ("t5", "mt5"):
            self.notes.append(
                "`relative_attention_bias`, which all blocks of a T5 read, stays in the first one here; in mergekit it "
                "goes with block 0"
            )
        plain = not any(
            (stack and scales[0]) or part.whole or len(part.sources) > 1 or _over_depth(scales[0]) for part in parts
        )
        if document.merge_method == "passthrough" and plain and all(scale == scales[0] for scale in scales):
            if document.tokenizer or document.tokenizer_source not in (None, "base"):
                self.faults.append("a tokenizer of its own for slices of layers (it is the first model's)")
            taken = self.merge(replace(parts[0].of_whole_models(), base=None, whole=False))
            slices = [self.layers(part.sources[0], part.stack) for part in parts]
            return {"slices": slices} | {key: taken[key] for key in ("args", "dtype", "chat_template") if key in taken}
        recipes = [self.merge(part) for part in parts]
        if len(recipes) == 1 and not stack:
            return recipes[0]
        around = self._around(recipes, "slices of layers that are merged one by one")
        return {"slices": [{"model": self.step(recipe, "slice"), **stack} for recipe in recipes]} | around

    def _layered(self, document: _Merge, modules: Mapping[str, Sequence[_Part]]) -> dict[str, Any]:
        """Return modules that are merged in different ways: merges of whole models, laid over each other."""
        first = document.base_model or next(iter(modules.values()))[0].sources[0].model
        config = _config(first)
        patterns = _patterns(modules, first, config)
        order = list(patterns)
        moved = {name: ("", "") for name in order if not _in_place(modules[name], _counts(config))}
        unknown = [name for name in modules if not patterns[name] and (config or "." not in name)]
        reasons = [f"'{name}' is no module that is known here" for name in unknown]
        if not config:
            reasons.append(f"the config.json of '{first}' is not here, and says what they are called")
        try:
            moved = {name: _stacks(first, name, patterns) for name in moved if not reasons}
        except MergeflowError as error:
            reasons.append(str(error))
        if reasons:
            listed = ", ".join(f"`{name}`" for name in modules)
            self.faults.append(f"modules that are merged in different ways ({listed}): {'; '.join(reasons)}")
            return {}
        merges = [
            (name, only, self.merge(part))
            for name in order
            if name not in moved
            for only, part in _laid(modules[name], first, patterns[name])
        ]
        parts = {
            name: self._module([replace(part, stack=stack) for part in modules[name]])
            for name, (stack, _) in moved.items()
        }
        recipes = [*(recipe for *_, recipe in merges), *parts.values()]
        around = self._around(recipes, "modules that are merged in different ways")
        recipe: dict[str, Any] = {}
        below = ""
        for name, only, over in merges:
            if recipe:
                experts = {name: self.step(over, name)}
                over = {"method": "passthrough", "base": self.step(recipe, below), "experts": experts, "only": only}
            recipe, below = over, name
        for name, part in parts.items():
            path = self.step(recipe, below) if recipe else self.path(first)
            recipe, below = {"slices": [{"model": path, "stack": moved[name][1]}, *part["slices"]]}, name
        return recipe | around

    def _around(self, parts: Sequence[dict[str, Any]], of_what: str) -> dict[str, Any]:
        """Take from the parts of a merge what belongs to the whole."""
        keys = ("dtype", "chat_template", "tokenizer")
        around: dict[str, Any] = {key: part.pop(key) for part in parts for key in keys if key in part}
        if "tokenizer" in around:
            self.faults.append(f"a tokenizer for {of_what}")
        return around

    def merge(self, part: _Part) -> dict[str, Any]:
        """Return a merge of whole models, or of layers of each."""
        if not part.whole:
            part = self._of_layers(part)
        return _Merging(self, part).recipe()

    def _of_layers(self, part: _Part) -> _Part:
        """Return a slice of layers as one that its merge by itself reads alike."""
        lengths = {stop - start for source in part.sources for start, stop in [source.layer_range or (0, 0)]}
        if len(lengths) > 1:
            self.faults.append("a slice whose sources have different numbers of layers (mergekit refuses it, too)")
        if any(re.search(r"\b\d", name) for setting in part.settings for name, _ in setting):
            self.faults.append("a filter that names a layer's number, for slices of layers")
        if lengths != {1} or not any(map(_over_depth, part.settings)):
            return part
        self.notes.append("a list over depth in a slice of one layer is its last value; in mergekit only in that layer")

        def last(scope: Scope) -> Scope:
            return {key: tuple((name, values[-1:]) for name, values in setting) for key, setting in scope.items()}

        sources = [each.model_copy(update={"parameters": last(each.parameters)}) for each in part.sources]
        return replace(part, sources=sources, shared=last(part.shared))

    def layers(self, source: _Source, stack: str | None) -> dict[str, Any]:
        """Return layers of a model as an entry of `slices`."""
        ranges = {"stack": stack, "layers": source.layer_range and list(source.layer_range)}
        return {"model": self.path(source.model), **{key: value for key, value in ranges.items() if value}}

    def path(self, model: str) -> str:
        """Return a model's path: a step where it names a merge, or is a model with an adapter."""
        base, plus, adapter = model.partition("+")
        base = PREFIX + self.names[base] if base in self.names else base
        if not plus:
            return base
        step = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": base, "experts": {"adapter": adapter}}
        return self.step(step, f"{Path(base.removeprefix(PREFIX)).name}_{Path(adapter).name}")

    def step(self, step: Any, name: str) -> str:
        """Return the path of a step: of an equal one, or of a new one with about this name."""
        same = next((path for path, value in self.steps.items() if value == step), None)
        if same is None:
            self.steps[same := _free(name, {*self.steps, *self.names.values()})] = step
        return PREFIX + same

    def _mixture(self, document: _Mixture) -> dict[str, Any]:
        """Return a configuration of mergekit-moe as a recipe."""
        if document.gate_mode not in _ROUTERS:
            self.faults.append(f"gate_mode: {document.gate_mode}")
        self.notes.append(f"router rows are {_ROUTERS.get(document.gate_mode, '')}; the architecture is the base's")
        mixture: dict[str, Any] = {"base": self.path(document.base_model), "gate": document.gate_mode}
        mixture["experts"] = [self._expert(expert, "noise_scale", "residual_scale") for expert in document.experts]
        if document.experts_per_token is not None:
            mixture["experts_per_token"] = document.experts_per_token
        shared = document.shared_experts or []
        for expert in shared[:1]:
            scale = 1.0 if expert.residual_scale is None else expert.residual_scale
            mixture["shared"] = {"model": self._expert(expert, "noise_scale")["model"], "scale": scale}
            self.notes.append("the gate of the shared expert is open by half, whatever the prompts")
        if len(shared) > 1:
            self.faults.append("a second shared expert")
        return {"mixture": mixture, **({"dtype": document.dtype} if document.dtype else {})}

    def _expert(self, expert: _Expert, *refused: str) -> dict[str, Any]:
        self.faults += [f"`{key}` of an expert" for key in refused if getattr(expert, key)]
        prompts = {"prompts": expert.positive_prompts, "negative_prompts": expert.negative_prompts}
        return {key: value for key, value in prompts.items() if value} | {"model": self.path(expert.source_model)}


def _free(name: str, taken: Collection[str]) -> str:
    """Return a name of a step or expert that is not taken, with a number where it is."""
    name = re.sub(r"[^\w.-]", "-", name).lstrip("-.") or "model"
    return name if name not in taken else next(f"{name}_{i}" for i in range(2, 9999) if f"{name}_{i}" not in taken)


class _Merging:
    """One merge on its way to a recipe: whole models, or steps of their layers."""

    def __init__(self, work: _Conversion, part: _Part) -> None:
        self.work, self.document, self.shared = work, part.document, part.shared
        self.note, self.fault = work.notes.append, work.faults.append
        self.merge_method, self.counterpart = self.document.merge_method, MERGEKIT[self.document.merge_method]
        layers = [source.layer_range and work.layers(source, part.stack) for source in part.sources]
        paths = [work.step([of], "layers") if of else work.path(source.model)
                 for of, source in zip(layers, part.sources, strict=True)]  # fmt: skip
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            self.fault(f"the model '{path}' twice in one merge (mergekit refuses it, too)")
        self.models = {path: source.parameters for path, source in zip(paths, part.sources, strict=True)}
        places = {source.model: path for path, source in zip(paths, part.sources, strict=True)}
        if part.base and part.base not in places and not self.counterpart.base_is_model:
            self.fault(f"a slice without layers of the base '{part.base}'")
        self.base = part.base and (places.get(part.base) or work.path(part.base))
        self.experts = _named(self._merged(paths))

    def _merged(self, paths: list[str]) -> list[str]:
        """Return the paths of what is merged."""
        others = [path for path in paths if path != self.base]
        if self.merge_method == "slerp" and self.base is None:
            self.fault("slerp without a `base_model` (mergekit refuses it, too)")
        if self.merge_method == "slerp" and self.base is not None:
            return [self.base, *others]
        if self.merge_method == "linear" and self.base in paths and "weight" not in self.models[self.base]:
            # mergekit stops here; with a tokenizer the base is still of use
            self.note(f"`base_model` '{self.base}' has no weight: it is left out of the average")
            return others
        return paths if self.counterpart.base_is_model else others

    def recipe(self) -> dict[str, Any]:
        """Return the merge as a recipe."""
        if not self.experts:
            self.fault("a merge of no models but the base: there is nothing to merge")
            return {}
        base = {"base": self.base} if self.base and not self.counterpart.base_is_model else {}
        recipe = {"method": self.counterpart.method, **base, "experts": self.experts}
        args = self._arguments()
        weights = self._of_each("weight", 1.0) if "weight" in self.counterpart.reads else {}
        if any(weight != _constant(1.0) for weight in weights.values()):
            recipe["weights"] = {name: _written(weight) for name, weight in weights.items()}
        if args:
            recipe["args"] = args
        if dtype := self.document.out_dtype or self.document.dtype:
            recipe["dtype"] = dtype.removeprefix("torch.")
        self._add_tokens(recipe)
        return recipe

    def _value(self, key: str, default: float | None = None, path: str | None = None) -> Setting:
        """Return a parameter of all models, or of one, up to the value for all tensors; empty where there is none."""
        given = (self.shared if path is None else self.models[path]).get(key, ())
        closed = next((place for place, (name, _) in enumerate(given, 1) if name == "*"), None)
        if closed is None and key in ("t", "weight"):
            if given:
                self.fault(f"`{key}` for tensors that none of its filters names (mergekit refuses it, too)")
            else:
                self.note(f"mergekit refuses {self.merge_method} without `{key}`; here the default is taken")
        if closed is None and default is not None:
            given += _constant(default)
        if any(
            len(values) > 1 and (name == "*" or any(name in tail for tail in _TAILS)) for name, values in given[:closed]
        ):
            self.note(
                "a list over depth gives what follows the last block (final norm, head) or is of none (projector) its "
                "last value here, and its first one, or those of a list of its own, in mergekit"
            )
        return given[:closed]

    def _of_each(self, key: str, default: float) -> dict[str, Setting]:
        return {name: self._value(key, default, path) for name, path in self.experts.items()}

    def _flag(self, key: str, default: bool) -> bool:
        """Return a parameter that is true or false for the whole model."""
        values = set(_numbers([self._value(key, default)]))
        if len(values) > 1 or not values <= {0, 1}:
            self.fault(f"`{key}` that is not true or false for the whole model")
        return bool(values.pop())

    def _arguments(self) -> dict[str, Any]:
        """Return the method's arguments."""
        args = dict(self.counterpart.fixed)
        if self.merge_method in ("nuslerp", "multislerp"):
            args["on"] = "task_vectors" if self.base else "weights"
        for key, argument in self.counterpart.reads.items():
            args |= self._argument(key, argument)
        if rule := _ELSEWHERE.get(self.merge_method):
            self.note(rule)
        return args

    def _argument(self, key: str, argument: str) -> dict[str, Any]:
        """Convert one parameter of mergekit; empty where it is none by itself."""
        match key:
            case "density" if argument:
                return self._sparsity(argument)
            case "rescale" if self.merge_method != "task_arithmetic":
                dropped = "drop" in self.counterpart.reads["density"]
                shares = _numbers(self._of_each("density", 1.0).values())
                if self._flag(key, dropped) != dropped and min(shares) < 1:
                    rule = "what DARE and DELLA leave is always rescaled" if dropped else "nothing else is rescaled"
                    self.fault(f"rescale: {str(not dropped).lower()} ({rule})")
            case "normalize" | "normalize_weights" if argument == "normalize":
                default = not self.counterpart.sums_task_vectors
                return {} if (on := self._flag(key, default)) == default else {argument: on}
            case "normalize":
                return {"reduce": "weighted_mean" if self._flag(key, self.merge_method in ("ties", "della")) else "sum"}
            case "nuslerp_flatten":
                rows, flat = self._flag("nuslerp_row_wise", False), self._flag(key, True)
                return {"vectors": "tensor" if flat else "columns" if rows else "rows"}
            case "filter_wise":
                return {"vectors": "rows"} if self._flag(key, False) else {}
            case "eps" if self._value(key, 1e-8) != _constant(1e-8):
                self.fault("eps of multislerp")
            case _ if argument.isidentifier() and argument not in ("weights", "gamma"):
                path = next(iter(self.experts.values())) if key == "scale" else None
                value = self._value(key, 1.0 if key == "lambda" else None, path)
                if argument == "iterations":
                    value = _mapped(value, lambda number: int(number) if number.is_integer() else number)
                return {argument: _written(_capped(value) if argument == "keep" else value)} if value else {}
        return {}

    def _sparsity(self, argument: str) -> dict[str, Any]:
        """Return the arguments that say which entries of each task vector stay."""
        shares = {name: _capped(share) for name, share in self._of_each("density", 1.0).items()}
        if argument == "keep":
            return {argument: _by_expert(shares)}
        if "beta" in argument:
            return self._cuts(shares)
        drops = {name: _mapped(share, lambda number: round(1 - number, 12)) for name, share in shares.items()}
        if any(_numbers(drops.values())):
            self.note("masks are drawn by another generator, and rescaled by 1/(1 - drop) instead of the L1 norm")
        window = {"window": self._window(_numbers(drops.values()))} if "epsilon" in self.counterpart.reads else {}
        return {"drop": _by_expert(drops)} | window

    def _window(self, drops: Sequence[float]) -> Any:
        """Return DELLA's window, which all models share."""
        first, *others = self._of_each("epsilon", 0.15).values()
        if not any(drops):
            return 0.0  # at density 1 nothing is dropped, whatever epsilon says
        if any(width != first for width in others):
            self.fault("epsilon that differs between models")
        if 0 in drops and any(_numbers([first])):
            self.fault("a density of 1 with smaller ones, unless epsilon is 0 (all models have one window)")
        return _written(_mapped(first, lambda epsilon: round(2 * epsilon, 12)))

    def _cuts(self, shares: Mapping[str, Setting]) -> dict[str, Any]:
        """Return the shares of smallest and largest entries that each expert loses; the density is kept in any case."""
        betas, gammas = {}, {}
        for name, share in shares.items():
            gamma, *more = dict.fromkeys(_numbers([self._value("gamma", 0.01, self.experts[name])]))
            least = min(max(0.0, round(1 - number, 12)) for number in _numbers([share]))  # the smallest share that goes
            if more:
                self.fault("breadcrumbs with a gamma that varies over the model")
            elif len(_numbers([share])) > 1 and gamma > least:
                self.fault("breadcrumbs with a density that varies over the model and exceeds 1 - gamma")
            most = round(min(gamma, least), 12)
            gammas[name] = _constant(most)
            betas[name] = _mapped(share, partial(_least, most))
        self.note("each cut of breadcrumbs is rounded to whole entries, in mergekit the number that is kept")
        return {"beta": _by_expert(betas), "gamma": _by_expert(gammas)}

    def _add_tokens(self, recipe: dict[str, Any]) -> None:
        """Carry over whose tokenizer and chat template the result has."""
        names = {path: name for name, path in self.experts.items()}
        tokenizer, template = self.document.vocabulary, self.document.chat_template
        if tokenizer and tokenizer.source == "base" and self.base and self.base not in names:
            recipe.setdefault("base", self.base)  # nothing else is read of it where only models are averaged
        names |= {str(recipe["base"]): "base"} if "base" in recipe else {}

        def named(text: str) -> str:
            path = str(self.base) if text == "base" else self.work.path(text.removeprefix("model:"))
            if path not in names and text not in ("base", "union"):
                self.fault(f"the tokenizer of '{path}', which is not among the models")
            return names.get(path, text)

        if tokenizer is not None:
            # Rows that no token uses go, as in mergekit; `rows_wanted` keeps them by default.
            rows = tokenizer.pad_to_multiple_of or 1
            recipe["tokenizer"] = {"source": named(tokenizer.source), "pad_to_multiple_of": rows}
            if rows > 1:
                self.note("rows that no token uses are merged where models have them; in mergekit they are means")
            if tokenizer.tokens:
                recipe["tokenizer"]["tokens"] = {name: _token(token, named) for name, token in tokenizer.tokens.items()}
        if template == "auto" or template in NAMED or (template and ("{" in template or template.endswith(".jinja"))):
            recipe["chat_template"] = template
        elif template:
            self.fault(f"chat_template: {template}, which is not known here (give its Jinja text or file)")


def _named(paths: Sequence[str]) -> dict[str, str]:
    """Return experts by name: the ends of their paths, or the paths where two end alike."""
    plain = [path.removeprefix(PREFIX) for path in paths]
    ends = [Path(path).stem if path.endswith(".safetensors") else Path(path).name for path in plain]
    alike = len(set(ends)) < len(ends)
    names: dict[str, str] = {}
    for end, whole, path in zip(ends, plain, paths, strict=True):
        name = whole.replace("/", "_") if alike else end
        names[_free("base_model" if name == "base" else name, ["base", *names])] = path  # `base` is the recipe's base
    return names


def _token(token: _Token, named: Callable[[str], str]) -> dict[str, Any]:
    """Return a token with the models' names here; mergekit adds one that no vocabulary has."""
    source = token.source
    if isinstance(source, Mapping):
        source = {key: named(value) if key == "model" else value for key, value in source.items()}
    written = {"source": named(source) if isinstance(source, str) else source, "force": token.force, "new": True}
    return {key: value for key, value in written.items() if value}


def _constant(number: float) -> Setting:
    return (("*", (number,)),)


def _numbers(settings: Iterable[Setting]) -> list[float]:
    return [number for setting in settings for _, values in setting for number in values]


def _over_depth(setting: Setting) -> bool:
    return any(len(values) > 1 for _, values in setting)


def _mapped(setting: Setting, function: Callable[[float], float]) -> Setting:
    """Return a parameter with every number of it changed."""
    return tuple((name, tuple(map(function, values))) for name, values in setting)


def _least(most: float, share: float) -> float:
    return round(max(0.0, 1 - share - most), 12)


def _capped(share: Setting) -> Setting:
    """Return a share of entries that are kept, where above 1 all are."""
    return share if _over_depth(share) else _mapped(share, lambda number: min(number, 1.0))


def _written(setting: Setting) -> Any:
    """Return a parameter as a recipe has it."""
    plain = [values[0] if len(values) == 1 else list(values) for _, values in setting]
    listed = [{"value": value} if name == "*" else {"filter": name, "value": value}
              for (name, _), value in zip(setting, plain, strict=True)]  # fmt: skip
    return plain[0] if setting[0][0] == "*" else listed


def _by_expert(settings: Mapping[str, Setting]) -> Any:
    """Return one value where all experts have the same."""
    first, *others = settings.values()
    alike = all(other == first for other in others)
    return _written(first) if alike else {name: _written(setting) for name, setting in settings.items()}
