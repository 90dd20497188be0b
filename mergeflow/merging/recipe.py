"""Recipes: what a merge is made of, validated whole before any weight is read, frozen and replayable."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from mergeflow.checkpoints.pickles import PICKLES
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging.catalog import MethodCall, configure, explain, get
from mergeflow.merging.frozen import frozen, thawed
from mergeflow.yaml_text import parse_yaml, read_yaml

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LIFTED = ("matrices", "split_qkv")


def parse_size(value: Any) -> Any:
    """Turn a text such as 5GB into bytes; numbers pass.

    Example:
        >>> parse_size("5GB"), parse_size("64 MiB")
        (5000000000, 67108864)
    """
    if isinstance(value, bool):
        raise ValueError("expected a size such as 5GB or 512MiB")
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMG]i?B)\s*", value, re.IGNORECASE)
    if not found:
        raise ValueError("expected a size such as 5GB or 512MiB")
    return int(float(found.group(1)) * _UNITS[found.group(2).upper()])


def _path(value: Any) -> Any:
    """Return a path as text; what cannot be one is refused."""
    if not isinstance(value, str | Path):
        raise ValueError(f"a path is text, found {_shown(value)}")
    if not str(value) or "\0" in str(value):
        raise ValueError("a path must hold some character, and no NUL")
    return str(value)


def _shown(value: Any) -> str:
    return "nothing (null)" if value is None else f"{value!r:.60}"


def _stem(path: Path) -> str:
    return path.stem if path.suffix in (*PICKLES, ".safetensors") else path.name


def _named_paths(value: Any) -> Any:
    """Name the paths of a list by their stems; where stems are equal, by their folders too."""
    if isinstance(value, Mapping):
        return tuple((str(name), _path(path)) for name, path in value.items())
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"expected a list of paths, or a mapping of names to paths, found {_shown(value)}")
    if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):  # a recipe's own pairs
        return tuple((str(name), _path(path)) for name, path in value)
    paths = [Path(_path(item)) for item in value]
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join((*path.parts[-depth:-1], _stem(path))) for path in paths]
        if len(set(names)) == len(names):
            return tuple((name, str(item)) for name, item in zip(names, value, strict=True))
    if not paths:
        return ()
    raise ValueError("the same path stands twice in the list; give names (name: path) to merge it twice")


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping of names to values, found {_shown(value)}")
    return frozen(value)


Location = Annotated[str, BeforeValidator(_path)]
Paths = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_named_paths), PlainSerializer(dict)]
Arguments = Annotated[tuple[tuple[str, Any], ...], BeforeValidator(_mapping), PlainSerializer(thawed)]
Statistics = Annotated[tuple[tuple[str, Paths], ...], BeforeValidator(_mapping), PlainSerializer(dict)]
Weights = tuple[float, ...] | Annotated[tuple[tuple[str, float], ...], BeforeValidator(_mapping), PlainSerializer(dict)]


class Recipe(BaseModel):
    """A merge, as a frozen record.

    Attributes:
        method: A name of the catalog.
        args: Its arguments; those missing take their defaults.
        base: Path of the base.
        experts: Paths of the experts, named.
        task_vectors: Paths of task vectors that stand where experts stand, named.
        weights: One per expert, in order or by name; all 1 by default.
        matrices: Which matrices the spectral methods treat (moved into `args`).
        split_qkv: Whether a fused q/k/v weight is three matrices (moved into `args`).
        data: Statistics of data that a method needs: kind → expert → path.
        dtype: Type of the result; the base's by default.
        device: Where arithmetic happens: cpu, cuda, cuda:1 …
        out: A `.safetensors` file or a folder to make.
        shard_size: Largest shard of a folder, in bytes or as 5GB.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: str
    args: Arguments = ()
    base: Location
    experts: Paths = ()
    task_vectors: Paths = ()
    weights: Weights | None = None
    data: Statistics = ()
    dtype: Literal["float64", "float32", "float16", "bfloat16"] | None = None
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    out: Location | None = None
    shard_size: Annotated[int, Field(gt=0), BeforeValidator(parse_size)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _lift(cls, values: Any) -> Any:
        """Move `matrices` and `split_qkv` into the arguments, where the method has them."""
        if not isinstance(values, dict):
            return values
        values = dict(values)
        args = {} if values.get("args") is None else values["args"]
        if not isinstance(args, Mapping):
            return values
        args = dict(args)
        for key in LIFTED:
            if key not in values:
                continue
            if key in args:
                raise ValueError(f"'{key}' stands both in the recipe and in its args; keep one")
            if isinstance(values.get("method"), str) and key not in get(values["method"]).args.model_fields:
                raise ValueError(f"method '{values['method']}' treats no matrices apart: remove '{key}'")
            args[key] = values.pop(key)
        return {**values, "args": args}

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        call = self.call()
        object.__setattr__(self, "args", frozen(call.args))
        names = [name for name, _ in (*self.experts, *self.task_vectors)]
        if not names:
            raise ValueError("no experts: give `experts` or `task_vectors`")
        if len(set(names)) != len(names):
            raise ValueError(f"two experts share a name: {sorted(name for name in names if names.count(name) > 1)}")
        if "base" in names:
            raise ValueError("an expert cannot be named 'base'; give it another name (name: path)")
        from mergeflow.merging.direction import check_inputs, weights_by_name

        given = {kind: dict(paths) for kind, paths in self.data}
        check_inputs(call, dict.fromkeys(names), given)
        weights_by_name(self.weights_given(), dict.fromkeys(names), call)
        return self

    def call(self) -> MethodCall:
        """Return the configured method."""
        return configure(self.method, thawed(self.args))

    def weights_given(self) -> Mapping[str, float] | Sequence[float] | None:
        """Return the weights as a list or a mapping."""
        if self.weights and isinstance(self.weights[0], tuple):
            return dict(self.weights)
        return self.weights  # type: ignore[return-value]

    def record(self) -> str:
        """Return the recipe as JSON, complete with every default, to be stored with its result."""
        return json.dumps(self.model_dump(mode="json", exclude_none=True), ensure_ascii=False, sort_keys=True)


AnyRecipe = Recipe | Mapping[str, Any] | str | Path


def as_recipe(recipe: AnyRecipe) -> Recipe:
    """Return a recipe that is given as a record, a mapping, or the path of a file.

    Raises:
        MergeflowError: As `load_recipe`.
    """
    if isinstance(recipe, Recipe):
        return recipe
    return load_recipe(recipe) if isinstance(recipe, str | Path) else make_recipe(recipe)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and validate a recipe.

    Args:
        path: A YAML or JSON file. Paths inside it are relative to the current folder, like any path on a command line.
        overrides: Changes such as "args.scale=0.5" or "out=merged.safetensors"; values are read as YAML.

    Raises:
        MergeflowError: The file is missing, is no mapping, has a key twice, or has unknown keys or values out of range
            (all at once).
    """
    place = Path(path)
    values = read_yaml(place, "recipe")
    if not isinstance(values, dict):
        raise MergeflowError(
            f"recipe '{place}' holds a {type(values).__name__}, expected keys such as method and base."
        )
    for change in overrides:
        _override(values, change)
    return make_recipe(values, str(place))


def make_recipe(values: Mapping[str, Any], origin: str = "recipe") -> Recipe:
    """Validate a mapping as a recipe.

    Raises:
        MergeflowError: As `load_recipe`.
    """
    if not isinstance(values, Mapping):
        raise MergeflowError(
            f"{origin}: expected a mapping with keys such as method and base, found {_shown(values)}. "
            "`load_recipe` reads a file."
        )
    known = (*Recipe.model_fields, *LIFTED)
    for key in values:
        if key not in known:
            raise unknown_name("key of a recipe", str(key), known)
    try:
        return Recipe(**dict(values))
    except ValidationError as error:
        raise MergeflowError(f"{origin}: {explain(error)}") from None
    except RecursionError:
        raise MergeflowError(f"{origin}: a value holds itself, or lists are nested too deeply.") from None


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
