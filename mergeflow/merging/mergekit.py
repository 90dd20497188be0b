"""mergekit's configurations as recipes: equal settings are carried over, all others are named.

The records below are the form that mergekit documents. Keys that it does not know it passes over in silence; here they
are noted, and refused where they look like a slip.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from mergeflow.checkpoints.formats import read_json_if_whole
from mergeflow.checkpoints.writer import write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.architectures.blocks import COUNTS
from mergeflow.merging.files.recipe import make_recipe
from mergeflow.merging.files.steps import ASSEMBLED, PREFIX
from mergeflow.merging.mergekit_names import METHODS
from mergeflow.merging.values import over_depth
from mergeflow.merging.vocabulary.companions import NAMED
from mergeflow.schema import faults_of
from mergeflow.yaml_text import read_documents


def _number(value: Any) -> Any:
    """Return a number; YAML reads 1e-5 as a text, which mergekit takes for the number."""
    if isinstance(value, bool | int | float):
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, a list of them, or filters with a `value`, found {value!r:.60}") from None


def _setting(value: Any) -> Any:
    """Return a parameter: a number, numbers over depth, or filters with one of these each."""
    if isinstance(value, Mapping) and "value" in value:
        return {**value, "value": _setting(value["value"])}
    if isinstance(value, list) and value:
        return [_setting(part) for part in value]
    return _number(value)


def _reference(value: Any) -> Any:
    """Return a model as one text: `path`, `path@revision`, or `path+adapter`.

    Example:
        >>> _reference({"model": {"path": "a/b", "revision": "v1"}, "lora": "c/d"})
        'a/b@v1+c/d'
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a path, or a mapping with `path`, found {value!r:.60}")
    inner = "path" if "path" in value else "model"
    if value.get(inner) is None:
        raise ValueError(f"`{inner}` is missing")
    strange = sorted(
        key for key in value if value[key] is not None and key not in ("path", "revision", "model", "lora")
    )
    if strange:
        raise ValueError(f"`{strange[0]}` of a model has no counterpart in a recipe")
    if inner == "path":
        return f"{value['path']}@{value['revision']}" if value.get("revision") else str(value["path"])
    return _reference(value["model"]) + (f"+{_reference(value['lora'])}" if value.get("lora") else "")


def _range(value: Any) -> Any:
    if isinstance(value, list):  # as texts mergekit takes whole numbers, too
        value = [int(number) if isinstance(number, str) and number.isdecimal() else number for number in value]
    whole = isinstance(value, list) and len(value) == 2 and all(type(number) is int for number in value)
    if not whole or not 0 <= value[0] < value[1]:
        raise ValueError(f"two numbers of blocks such as [0, 16], the second larger, found {value!r:.60}")
    return tuple(value)


_TAILS = (
    "model.norm.weight",
    "lm_head.weight",
    "model.final_layernorm.weight",
    "transformer.ln_f.bias",
    "embed_out.weight",
)

Reference = Annotated[str, BeforeValidator(_reference)]
Settings = Annotated[
    dict[str, Annotated[Any, BeforeValidator(_setting)]], BeforeValidator(lambda value: {} if value is None else value)
]


class _Record(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class _Input(_Record):
    """A model, or some of its layers."""

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


class _Token(_Record):
    source: dict[str, Any] | Reference | None = None
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
    def _check(self) -> "_Merge":
        given = [key for key in ("models", "slices", "modules") if getattr(self, key)]
        if len(given) != 1:
            raise ValueError(
                f"give one of `models`, `slices` and `modules`, found {' and '.join(given) or 'none of them'}"
            )
        if self.tokenizer is not None and self.tokenizer_source is not None:
            raise ValueError("`tokenizer` and `tokenizer_source` are both given: keep one")
        return self


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
        source: The configuration: one document, or several as `mergekit-multi` takes them, or one of `mergekit-moe`.
        out: The `.yaml`, `.yml` or `.json` file to make.
        dtype: Type of the result, instead of the configuration's.
        shard_size: Largest shard of the result, such as 5GB.
        force: Replace `out` if it exists.

    Returns:
        The notes: what means something else here.

    Raises:
        MergeflowError: As `converted`; the file cannot be read or is not a configuration, or `out` exists.
    """
    documents, target = read_documents(Path(source), "configuration"), Path(out)
    if not documents or not all(map(_is_configuration, documents)):
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


def _is_configuration(document: Any) -> bool:
    """Whether it says how to merge; a mixture names its experts' `source_model`, and need not name a `gate_mode`."""
    if not isinstance(document, dict):
        return False
    experts = document.get("experts")
    sources = isinstance(experts, list) and any(
        isinstance(expert, dict) and "source_model" in expert for expert in experts
    )
    return bool({"merge_method", "gate_mode"} & document.keys()) or sources


def converted(
    documents: Sequence[Mapping[str, Any]], origin: str = "configuration"
) -> tuple[dict[str, Any], list[str]]:
    """Convert a configuration to a recipe, with notes on settings that have another meaning here.

    Args:
        documents: Its documents: merges, all but one with a name by which others read their results.

    Raises:
        MergeflowError: What cannot be carried over, all of it, or a form that mergekit does not document.
    """
    work = _Conversion()
    parsed = _parsed(documents, origin, work.notes)
    named = (
        {str(document.name): document for document in parsed if document.name is not None} if len(parsed) > 1 else {}
    )
    last = [document for document in parsed if all(document is not other for other in named.values())]
    if not last:
        read = {path for document in named.values() for path in _paths(document)}
        last = [document for name, document in named.items() if name not in read]
    if len(last) != 1:
        raise MergeflowError(
            f"{origin} has {len(last)} merges that no other reads, and a recipe has one result: give one file each."
        )
    work.names = [name for name, document in named.items() if document is not last[0]]
    for name in work.names:
        work.steps[name] = work.inner(named[name])
    recipe = work.document(last[0])
    if work.faults:
        listed = "\n".join(f"  - {fault}" for fault in dict.fromkeys(work.faults))
        raise MergeflowError(f"{origin} cannot be carried over whole; a recipe has nothing for:\n{listed}")
    if work.steps:
        recipe = work.passed(recipe) | {"steps": work.steps}
    return recipe, list(dict.fromkeys(work.notes))


def _parsed(documents: Sequence[Mapping[str, Any]], origin: str, notes: list[str]) -> list[_Merge | _Mixture]:
    """Return the documents as records, with all that is wrong with their form in one error, and note unknown keys."""
    records: list[_Merge | _Mixture] = []
    faults: list[str] = []
    for document in documents:
        kind = _Merge if "merge_method" in document else _Mixture
        try:
            records.append(kind.model_validate(document))
        except ValidationError as error:
            faults += faults_of(error, kind)
            continue
        for where, key, fields in _strange(records[-1]):
            if near := get_close_matches(key, fields, n=1, cutoff=0.55):
                faults.append(f"unknown key '{key}'{where}: did you mean '{near[0]}'?")
            else:
                notes.append(f"`{key}`{where} means nothing to mergekit, and is left out")
    if faults:
        listed = "\n".join(f"  - {fault}" for fault in dict.fromkeys(faults))
        raise MergeflowError(f"{origin} is not of the form that mergekit documents:\n{listed}")
    return records


def _strange(record: BaseModel, where: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """Yield the keys that a record does not know, with their place and the keys that it knows."""
    for key in record.model_extra or {}:
        yield (f" of {where}" if where else ""), str(key), list(type(record).model_fields)
    for key in type(record).model_fields:
        value = getattr(record, key)
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for place, part in [("", value), *parts]:
            if isinstance(part, BaseModel):
                yield from _strange(part, ".".join(filter(None, (where, key, str(place)))))


def _inputs(module: _Module) -> list[_Input]:
    return [*(module.models or ()), *(source for part in module.slices or () for source in part.sources)]


def _paths(document: _Merge | _Mixture) -> list[str]:
    """Return the models that a document reads."""
    if isinstance(document, _Mixture):
        experts = [*document.experts, *(document.shared_experts or ())]
        return [document.base_model, *(expert.source_model for expert in experts)]
    modules = [document, *(document.modules or {}).values()]
    return [str(document.base_model), *(model.model for module in modules for model in _inputs(module))]


@dataclass
class _Conversion:
    """The documents of a configuration on their way to one recipe: its steps so far, notes and faults."""

    names: list[str] = field(default_factory=list)
    steps: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def inner(self, document: _Merge | _Mixture) -> dict[str, Any]:
        """Return a document as a step."""
        step = self.passed(self.document(document))
        for key in ("chat_template", "tokenizer", "tokenizer_source"):
            if step.pop(key, None) is not None:
                self.faults.append(f"`{key}` of a merge that another one reads")
        return step

    def passed(self, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return a recipe with its slices or mixture as a step, which a type or a scale needs a merge around."""
        for key in ASSEMBLED:
            if key in recipe:
                self.steps[inner := self._free(key)] = {key: recipe[key]}
                rest = {name: value for name, value in recipe.items() if name != key}
                return {"method": "passthrough", "experts": {inner: PREFIX + inner}, **rest}
        return dict(recipe)

    def document(self, document: _Merge | _Mixture) -> dict[str, Any]:
        """Return one document as a recipe."""
        if isinstance(document, _Mixture):
            return self._mixture(document)
        if document.merge_method not in METHODS:
            self.faults.append(f"merge_method '{document.merge_method}'")
            return {}
        if not document.modules:
            return self._module(document, document.model_copy(update={"parameters": {}}))
        modules = {name: self._whole_module(module) for name, module in document.modules.items()}
        first, *others = modules.values()
        if all(module == first for module in others):
            return self._module(document, first)
        return self._layered(document, modules)

    def _module(self, document: _Merge, module: _Module) -> dict[str, Any]:
        """Return one module of a document, which may be the document itself, as a recipe."""
        scopes = [module.parameters, document.parameters]
        if not module.slices:
            base, models = document.base_model, list(module.models or ())
            if base is not None and all(source.model != base for source in models):
                models.append(_Input(model=base))  # mergekit adds it
            return self._merge(document, models, scopes, base)
        self.notes += ["`residual_weight` means nothing to mergekit, and is left out" for part in module.slices
                       if part.residual_weight is not None]  # fmt: skip
        if document.merge_method == "passthrough" and self._stacks(module.slices, scopes):
            return self._stack(document, module.slices, scopes)
        parts = [self._slice(document, part, scopes, len(module.slices) == 1) for part in module.slices]
        if len(parts) == 1:
            return parts[0]
        around = self._around(parts, "slices of layers that are merged one by one")
        steps = []
        for part in parts:
            self.steps[name := self._free("slice")] = part
            steps.append({"model": PREFIX + name})
        return {"slices": steps} | around

    def _layered(self, document: _Merge, modules: Mapping[str, _Module]) -> dict[str, Any]:
        """Return modules that are merged in different ways: a step for each, laid over the others."""
        first = document.base_model or _inputs(next(iter(modules.values())))[0].model
        kind = str(_config(first).get("model_type"))
        patterns = {name: _tensors_of(name, kind) for name in modules}
        order = sorted(modules, key=lambda name: (patterns[name] != "*", "merger" in patterns[name]))
        reasons = [f"'{name}' is no module that is known here" for name in modules if not patterns[name]]
        if not _config(first):
            reasons.append(f"the config.json of '{first}' is not here, and says what they are called")
        if any(part.slices for part in modules.values()):
            reasons.append("one has slices of layers")
        if reasons:
            listed = ", ".join(f"`{name}`" for name in modules)
            self.faults.append(f"modules that are merged in different ways ({listed}): {'; '.join(reasons)}")
            return {}
        parts = {name: self._module(document, modules[name]) for name in order}
        around = self._around(list(parts.values()), "modules that are merged in different ways")
        recipe = parts[order[0]]
        for below, name in pairwise(order):
            base, over = self._step(recipe, below), self._step(parts[name], name)
            recipe = {"method": "passthrough", "base": base, "experts": {name: over}, "only": [patterns[name]]}
        return recipe | around

    def _around(self, parts: Sequence[dict[str, Any]], of_what: str) -> dict[str, Any]:
        """Take from the parts of a merge what belongs to the whole."""
        lifted = ("dtype", "chat_template", "tokenizer", "tokenizer_source")
        around = {key: part.pop(key) for part in parts for key in lifted if key in part}
        if {"tokenizer", "tokenizer_source"} & around.keys():
            self.faults.append(f"a tokenizer for {of_what}")
        return around

    def _whole_module(self, module: _Module) -> _Module:
        """Return a module with models in place of one slice that is the whole of them."""
        if module.slices and len(module.slices) == 1:
            part = module.slices[0]
            if self._whole(part):
                models = [_Input(model=source.model, parameters=source.parameters) for source in part.sources]
                scopes = part.parameters | {k: v for k, v in module.parameters.items() if k not in part.parameters}
                if not any(_conditions(part.parameters.get(key)) for key in module.parameters) and not part.base_model:
                    return _Module(models=models, parameters=scopes)
        return module

    def _free(self, name: str) -> str:
        taken = {*self.steps, *self.names}
        return name if name not in taken else next(f"{name}_{i}" for i in range(2, 9999) if f"{name}_{i}" not in taken)

    def _path(self, model: str) -> str:
        """Return a model's path: a step where it names a merge, or is a model with an adapter."""
        if model in self.names:
            return PREFIX + model
        base, plus, adapter = model.partition("+")
        if plus and not model.startswith(PREFIX):
            step = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": base, "experts": {"adapter": adapter}}
            return self._step(step, re.sub(r"[^\w.-]", "-", f"{Path(base).name}_{Path(adapter).name}"))
        return model

    def _step(self, step: Any, name: str) -> str:
        """Return the path of a step: of one that is there already, or of a new one with about this name."""
        same = next((there for there, value in self.steps.items() if value == step), None)
        if same is None:
            self.steps[same := self._free(name)] = step
        return PREFIX + same

    def _merge(
        self, document: _Merge, inputs: Sequence[_Input], scopes: Sequence[Mapping[str, Any]], base: str | None
    ) -> dict[str, Any]:
        """Return one merge of whole models, or of equally many layers of each."""
        paths = [self._path(source.model) for source in inputs]
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            self.faults.append(f"the model '{path}' twice in one merge (mergekit refuses it, too)")
        parameters = {path: source.parameters for path, source in zip(paths, inputs, strict=True)}
        return _One(document, parameters, scopes, base and self._path(base), self.notes, self.faults).recipe()

    def _stacks(self, slices: Sequence[_Slice], scopes: Sequence[Mapping[str, Any]]) -> bool:
        """Whether slices are layers of one model each, without parameters of their own or over a slice's depth."""
        plain = all(
            len(part.sources) == 1 and not part.parameters and not part.sources[0].parameters for part in slices
        )
        return plain and not any(over_depth(scope.get("scale")) for scope in scopes)

    def _stack(self, document: _Merge, slices: Sequence[_Slice], scopes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return layers behind each other, as they are or scaled."""
        sources = [part.sources[0] for part in slices]
        plain = self._merge(document, sources[:1], scopes, None)
        source = document.tokenizer.source if document.tokenizer else document.tokenizer_source
        if document.tokenizer or source not in (None, "base"):
            self.faults.append("a tokenizer of its own for slices of layers (it is the first model's)")
        recipe: dict[str, Any] = {"slices": [self._layers(source) for source in sources]}
        return recipe | {key: plain[key] for key in ("args", "dtype", "chat_template") if key in plain}

    def _layers(self, source: _Source) -> dict[str, Any]:
        layers = {"layers": list(source.layer_range)} if source.layer_range else {}
        return {"model": self._path(source.model), **layers}

    def _slice(
        self, document: _Merge, part: _Slice, scopes: Sequence[Mapping[str, Any]], alone: bool
    ) -> dict[str, Any]:
        """Return one slice as a merge of its sources' layers."""
        base = part.base_model or document.base_model
        lengths = {stop - start for source in part.sources for start, stop in [source.layer_range or (0, 0)]}
        if len(lengths) > 1:
            self.faults.append("a slice whose sources have different numbers of layers (mergekit refuses it, too)")
        whole = alone and self._whole(part)
        scopes = [part.parameters, *scopes]
        sources = list(part.sources)
        if not whole:
            settings = [value for scope in (*scopes, *(s.parameters for s in sources)) for value in scope.values()]
            if any(
                re.search(r"\d", str(condition.get("filter"))) for value in settings for condition in _conditions(value)
            ):
                self.faults.append("a filter that names a layer's number, for slices of layers")
            if lengths == {1} and any(map(over_depth, settings)):
                self.notes.append(
                    "a list over depth in a slice of one layer is its last value; in mergekit only in that layer"
                )
                scopes = [_last_values(scope) for scope in scopes]
                sources = [s.model_copy(update={"parameters": _last_values(s.parameters)}) for s in sources]
        places = {source.model: self._part(source, whole) for source in sources}
        if base is not None and base not in places and not METHODS[document.merge_method].base_is_model:
            self.faults.append(f"a slice without layers of the base '{base}'")
        models = [_Input(model=self._part(source, whole), parameters=source.parameters) for source in sources]
        return self._merge(document, models, scopes, places.get(base, base) if base else None)

    def _part(self, source: _Source, whole: bool) -> str:
        if whole or not source.layer_range:
            return self._path(source.model)
        return self._step([self._layers(source)], "layers")

    def _whole(self, part: _Slice) -> bool:
        """Whether a slice is its models as they are."""
        ranges = {source.layer_range for source in part.sources}
        layers = next(iter(ranges))
        if layers is None or len(ranges) > 1 or layers[0] != 0:
            return ranges == {None}
        counts = [numbers for source in part.sources if (numbers := _counts(source.model))]
        if not counts:
            self.notes.append(f"layer_range {list(layers)} is taken for the whole model, whose config.json is not here")
        return all(layers[1] in numbers for numbers in counts)

    def _mixture(self, document: _Mixture) -> dict[str, Any]:
        """Return a configuration of mergekit-moe as a recipe."""
        if document.gate_mode not in _ROUTERS:
            self.faults.append(f"gate_mode: {document.gate_mode}")
        rows = _ROUTERS.get(document.gate_mode, "")
        self.notes.append(f"router rows are {rows}; the architecture is the base's")
        mixture: dict[str, Any] = {"base": self._path(document.base_model), "gate": document.gate_mode}
        mixture["experts"] = [self._expert(expert) for expert in document.experts]
        if document.experts_per_token is not None:
            mixture["experts_per_token"] = document.experts_per_token
        shared = document.shared_experts or []
        for expert in shared[:1]:
            scale = 1.0 if expert.residual_scale is None else expert.residual_scale
            mixture["shared"] = {"model": self._path(expert.source_model), "scale": scale}
            self.notes.append("the gate of the shared expert is open by half, whatever the prompts")
        if len(shared) > 1:
            self.faults.append("a second shared expert")
        return {"mixture": mixture, **({"dtype": document.dtype} if document.dtype else {})}

    def _expert(self, expert: _Expert) -> dict[str, Any]:
        self.faults += [f"`{key}` of an expert" for key in ("noise_scale", "residual_scale") if getattr(expert, key)]
        prompts = {"prompts": expert.positive_prompts, "negative_prompts": expert.negative_prompts}
        return {key: value for key, value in prompts.items() if value} | {"model": self._path(expert.source_model)}


@dataclass
class _One:
    """One merge of mergekit on its way to a recipe.

    Attributes:
        models: Parameters of each model, by path.
        scopes: Parameters of all models, those that win first.
        notes: What means something else here; added to.
        faults: What is left out; added to.
    """

    document: _Merge
    models: Mapping[str, Mapping[str, Any]]
    scopes: Sequence[Mapping[str, Any]]
    base: str | None
    notes: list[str]
    faults: list[str]

    def __post_init__(self) -> None:
        self.theirs = self.document.merge_method
        self.here = METHODS[self.theirs]
        self.experts = self._experts()

    def recipe(self) -> dict[str, Any]:
        """Return the recipe."""
        self._unread()
        if not self.experts:
            self.faults.append("a merge of no models but the base: there is nothing to merge")
            return {}
        args = self._sum_arguments() if self.here.sums_task_vectors else self._arguments()
        recipe: dict[str, Any] = {"method": self.here.method}
        if self.base and not self.here.base_is_model:
            recipe["base"] = self.base
        recipe["experts"] = self.experts
        weights = self._weights() if "weight" in self.here.reads else {}
        if any(weight != 1.0 for weight in weights.values()):
            recipe["weights"] = weights
        if args:
            recipe["args"] = args
        if dtype := self.document.out_dtype or self.document.dtype:
            recipe["dtype"] = dtype.removeprefix("torch.")
        if any(_reaches_the_head(value) for value in (*weights.values(), *args.values())):
            self.notes.append(
                "a list over depth gives what follows the last block (final norm, head) its last value here, and "
                "its first one in mergekit"
            )
        self._tokens(recipe)
        return recipe

    def _experts(self) -> dict[str, str]:
        """Return the experts by name."""
        paths = list(self.models)
        if self.theirs == "slerp":
            if self.base is None:
                self.faults.append("slerp without a `base_model` (mergekit refuses it, too)")
            else:
                paths = [self.base, *(path for path in paths if path != self.base)]
        elif not self.here.base_is_model:
            paths = [path for path in paths if path != self.base]
        elif (
            self.theirs == "linear"
            and self.base in paths
            and not any("weight" in scope for scope in (self.models[self.base], *self.scopes))
        ):
            paths.remove(self.base)  # mergekit stops here; with a tokenizer the base is still of use
            self.notes.append(f"`base_model` '{self.base}' has no weight: it is left out of the average")
        names = [Path(path).stem if path.endswith(".safetensors") else Path(path).name for path in paths]
        names = [name.removeprefix(PREFIX) for name in names]
        names = ["base_model" if name == "base" else name for name in names]  # a recipe keeps `base` for the base
        unique = len(set(names)) == len(names)
        return {name if unique else path.replace("/", "_"): path for name, path in zip(names, paths, strict=True)}

    def _unread(self) -> None:
        """Note the parameters that mergekit does not read for this method."""
        keys = dict.fromkeys(key for scope in (*self.models.values(), *self.scopes) for key in scope)
        self.notes += [f"mergekit's {self.theirs} does not read `{key}`: it is left out" for key in keys
                       if key not in self.here.reads]  # fmt: skip

    def _value(self, key: str, default: Any = None, path: str | None = None) -> Any:
        """Return a parameter of one model, or of all; filters of an outer scope stand behind those of an inner one."""
        inner = [self.models.get(path, {})] if path is not None else []
        filters: list[Any] = []
        for scope in (*inner, *self.scopes):
            if key not in scope:
                continue
            conditions = _conditions(scope[key])
            if not conditions:
                return [*filters, {"value": scope[key]}] if filters else scope[key]
            filters += conditions
            if any(condition.get("filter") in (None, "*") for condition in conditions):
                return filters
        if not filters:
            return default
        if key in ("t", "weight"):
            self.faults.append(f"`{key}` for tensors that none of its filters names (mergekit refuses it, too)")
        return filters if default is None else [*filters, {"value": default}]

    def _flag(self, key: str, default: bool) -> bool:
        """Return a parameter that is true or false for the whole model."""
        values = set(_numbers(self._value(key, default)))
        if len(values) > 1 or not values <= {0, 1}:
            self.faults.append(f"`{key}` that is not true or false for the whole model")
        return bool(values.pop())

    def _constant(self, key: str, default: float) -> float:
        value = self._value(key, default)
        if isinstance(value, list | Mapping):
            self.faults.append(f"`{key}` that varies over the model")
            return default
        return float(value)

    def _of_each(self, key: str, default: float) -> dict[str, Any]:
        return {name: _mapped(self._value(key, default, path), float) for name, path in self.experts.items()}

    def _weights(self) -> dict[str, Any]:
        weights = {name: self._value("weight", path=path) for name, path in self.experts.items()}
        return {name: 1.0 if value is None else _mapped(value, float) for name, value in weights.items()}

    def _sum_arguments(self) -> dict[str, Any]:
        """Return the arguments of methods that sum task vectors."""
        method, reads = self.here.method, self.here.reads
        args: dict[str, Any] = {"scale": _mapped(self._value("lambda", 1.0), float)}
        dropped = "drop" in reads["density"]
        if "reduce" in reads["normalize"]:
            args["reduce"] = "weighted_mean" if self._flag("normalize", self.theirs in ("ties", "della")) else "sum"
        elif self._flag("normalize", False):
            args["normalize"] = True
        if self.theirs != "task_arithmetic" and self._flag("rescale", dropped) != dropped:
            rule = "what DARE and DELLA leave is always rescaled" if dropped else "nothing else is rescaled"
            self.faults.append(f"rescale: {str(not dropped).lower()} ({rule})")
        args |= self.here.fixed
        if method == "ties":
            args["keep"] = _by_expert(self._of_each("density", 1.0))
        if dropped:
            shares = self._of_each("density", 1.0)
            args["drop"] = _by_expert({name: _mapped(share, _less) for name, share in shares.items()})
            if any(_numbers(args["drop"])):
                self.notes.append(
                    "masks are drawn by another generator, and rescaled by 1/(1 - drop) instead of the L1 norm"
                )
        if "epsilon" in reads:
            args["window"] = self._window(args["drop"])
        if "gamma" in reads:
            args |= self._cuts()
        return args

    def _window(self, drop: Any) -> Any:
        """Return DELLA's window, which all models share."""
        widths = list(self._of_each("epsilon", 0.15).values())
        drops = list(_numbers(drop))
        if not any(drops):
            return 0.0  # at density 1 nothing is dropped, whatever epsilon says
        if any(width != widths[0] for width in widths):
            self.faults.append("epsilon that differs between models")
        window = _mapped(widths[0], lambda epsilon: round(2 * epsilon, 12))
        if 0 in drops and any(_numbers(window)):
            self.faults.append("a density of 1 with smaller ones, unless epsilon is 0 (all models have one window)")
        return window

    def _cuts(self) -> dict[str, Any]:
        """Return the shares of smallest and largest entries that each expert loses; the density is kept in any case."""
        cuts: dict[str, dict[str, Any]] = {"beta": {}, "gamma": {}}
        for name, path in self.experts.items():
            density, gamma = self._value("density", 1.0, path), self._value("gamma", 0.01, path)
            least = min(max(0.0, _less(share)) for share in _numbers(density))  # the smallest share that goes
            if isinstance(gamma, list | Mapping):
                self.faults.append("breadcrumbs with a gamma that varies over the model")
                gamma = 0.0
            elif isinstance(density, list | Mapping) and gamma > least:
                self.faults.append("breadcrumbs with a density that varies over the model and exceeds 1 - gamma")
            most = round(min(float(gamma), least), 12)
            cuts["gamma"][name] = most
            cuts["beta"][name] = _mapped(density, partial(_smallest, most))
        self.notes.append("each cut of breadcrumbs is rounded to whole entries, in mergekit the number that is kept")
        return {key: _by_expert(values) for key, values in cuts.items()}

    def _arguments(self) -> dict[str, Any]:
        """Return the arguments of all other methods."""
        args: dict[str, Any] = dict(self.here.fixed)
        for key, text in self.here.reads.items():
            if not re.fullmatch(r"\w+", text) or text in ("weights", "normalize"):
                continue
            path = next(iter(self.experts.values())) if self.theirs == "passthrough" else None
            if (value := self._value(key, path=path)) is not None:
                args[text] = _mapped(value, int if text == "iterations" else float)
        if "normalize" in self.here.reads.values():
            key = next(key for key, text in self.here.reads.items() if text == "normalize")
            args |= {} if self._flag(key, True) else {"normalize": False}
        if self.theirs in ("nuslerp", "multislerp"):
            args["on"] = "task_vectors" if self.base else "weights"
        if self.theirs == "nuslerp":
            rows, flat = self._flag("nuslerp_row_wise", False), self._flag("nuslerp_flatten", True)
            args["vectors"] = "tensor" if flat else "columns" if rows else "rows"
        if self.theirs == "model_stock":
            if self._flag("filter_wise", False):
                args["vectors"] = "rows"
            self.notes.append(
                "where task vectors point apart (a negative mean cosine), the base's weights stay as they are"
            )
        if self.theirs == "multislerp" and self._constant("eps", 1e-8) != 1e-8:
            self.faults.append("eps of multislerp")
        return args

    def _tokens(self, recipe: dict[str, Any]) -> None:
        """Carry over whose tokenizer and chat template the result has."""
        tokenizer = self.document.tokenizer
        source = tokenizer.source if tokenizer is not None else self.document.tokenizer_source
        if source == "base" and self.base and self.base not in self.experts.values():
            recipe.setdefault("base", self.base)  # nothing else is read of it where only models are averaged
        names = {path: name for name, path in self.experts.items()}
        names |= {str(recipe["base"]): "base"} if "base" in recipe else {}

        def named(model: str) -> str:
            path = model.removeprefix("model:")
            if model not in ("base", "union") and path not in names:
                self.faults.append(f"the tokenizer of '{path}', which is not among the models")
            return names.get(path, model)

        if source is not None:
            # Rows that no token uses go, as in mergekit; `rows_wanted` keeps them by default.
            rows = (tokenizer.pad_to_multiple_of if tokenizer is not None else None) or 1
            recipe["tokenizer"] = {"source": named(source), "pad_to_multiple_of": rows}
            if rows > 1:
                self.notes.append(
                    "rows that no token uses are merged where models have them; in mergekit they are means"
                )
            tokens = (tokenizer.tokens if tokenizer is not None else None) or {}
            if tokens:
                recipe["tokenizer"]["tokens"] = {token: _token(record, named) for token, record in tokens.items()}
        template = self.document.chat_template
        if template == "auto" or template in NAMED or (template and ("{" in template or template.endswith(".jinja"))):
            recipe["chat_template"] = template
        elif template:
            self.faults.append(f"chat_template: {template}, which is not known here (give its Jinja text or file)")


def _token(token: _Token, named: Callable[[str], str]) -> dict[str, Any]:
    source = token.source
    if isinstance(source, Mapping) and "kind" in source:
        source = {**source, "model": named(_reference(source["model"]))} if "model" in source else source
    elif source is not None:
        source = named(_reference(source))
    return ({"source": source} if source is not None else {}) | ({"force": True} if token.force else {}) | {"new": True}


def _conditions(setting: Any) -> list[Any]:
    """Return the filters of a parameter with their values; none where it is a number or numbers over depth."""
    listed = setting if isinstance(setting, list) else [setting]
    if not any(isinstance(part, Mapping) for part in listed):
        return []
    return [part if isinstance(part, Mapping) else {"value": part} for part in listed]


def _reaches_the_head(setting: Any) -> bool:
    """Whether what stands behind the blocks may take its value from a list over depth."""
    if isinstance(setting, Mapping) and "value" not in setting:  # by expert
        return any(map(_reaches_the_head, setting.values()))
    if conditions := _conditions(setting):
        return any(
            _names_a_tail(condition.get("filter")) and over_depth(condition["value"]) for condition in conditions
        )
    return over_depth(setting)


def _names_a_tail(pattern: Any) -> bool:
    """Whether a filter, or none, is part of what a final norm or a head is called."""
    return pattern in (None, "*") or any(str(pattern) in name for name in _TAILS)


def _last_values(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with the last value of each list over depth."""

    def last(setting: Any) -> Any:
        if conditions := _conditions(setting):
            return [{**condition, "value": last(condition["value"])} for condition in conditions]
        return setting[-1] if isinstance(setting, list) else setting

    return {key: last(setting) for key, setting in scope.items()}


def _tensors_of(module: str, model_type: str) -> str:
    """Return the pattern of a module's tensors, where it stands over modules with all the rest; empty if not known."""
    visual = model_type.startswith("qwen")
    patterns = dict.fromkeys(("default", "text_decoder", "shared"), "*")
    apart = ("vision_tower", "vision_model", "multi_modal_projector", "encoder", "decoder")
    patterns |= {name: f"*{name}.*" for name in apart}
    patterns |= {"vision_tower": "*visual.*", "multi_modal_projector": "*visual.*merger*"} if visual else {}
    return patterns.get(module, f"{module}.*" if "." in module else "")


def _config(path: str) -> dict[str, Any]:
    """Return a model folder's config.json, empty where it is not here."""
    return read_json_if_whole(Path(path).expanduser() / "config.json")


def _counts(path: str) -> set[int]:
    """Return the numbers of blocks that a model folder's config.json says of its parts; none where it is not here."""

    def inside(config: Any) -> Iterator[int]:
        if isinstance(config, dict):
            yield from (config[key] for key in (*COUNTS, "depth") if isinstance(config.get(key), int))
            for part in config.values():
                yield from inside(part)

    return set(inside(_config(path)))


# What a router's rows are for each `gate_mode`.
_ROUTERS = {
    "hidden": "means of what the MLPs see of the prompts, in mergekit layers' inputs at the last token",
    "cheap_embed": "means over prompts less those over negative ones; mergekit counts each token of several prompts "
    "alike, and scales both sides to length 1 first",
    "random": "drawn by another generator",
}


def _less(share: float) -> float:
    return round(1 - share, 12)


def _smallest(gamma: float, density: float) -> float:
    return round(max(0.0, 1 - density - gamma), 12)


def _mapped(setting: Any, function: Callable[[float], float]) -> Any:
    """Return a value with every number of it changed."""
    if isinstance(setting, Mapping):
        return {**setting, "value": _mapped(setting["value"], function)}
    return [_mapped(part, function) for part in setting] if isinstance(setting, list) else function(setting)


def _numbers(setting: Any) -> list[Any]:
    if isinstance(setting, Mapping):
        return _numbers([value for key, value in setting.items() if key != "filter"])
    return [n for part in setting for n in _numbers(part)] if isinstance(setting, list | tuple) else [setting]


def _by_expert(values: dict[str, Any]) -> Any:
    """Return one value where all experts have the same."""
    listed = list(values.values())
    return listed[0] if all(value == listed[0] for value in listed) else values
