"""Fields of a recipe: the form of paths, sizes, weights, arguments and adapters, and their faults."""

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, TypeAdapter

from mergeflow.checkpoints.formats import PICKLES
from mergeflow.merging.catalog import Code
from mergeflow.merging.values import leaves, varies
from mergeflow.schema import Frozen, frozen, thawed

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(value: Any) -> Any:
    """Turn a text such as 5GB into bytes; numbers pass.

    Example:
        >>> parse_size("5GB"), parse_size("64 MiB")
        (5000000000, 67108864)
    """
    if isinstance(value, bool):
        raise ValueError(f"expected a size such as 5GB or 512MiB, found {shown(value)}")
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMG]i?B)\s*", value, re.IGNORECASE)
    if not match:
        raise ValueError(f"expected a size such as 5GB or 512MiB, found {shown(value)}")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def _path(value: Any) -> Any:
    if not isinstance(value, str | Path):
        raise ValueError(f"a path is text, found {shown(value)}")
    if not str(value).strip() or "\0" in str(value):
        raise ValueError("a path must hold some character, and no NUL")
    return str(value)


def shown(value: Any) -> str:
    return "nothing (null)" if value is None else f"{value!r:.60}"


def _stem(path: Path) -> str:
    name = path.name.removeprefix("step:")
    return Path(name).stem if path.suffix in (*PICKLES, ".safetensors") else name


def _named_paths(value: Any) -> Any:
    """Name the paths of a list by their stems; where stems are equal, by their folders too."""
    if isinstance(value, Mapping):
        return tuple((str(name), _path(path)) for name, path in value.items())
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValueError(f"expected a list of paths, or a mapping of names to paths, found {shown(value)}")
    if value and all(isinstance(item, tuple) and len(item) == 2 for item in value):  # a recipe's own pairs
        return tuple((str(name), _path(path)) for name, path in value)
    paths = [Path(_path(item)) for item in value]
    for depth in range(1, max((len(path.parts) for path in paths), default=0) + 1):
        names = ["/".join((*path.parts[-depth:-1], _stem(path))) for path in paths]
        if len(set(names)) == len(names):
            return tuple((name, str(item)) for name, item in zip(names, value, strict=True))
    if not paths:
        return ()
    raise ValueError("the same path is twice in the list; give names (name: path) to merge it twice")


def _mapping(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected a mapping of names to values, found {shown(value)}")
    return frozen(value)


def _statistics(value: Any) -> Any:
    for kind, paths in _mapping(value):
        try:
            _named_paths(paths)
        except ValueError as error:
            raise ValueError(f"of '{kind}': {error}") from None
    return frozen(value)


def _weights(value: Any) -> Any:
    if value is None or value == {}:
        return None
    if isinstance(value, Mapping):
        return tuple((str(name), _number(weight, f"of '{name}'")) for name, weight in sorted(value.items(), key=str))
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"expected numbers, one per expert, in a list or by name, found {shown(value)}")
    return tuple(_number(weight, f"{place + 1} of the list") for place, weight in enumerate(value))


def _number(value: Any, place: str) -> Any:
    if varies(value):
        for leaf in leaves(value):
            _number(leaf, place)
        return frozen(value)
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"weight {place}: expected a finite number, found {shown(value)}")
    return number


Patterns = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
Location = Annotated[str, BeforeValidator(_path)]
Paths = Annotated[tuple[tuple[str, str], ...], BeforeValidator(_named_paths), PlainSerializer(dict)]
Arguments = Annotated[tuple[tuple[str, Any], ...], BeforeValidator(_mapping), PlainSerializer(thawed)]
Statistics = Annotated[tuple[tuple[str, Paths], ...], BeforeValidator(_statistics), PlainSerializer(dict)]
Weights = Annotated[
    tuple[float, ...] | tuple[tuple[str, float], ...] | None,
    PlainValidator(_weights),
    PlainSerializer(lambda value: thawed(value) if value else value),
]


_CODES = TypeAdapter(dict[str, Code])


def _codes(value: Any) -> Any:
    if value is None or isinstance(value, tuple):
        return value or None
    return tuple(sorted(_CODES.validate_python(value).items()))


Codes = Annotated[
    tuple[tuple[str, Code], ...] | None,
    BeforeValidator(_codes),
    PlainSerializer(lambda codes: codes and {name: code.model_dump() for name, code in codes}),
]


Rank = Annotated[int, Field(ge=1, le=100_000, strict=True)]


def _pairs(value: Any) -> Any:
    return tuple((str(pattern), rank) for pattern, rank in value.items()) if isinstance(value, Mapping) else value


class AdapterOptions(Frozen):
    """The adapter that a merge makes of its difference from the base.

    Attributes:
        rank: The largest rank of a matrix.
        ranks: Other largest ranks, by patterns of the base's names; the first that fits counts.
        error: With it each matrix gets the smallest rank whose relative Frobenius error is at most this one.
        embeddings: Whether embeddings and heads that changed are stored `whole` or as factors (`lora`).
    """

    rank: Rank
    ranks: Annotated[tuple[tuple[str, Rank], ...], BeforeValidator(_pairs), PlainSerializer(dict)] = ()
    error: float = Field(0.0, ge=0, lt=1)
    embeddings: Literal["whole", "lora"] = "whole"

    def rank_of(self, name: str) -> int:
        return next((rank for pattern, rank in self.ranks if fnmatchcase(name, pattern)), self.rank)


def _read(value: Any) -> Any:
    return {"rank": value} if isinstance(value, int) and not isinstance(value, bool) else value


Adapter = Annotated[AdapterOptions, BeforeValidator(_read)]
