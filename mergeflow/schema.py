"""Records that people write: one frozen base model, and one form of message for all faults in them."""

import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from mergeflow.errors import MergeflowError, unknown_name

_LARGEST_SEED = 2**63 - 1
Seed = Annotated[int, Field(ge=0, le=_LARGEST_SEED, strict=True)]
"""A seed that every generator takes; texts and 1.0 are none."""


def check_seed(seed: object) -> None:
    if type(seed) is not int or not 0 <= seed <= _LARGEST_SEED:
        raise MergeflowError(f"seed must be a whole number from 0 to {_LARGEST_SEED}, found {seed!r:.60}.")


NUMERIC = (float, int, float | None, int | None)


class Frozen(BaseModel):
    """A frozen record: unknown keys, NaN and infinity are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _no_truth_value_is_a_number(cls, values: Any) -> Any:
        """Make a text of `true` and of bytes where a number belongs, so that they are refused: pydantic takes them."""
        if not isinstance(values, dict):
            return values
        kinds = {key: cls.model_fields[key].annotation for key in values if key in cls.model_fields}
        return values | {key: _without_truth(kind, values[key]) for key, kind in kinds.items()}


def _without_truth(kind: Any, value: Any) -> Any:
    """Return a value with a text of each truth value that stands for a number, in lists of numbers too."""
    kinds = _plain(kind)
    if isinstance(value, bool | bytes):
        return str(value).lower() if {int, float} & {*kinds} and not {bool, str, Any} & {*kinds} else value
    lists = [get_args(each)[0] for each in kinds if get_origin(each) in (tuple, list) and get_args(each)]
    return [_without_truth(lists[0], each) for each in value] if isinstance(value, list) and lists else value


Record = TypeVar("Record", bound=BaseModel)


def validated(model: type[Record], values: Any, origin: str) -> Record:
    """Return the values as a record.

    Example:
        >>> class Point(Frozen):
        ...     across: float
        >>> validated(Point, {"acros": 1.0}, "point.yaml")
        Traceback (most recent call last):
        mergeflow.errors.MergeflowError: point.yaml has 2 faults:
          - across is missing
          - unknown key 'acros': did you mean 'across'? Known: across
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise refusal(origin, faults_of(error, model)) from None


def refusal(origin: str, faults: Iterable[str]) -> MergeflowError:
    lines = [fault.removesuffix(".") for fault in faults]
    if len(lines) == 1:
        return MergeflowError(f"{origin}: {lines[0]}.")
    return MergeflowError("\n  - ".join([f"{origin} has {len(lines)} faults:", *lines]))


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """Return the faults of a validation error, a line each."""
    return [line for fault in error.errors() for line in lines_of(fault, model)]


def lines_of(fault: Any, model: type[BaseModel]) -> list[str]:
    """Describe one fault: where, what was expected, what was found."""
    *above, last = fault["loc"] or [""]
    place = ".".join(map(str, fault["loc"]))
    if fault["type"] == "extra_forbidden":
        where = f" of {'.'.join(map(str, above))}" if above else ""
        return [str(unknown_name(f"key{where}", str(last), _keys_at(model, above))).removesuffix(".")]
    if fault["type"] == "missing":
        return [f"{place} is missing"]
    message = re.sub(r"^[A-Z]\w+ should", "must", fault["msg"].removeprefix("Value error, "))
    if fault["type"] in _WORDS:
        bounds = {key: f"{x:g}" if isinstance(x, float) else x for key, x in fault.get("ctx", {}).items()}
        message = _WORDS[fault["type"]].format(**bounds)
    # Messages of our own say themselves what was found.
    value = "" if not place or fault["type"] == "value_error" else f", found {fault['input']!r:.80}"
    return [f"{place}: " * bool(place) + line.removesuffix(".") + value for line in message.splitlines()]


_WHOLE, _NUMBER = "must be a whole number", "must be a number"
_WORDS = {
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), _WHOLE),
    **dict.fromkeys(("float_parsing", "float_type"), _NUMBER),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    "string_type": "must be a text",
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "mapping_type", "model_type"), "must be keys with values"),
    "too_short": "must have {min_length} or more items",
    "too_long": "must have {max_length} or fewer items",
}
"""What pydantic finds most often, in words for people who write YAML."""


def _keys_at(model: type[BaseModel], place: Iterable[Any]) -> list[str]:
    """Return the keys that may stand at a place of a record; none where that is not a record."""
    kinds: list[Any] = [model]
    for part in place:
        kinds = [inner for kind in kinds for inner in _inside(kind, part)]
    return [key for kind in kinds if _is_record(kind) for key in kind.model_fields]


def _inside(kind: Any, part: Any) -> list[Any]:
    """Return the types that may stand under a key or index of a type."""
    if _is_record(kind):
        return _plain(kind.model_fields[part].annotation) if part in kind.model_fields else []
    inner = get_args(kind)
    return _plain(inner[-1] if issubclass(get_origin(kind) or object, Mapping) else inner[0]) if inner else []


def _plain(kind: Any) -> list[Any]:
    """Return a type without its annotations, a union as its members."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [plain for member in get_args(kind) for plain in _plain(member)]
    return [kind]


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def frozen(value: Any) -> Any:
    """Return the value with every mapping as pairs in order of name and every list as a tuple.

    Example:
        >>> frozen({"keep": 0.2, "matrices": ["a", "b"]})
        (('keep', 0.2), ('matrices', ('a', 'b')))
    """
    if isinstance(value, Mapping):
        named = {str(key): frozen(item) for key, item in value.items()}
        return tuple((key, named[key]) for key in sorted(named))
    return tuple(frozen(item) for item in value) if isinstance(value, list | tuple) else value


def thawed(value: Any) -> Any:
    """Return pairs of a name and a value as the mapping they were frozen from, inside of tuples too."""
    if not isinstance(value, tuple):
        return value
    if all(isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) for item in value):
        return {key: thawed(item) for key, item in value}
    return tuple(thawed(item) for item in value)
