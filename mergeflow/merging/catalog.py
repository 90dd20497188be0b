"""The catalog: every method by name, found in the family files; and a configured method as a frozen record."""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from pydantic import ValidationError

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging import methods as families
from mergeflow.merging.foreign import METHODS, argument_hint
from mergeflow.merging.method import Args, Method
from mergeflow.schema import faults_of


@cache
def methods() -> dict[str, Method]:
    """Return every method by name, in alphabetical order.

    Example:
        >>> "ties" in methods()
        True
    """
    found: dict[str, Method] = {}
    for module in pkgutil.iter_modules(families.__path__):
        for value in vars(import_module(f"{families.__name__}.{module.name}")).values():
            if isinstance(value, Method):
                assert found.setdefault(value.name, value) is value, f"two methods named {value.name}"
    return dict(sorted(found.items()))


def get(name: str) -> Method:
    """Return one method.

    Raises:
        MergeflowError: There is none of this name; the message names the nearest.
    """
    if not isinstance(name, str) or name not in methods():
        if isinstance(name, str) and name in METHODS:
            raise MergeflowError(f"unknown method '{name}': mergekit's '{name}' is '{METHODS[name]}' here.")
        raise unknown_name("method", str(name), methods())
    return methods()[name]


@dataclass(frozen=True)
class MethodCall:
    """A method with all its arguments: frozen, hashable, replayable with `configure(call.name, call.args)`."""

    name: str
    typed: Args

    @property
    def args(self) -> dict[str, Any]:
        """All arguments with their defaults, as plain values."""
        return self.typed.model_dump(mode="json")

    @property
    def scale(self) -> float:
        """The factor of the direction."""
        return self.typed.scale

    @property
    def method(self) -> Method:
        """The method itself."""
        return get(self.name)

    def with_scale(self, scale: float) -> "MethodCall":
        """Return the same call with another scale."""
        return MethodCall(self.name, self.typed.model_copy(update={"scale": float(scale)}))

    def without_scale(self) -> "MethodCall":
        """Return the call with scale 1: equal for all calls that share a direction."""
        return self.with_scale(1.0)


def configure(name: str, args: Mapping[str, Any] | None = None) -> MethodCall:
    """Validate a method's arguments and return the frozen call.

    Args:
        name: A name of the catalog.
        args: Arguments by name; those not given take their defaults.

    Raises:
        MergeflowError: Unknown method or argument (with the nearest right one), or a value out of range; all at once.

    Example:
        >>> configure("ties", {"keep": 0.1}).args["scale"]
        1.0
    """
    kind = get(name).args
    if args is not None and not isinstance(args, Mapping):
        raise MergeflowError(f"method '{name}': arguments are a mapping of names to values, found {args!r:.60}.")
    given = dict(args or {})
    faults = [
        str(unknown_name(f"argument of {name}", str(key), kind.model_fields)).removesuffix(".")
        + argument_hint(str(key), kind.model_fields)
        for key in given
        if key not in kind.model_fields
    ]
    if len(faults) == len(given) == 1:
        raise MergeflowError(f"{faults[0]}.")
    try:
        typed = kind(**{key: value for key, value in given.items() if key in kind.model_fields})
    except ValidationError as error:
        faults += faults_of(error, kind)
    if faults:
        raise MergeflowError(f"method '{name}': {'; '.join(fault.removesuffix('.') for fault in faults)}.")
    return MethodCall(name, typed)
