"""Recipes: descriptions of merges, validated whole before any weight is read, frozen and replayable."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator, model_validator

from mergeflow.checkpoints.folders import common_base
from mergeflow.checkpoints.formats import expanded, fixed_id
from mergeflow.errors import MergeflowError, together, unknown_name
from mergeflow.merging.catalog import (
    MethodCall,
    check_code,
    check_inputs,
    check_known,
    code_of,
    configure,
    is_configuration,
    methods,
    weights_by_name,
)
from mergeflow.merging.files.fields import (
    Adapter,
    Arguments,
    Codes,
    Location,
    Paths,
    Patterns,
    Statistics,
    Weights,
    parse_size,
    shown,
)
from mergeflow.merging.files.steps import (
    ASSEMBLED,
    Mixture,
    Slices,
    Steps,
    check_steps,
    lifted,
    parse_steps,
    step_named,
)
from mergeflow.merging.values import varies
from mergeflow.merging.vocabulary.companions import TokenizerChoice, read_template, tokenizer_choice
from mergeflow.schema import Frozen, faults_of, frozen, refusal, thawed
from mergeflow.yaml_text import parse_yaml, read_yaml

LIFTED = ("matrices", "split_qkv")
TOKENIZER_SOURCE = "tokenizer_source"  # short for `tokenizer: {source: …}`


def with_tokenizer(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Put the short form `tokenizer_source` of a recipe or sweep where the long one stands; null is not given."""
    rest = {key: value for key, value in values.items() if key != TOKENIZER_SOURCE}
    source = values.get(TOKENIZER_SOURCE)
    if source is not None and rest.get("tokenizer") is not None:
        raise ValueError(f"'{TOKENIZER_SOURCE}' and 'tokenizer' are both in the {kind}; keep one")
    return rest if source is None else {**rest, "tokenizer": source}


class Recipe(Frozen):
    """A merge, as a frozen record; docs/recipes.md explains its fields.

    `matrices` and `split_qkv` move into `args`. Of methods from outside the package `code` says where they are declared
    and the digest of their source: a recipe that records it is refused where the code is another.
    """

    method: str
    args: Arguments = ()
    base: Location | None = None
    experts: Paths = ()
    task_vectors: Paths = ()
    weights: Weights = None
    data: Statistics = ()
    ignore: Patterns | None = None
    only: Patterns | None = None
    missing: Literal["refuse", "base"] | None = None
    align: Literal["weight_matching"] | None = None
    tokenizer: Annotated[TokenizerChoice | None, BeforeValidator(tokenizer_choice)] = None
    chat_template: str | None = None
    allow: Patterns | None = None
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None
    device: str = Field("cpu", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    out: Location | None = None
    shard_size: Annotated[int, Field(gt=0), BeforeValidator(parse_size)] | None = None
    adapter: Adapter | None = None
    steps: Steps = None
    code: Codes = None
    _call: MethodCall = PrivateAttr()
    _weights: dict[str, float] = PrivateAttr()
    _varied_weights: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _lift(cls, values: Any) -> Any:
        """Move `matrices` and `split_qkv` into the arguments, where the method has them, and `slices` into a step."""
        if not isinstance(values, dict):
            return values
        values = with_tokenizer(lifted(values), "recipe")
        args = {} if values.get("args") is None else values["args"]
        if not isinstance(args, Mapping):
            return values
        args = dict(args)
        for key in LIFTED:
            if key not in values:
                continue
            if key in args:
                raise ValueError(f"'{key}' is both in the recipe and in its args; keep one")
            method = values.get("method")
            declared = methods().get(method) if isinstance(method, str) else None
            if declared is not None and key not in declared.args.model_fields:
                raise ValueError(f"method '{method}' treats no matrices apart: remove '{key}'")
            args[key] = values.pop(key)
        return {**values, "args": args}

    @field_validator("only")
    @classmethod
    def _names_some(cls, only: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if only == ():
            raise ValueError("an empty list merges no tensor: give patterns of names, or leave `only` out to merge all")
        return only

    @field_validator("steps", mode="plain")
    @classmethod
    def _parse_steps(cls, value: Any) -> Any:
        return parse_steps(value, cls, partial(make_recipe, step=True))

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        names = [name for name, _ in (*self.experts, *self.task_vectors)]
        together(self._complete_arguments, lambda: _check_names(names))
        given = {kind: dict(paths) for kind, paths in self.data}
        together(
            lambda: check_inputs(self._call, dict.fromkeys(names), given),
            lambda: self._weigh(names),
            self._check_base,
        )
        return self

    def _complete_arguments(self) -> None:
        recorded = dict(self.code or ())
        check_known(self.method, recorded)
        self._call = configure(self.method, thawed(self.args))
        check_code(recorded, self._call)
        object.__setattr__(self, "args", frozen(self._call.args))
        object.__setattr__(self, "code", tuple(sorted(code_of(self._call).items())) or None)

    def _check_base(self) -> None:
        if self.base is None:
            object.__setattr__(self, "base", common_base(dict(self.experts)))
        call = self._call
        scale_varies = "scale" in call.arguments.varied and call.with_scale(0.0).arguments.needs_base
        if self.base is None and (call.arguments.needs_base or scale_varies):
            scaled = " at this scale" if not call.with_scale(1.0).arguments.needs_base else ""
            raise MergeflowError(f"base: is missing, and the result of '{self.method}'{scaled} depends on it")
        if self.base is None and self.task_vectors:
            raise MergeflowError("base: is missing, and task vectors are differences from it")

    def _weigh(self, names: Sequence[str]) -> None:
        given: Mapping[str, Any] | Sequence[Any] | None = thawed(self.weights) if self.weights else None
        pairs = given if isinstance(given, Mapping) else dict(zip(names, given or (), strict=False))
        self._varied_weights = {name: weight for name, weight in pairs.items() if varies(weight)}
        if self._varied_weights and self._call.method.weights == "none":
            raise MergeflowError(f"method '{self.method}' takes no weights per expert: remove `weights`")
        constant = dict.fromkeys(self._varied_weights, 1.0)
        if isinstance(given, Mapping):
            given = {**given, **constant}
        elif given is not None:
            given = [1.0 if varies(weight) else weight for weight in given]
        self._weights = weights_by_name(given, dict.fromkeys(names), self._call)

    def paths(self) -> Iterator[str]:
        """Yield the paths that it reads, without those that its steps read."""
        yield from (path for path in (self.base,) if path)
        for paths in (self.experts, self.task_vectors, *(paths for _, paths in self.data)):
            yield from (path for _, path in paths)

    def call(self) -> MethodCall:
        return self._call

    def expert_weights(self) -> Mapping[str, float]:
        return self._weights

    @property
    def tokenizer_source(self) -> str | None:
        """The model whose tokens the result has; None where nothing is aligned."""
        return self.tokenizer.source if self.tokenizer is not None else None

    def varied_weights(self) -> Mapping[str, Any]:
        """Return the weights that vary over the model, by expert."""
        return self._varied_weights

    def record(self) -> str:
        """Return the recipe as JSON, with every default and its order of experts, to be stored with its result."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), ensure_ascii=False)


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise MergeflowError("no experts: give `experts` or `task_vectors`")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise MergeflowError(f"two experts share a name: {twice}")
    if "base" in names:
        raise MergeflowError("an expert cannot be named 'base'; give it another name (name: path)")


AnyRecipe = Recipe | Mapping[str, Any] | str | Path


def as_recipe(recipe: AnyRecipe) -> Recipe:
    """Return a recipe that is given as a record, a mapping, or the path of a file."""
    if isinstance(recipe, Recipe):
        return recipe
    return load_recipe(recipe) if isinstance(recipe, str | Path) else make_recipe(recipe)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        path: A YAML or JSON file. Paths inside it are relative to the current folder, like any path on a command line.
        overrides: Changes such as "args.scale=0.5" or "out=merged.safetensors"; values are read as YAML.
    """
    place = expanded(path)
    try:
        values = read_yaml(place, "recipe")
    except MergeflowError as error:
        if "several documents" in str(error):
            raise MergeflowError(f"{error} `mergeflow convert` makes one recipe of mergekit's documents.") from None
        raise
    if not isinstance(values, dict):
        raise MergeflowError(f"recipe '{place}' holds a {type(values).__name__}, expected keys such as method, base.")
    for change in overrides:
        _override(values, change)
    return make_recipe(values, str(place))


def make_recipe(values: Mapping[str, Any], origin: str = "recipe", *, step: bool = False) -> Recipe:
    if not isinstance(values, Mapping):
        raise MergeflowError(
            f"{origin}: expected a mapping with keys such as method and base, found {shown(values)}. "
            "`load_recipe` reads a file."
        )
    if is_configuration(values):
        raise MergeflowError(
            f"{origin}: this is a configuration of mergekit, not a recipe. `mergeflow convert CONFIGURATION --out "
            "recipe.yaml` writes the recipe; docs/from-mergekit.md says what each key is here."
        )
    keys = (*Recipe.model_fields, *LIFTED, TOKENIZER_SOURCE, *ASSEMBLED)
    strange = [str(key) for key in values if key not in keys]
    faults = [str(unknown_name("key of a recipe", key, keys)).removesuffix(".") for key in strange]
    try:
        recipe = Recipe(**{key: value for key, value in values.items() if key in keys})
        if not faults:
            if not step:
                check_steps(dict(recipe.steps or ()), recipe.paths())
            return recipe
    except ValidationError as error:
        faults += faults_of(error, Recipe)
        if all(fault["loc"] for fault in error.errors()):  # then the arguments were not looked at yet
            faults += _argument_faults(values)
    except MergeflowError as error:
        faults += str(error).splitlines()
    except RecursionError:
        raise MergeflowError(f"{origin}: a value holds itself, or lists are nested too deeply.") from None
    if step:  # a line for each, which the whole recipe's faults are listed with
        raise MergeflowError("\n".join(f"{origin}: {fault.removesuffix('.')}" for fault in faults))
    raise refusal(origin, faults)


def _argument_faults(values: Mapping[str, Any]) -> list[str]:
    method, args = values.get("method"), values.get("args") or {}
    if not isinstance(method, str) or not isinstance(args, Mapping):
        return []
    try:
        configure(method, {**args, **{key: values[key] for key in LIFTED if key in values}})
    except MergeflowError as error:
        return [str(error).removesuffix(".")]
    return []


def _override(values: dict[str, Any], change: str) -> None:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise MergeflowError(f"override '{change}' is not of the form key=value, such as args.scale=0.5.")
    value = parse_yaml(text, f"override '{change}'")
    *path, last = key.split(".")
    place = values
    for step in path:
        inner = {} if place.get(step) is None else place[step]
        if not isinstance(inner, dict):
            raise MergeflowError(f"override '{change}': '{step}' is a {type(inner).__name__}, not a mapping.")
        place[step] = inner
        place = inner
    place[last] = value


Resolve = Callable[[str], str]
"""Turns a reference into a local path; the project half supplies it.

One that may come to mean another file, such as models:/name@alias, is turned into a fixed one (models:/name/7) first.
"""


def local_path(path: str, resolve: Resolve | None) -> str:
    if step_named(path):
        raise MergeflowError(
            f"'{path}' is a step, whose result is not a file: name it where a recipe names its inputs."
        )
    fixed = fixed_path(path, resolve)
    local = resolve(fixed) if resolve is not None else path
    if "://" in local or local.startswith("models:/"):
        raise MergeflowError(
            f"'{path}' is not a local path. References to the registry are resolved in a project folder only: "
            "run the command there, or give a file."
        )
    return local


def fixed_path(path: str, resolve: Resolve | None) -> str:
    """Fix a path for ever: a version of a registered model instead of its alias, a commit of a
    Hugging Face model instead of its newest state."""
    if step_named(path):
        return path
    if not path.startswith("models:/"):
        return fixed_id(path)
    if resolve is None or "@" not in path:
        return path
    fixed = resolve(path)
    return fixed if fixed.startswith("models:/") else path


def fix_references(recipe: Recipe, resolve: Resolve | None) -> Recipe:
    """Return the recipe as it is recorded: a replay reads the same models, whatever was promoted since."""
    fixed, template = with_paths(recipe, lambda path: fixed_path(path, resolve)), recipe.chat_template
    if template is not None and template not in ("base", "auto", *dict(recipe.experts), *dict(recipe.task_vectors)):
        template = read_template(template) or template  # the text instead of a file, which may change
    return fixed.model_copy(update={"chat_template": template})


def with_paths(recipe: Recipe, change: Callable[[str], str]) -> Recipe:
    """Return a recipe with every path of an input changed, those of its steps too."""

    def changed(paths: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        return tuple((name, change(path)) for name, path in paths)

    def place(part: Any) -> Any:
        return part and part.model_copy(update={"model": change(part.model)})

    def of_step(step: Recipe | Slices | Mixture) -> Recipe | Slices | Mixture:
        if isinstance(step, Slices):
            return Slices(map(place, step))
        if isinstance(step, Mixture):
            base, experts = change(step.base), tuple(map(place, step.experts))
            return step.model_copy(update={"base": base, "experts": experts, "shared": place(step.shared)})
        return with_paths(step, change)

    return recipe.model_copy(
        update={
            "steps": recipe.steps and tuple((name, of_step(step)) for name, step in recipe.steps),
            "base": recipe.base and change(recipe.base),
            "experts": changed(recipe.experts),
            "task_vectors": changed(recipe.task_vectors),
            "data": tuple((kind, changed(paths)) for kind, paths in recipe.data),
        }
    )


def recipe_text(recipe: Recipe) -> str:
    values = {key: value for key, value in recipe.model_dump(mode="json", exclude_none=True).items() if value != {}}
    if recipe.data:
        values["data"] = {kind: dict(paths) for kind, paths in recipe.data}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
