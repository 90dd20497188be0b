"""Values that vary over a model: gradients over depth, filters by name, one per expert; for any numeric argument.

t: [0, 0.5, 1]                                 # over depth: 0 at the first block, 1 at the last, linear between
t: [{filter: self_attn, value: [0, 1]}, 0.5]   # the first filter that is part of a tensor's name decides
keep: {a: 0.5, b: [0.1, 0.9]}                  # by expert, for arguments that sparsify each task vector
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from mergeflow.errors import MergeflowError
from mergeflow.merging.architectures.blocks import block_of
from mergeflow.merging.method import Args
from mergeflow.schema import NUMERIC, lines_of

_KEYS = {"filter", "value"}


def varies(value: Any, numeric: bool = True) -> bool:
    """Whether a value of a numeric argument is written as one that varies."""
    return numeric and isinstance(value, list | tuple | Mapping)


def split(model: type[BaseModel], given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    fields = model.model_fields
    varied = {
        key: value for key, value in given.items() if key in fields and varies(value, fields[key].annotation in NUMERIC)
    }
    return {key: value for key, value in given.items() if key not in varied}, varied


def check(model: type[BaseModel], constant: Mapping[str, Any], varied: Mapping[str, Any]) -> list[str]:
    """Return the faults of arguments that vary: how they are written, and every number in them."""
    faults = []
    per_expert = getattr(model, "per_expert", ())
    for key, value in varied.items():
        try:
            numbers = list(leaves(value, key in per_expert))
        except MergeflowError as error:
            faults.append(f"{key}: {error}")
            continue
        faults += [line for leaf in numbers for line in _faults_of(model, {**constant, key: leaf}, (key,))]
    if varied and not faults:
        for values in together(model, varied):
            lines = _faults_of(model, {**constant, **values}, ())
            faults += [f"{' and '.join(values)}: {line}" for line in lines]
    return list(dict.fromkeys(faults))


def _faults_of(model: type[BaseModel], values: Mapping[str, Any], place: tuple[str, ...]) -> list[str]:
    """Name what is wrong with values at one place: an argument, or () for how arguments go together."""
    try:
        model(**values)
    except ValidationError as error:
        return [line for fault in error.errors() if fault["loc"] == place for line in lines_of(fault, model)]
    return []


def together(model: type[BaseModel], varied: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the values that arguments have at one place, for each expert and depth, where no tensor's name is needed.

    Example:
        >>> class Drop(Args): per_expert = ("drop",)
        >>> list(together(Drop, {"drop": {"a": 0.5, "b": [0, 1]}}))
        [{'drop': 0.5}, {'drop': 0}, {'drop': 1}]
    """
    listed = getattr(model, "per_expert", ())
    by_expert = {key for key, value in varied.items() if key in listed and _is_by_expert(value)}
    for expert in sorted({expert for key in by_expert for expert in varied[key]}) or [None]:
        parts = {key: value for key, value in varied.items() if key not in by_expert}
        parts |= {key: varied[key][expert] for key in by_expert if expert in varied[key]}
        lists = [part for part in parts.values() if isinstance(part, list | tuple)]
        if len(parts) == 1:
            yield from ({key: leaf} for key, part in parts.items() for leaf in leaves(part))
        elif not any(isinstance(entry, Mapping) for part in (*lists, parts.values()) for entry in part):
            depths = {place / (len(part) - 1) for part in lists if len(part) > 1 for place in range(len(part))}
            yield from ({key: at(part, "", depth) for key, part in parts.items()} for depth in sorted(depths or {0.0}))


def _is_by_expert(value: Any) -> bool:
    return isinstance(value, Mapping) and "value" not in value


def leaves(value: Any, by_expert: bool = False) -> Iterator[Any]:
    """Yield the numbers of a value that varies."""
    if isinstance(value, Mapping) and "value" in value and set(value) <= _KEYS:
        yield from leaves(value["value"])
    elif isinstance(value, Mapping):
        if not by_expert or not value:
            raise MergeflowError(
                f"expected a number, a list over depth, or filter and value, found {dict(value)!r:.60}"
            )
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, list | tuple):
        if not value:
            raise MergeflowError("an empty list has no value")
        for inner in value:
            if isinstance(inner, list | tuple):
                raise MergeflowError(f"expected numbers over depth, found a list in a list, {value!r:.60}")
            yield from leaves(inner)
    else:
        yield value


def over_depth(value: Any) -> bool:
    """Whether a value has a list over depth, in filters or for experts too.

    Example:
        >>> over_depth([0, 1]), over_depth([{"filter": "mlp", "value": [0, 1]}, 1]), over_depth([0.5])
        (True, True, False)
    """
    if isinstance(value, Mapping):
        return any(over_depth(inner) for key, inner in value.items() if key != "filter")
    if not isinstance(value, list | tuple):
        return False
    filters = [part for part in value if isinstance(part, Mapping)]
    return any(map(over_depth, filters)) if filters else len(value) > 1


def check_depth(values: Mapping[str, Any], shapes: Mapping[str, Any]) -> None:
    """Check that a model has blocks where values run over its depth: else every tensor had the last one."""
    listed = [name for name, value in values.items() if over_depth(value)]
    if listed and shapes and not any(map(block_of, shapes)):
        raise MergeflowError(
            f"{', '.join(listed)}: a list over depth needs blocks, and no tensor has a name such as layers.0.… or "
            f"blocks.0.… (the first is '{min(shapes)}'). Give one number, or filters by name."
        )


def idle_filters(values: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """Say of each filter that decides nothing why it does not: a name misspelt, or a value for all before it.

    Example:
        >>> idle_filters({"t": [{"filter": "mpl", "value": 0}, 1]}, ["layers.0.mlp.up_proj"])
        ["t: the filter 'mpl' is part of no tensor's name and decides nothing"]
    """
    lines = []
    for key, value in values.items():
        for part in value.values() if _is_by_expert(value) else (value,):
            entries = part if isinstance(part, list | tuple) else [part]
            patterns = [entry.get("filter") if isinstance(entry, Mapping) else None for entry in entries]
            if not any(isinstance(entry, Mapping) for entry in entries):
                continue
            first = {next((at for at, each in enumerate(patterns) if _fits(each, name)), None) for name in names}
            for place, pattern in enumerate(patterns):
                if place not in first and pattern not in (None, "*"):
                    read = any(_fits(pattern, name) for name in names)
                    why = "comes after others that decide first" if read else "is part of no tensor's name"
                    lines.append(f"{key}: the filter '{pattern}' {why} and decides nothing")
    return lines


def _fits(pattern: object, name: str) -> bool:
    return pattern in (None, "*") or str(pattern) in name


def at(value: Any, name: str, depth: float) -> float | None:
    """Return the number that a value is for a tensor, or None where no filter is part of its name.

    Args:
        value: A number; numbers over depth; a filter with its value, or a list of these and numbers for all the rest.
        depth: Where its block stands, 0 … 1.

    Example:
        >>> at([0, 0.5, 1], "layers.1.w", 0.25), at([{"filter": "mlp", "value": 3}, 1], "layers.0.attn.w", 0)
        (0.25, 1)
    """
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple):
        constant: float = value
        return constant
    if not any(isinstance(part, Mapping) for part in value):
        return gradient(value, depth)
    for part in value:
        pattern = part.get("filter") if isinstance(part, Mapping) else None
        if _fits(pattern, name):
            return at(part["value"] if isinstance(part, Mapping) else part, name, depth)
    return None


def gradient(values: Sequence[float], depth: float) -> float:
    """Return the value at a depth of 0 … 1 between evenly spaced ones.

    Example:
        >>> gradient([0, 10, 40], 0.75)
        25.0
    """
    place = depth * (len(values) - 1)
    low = min(int(place), len(values) - 1)
    high = min(low + 1, len(values) - 1)
    return (1 - (place - low)) * values[low] + (place - low) * values[high]


def resolved(args: Args, name: str, depth: float, experts: Sequence[str]) -> Args:
    """Return a method's arguments for one tensor.

    Args:
        depth: Where its block stands, 0 … 1.
        experts: Names of the experts, in the order in which `each` of the result has arguments by expert.
    """
    fields = type(args).model_fields
    constants: dict[str, Any] = {}
    each: dict[str, tuple[float, ...]] = {}
    for key, value in args.varied.items():
        default = fields[key].default
        fallback = None if default is PydanticUndefined else default
        if _is_by_expert(value):
            of_experts = [at(value[expert], name, depth) if expert in value else None for expert in experts]
            each[key] = tuple(float(fallback or 0.0) if weight is None else weight for weight in of_experts)
            continue
        number = at(value, name, depth)
        kind = int if fields[key].annotation in (int, int | None) else float
        constants[key] = fallback if number is None else kind(round(number) if kind is int else number)
    if len(args.varied) > 1:
        for index in range(len(experts) if each else 1):
            of_tensor = {**args.model_dump(), **constants, **{key: numbers[index] for key, numbers in each.items()}}
            if lines := _faults_of(type(args), of_tensor, ()):
                raise MergeflowError(f"tensor '{name}': {'; '.join(lines)}.")
    return args.with_values(constants, each)
