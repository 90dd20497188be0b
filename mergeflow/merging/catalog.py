"""The catalog: every method by name; and a configured method (or compressor) as a frozen record."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from mergeflow.checkpoints.header import FLOAT32
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging import methods as families
from mergeflow.merging.mergekit_names import OTHER_NAMES, argument_hint
from mergeflow.merging.method import Args, Method
from mergeflow.merging.values import check, split
from mergeflow.plugins import Shelf
from mergeflow.schema import faults_of

# The package of methods is imported here, before `mergeflow.merging` gives its name to the function below.
METHODS = Shelf("method", Method, families.__name__, "methods", "`@method(…)` of mergeflow.merging.method")


def methods() -> dict[str, Method]:
    """Return every method by name, in alphabetical order: ours, those of installed packages and of the project.

    Raises:
        MergeflowError: Two methods have one name, or a file of methods cannot be loaded or declares none.

    Example:
        >>> "ties" in methods()
        True
    """
    return METHODS.all()


def get(name: str) -> Method:
    """Return one method.

    Raises:
        MergeflowError: There is none of this name (the message names the nearest one), or as `methods`.
    """
    if isinstance(name, str) and name in OTHER_NAMES and name not in methods():
        raise MergeflowError(f"unknown method '{name}': mergekit's '{name}' is '{OTHER_NAMES[name]}' here.")
    return METHODS.get(name)


class Configurable(Protocol):
    """A method or a compressor, as far as a call needs to know it."""

    @property
    def name(self) -> str:
        """What a recipe or command calls it."""
        ...


M = TypeVar("M", bound=Configurable)


@dataclass(frozen=True)
class Call(Generic[M]):
    """A method or compressor with all its arguments: frozen, hashable, replayable from its name and `args`.

    Attributes:
        method: What is called with (stack, arguments).
        arguments: All its arguments.
    """

    method: M
    arguments: Any

    @property
    def name(self) -> str:
        """What the method or compressor is called."""
        return self.method.name

    @property
    def args(self) -> dict[str, Any]:
        """All arguments with their defaults, as plain values."""
        found: dict[str, Any] = self.arguments.model_dump(mode="json")
        return {**found, **getattr(self.arguments, "varied", {})}


@dataclass(frozen=True)
class MethodCall(Call[Method]):
    """A method with all its arguments; `configure(call.name, call.args)` makes the same call."""

    arguments: Args

    @property
    def scale(self) -> float:
        """The factor of the direction."""
        return self.arguments.scale

    def with_scale(self, scale: float) -> "MethodCall":
        """Return the same call with another scale."""
        return MethodCall(self.method, self.arguments.model_copy(update={"scale": float(scale)}))

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
    found = get(name)
    call = MethodCall(found, arguments_of("method", name, found.args, args))
    if "keep" in call.arguments.varied:
        # One threshold over the whole model cannot have a share of its own in each tensor.
        passes = {one.name.partition(".")[0] for one in found.passes(call.arguments, FLOAT32)}
        if passes & {"threshold", "pcb"}:
            way = ": give one number, or trim: tensor" if "trim" in found.args.model_fields else ": give one number"
            raise MergeflowError(f"method '{name}': `keep` is a share of the whole model and cannot vary{way}.")
    return call


A = TypeVar("A", bound=BaseModel)


def arguments_of(kind: str, name: str, model: type[A], args: Mapping[str, Any] | None) -> A:
    """Return the arguments of a method or compressor, validated.

    Args:
        kind: "method" or "compressor", for the message.
        name: Its name.
        model: The type of its arguments.
        args: Those that are given.

    Raises:
        MergeflowError: As `configure`.
    """
    if args is not None and not isinstance(args, Mapping):
        raise MergeflowError(f"{kind} '{name}': arguments are a mapping of names to values, found {args!r:.60}.")
    given = dict(args or {})
    faults = [
        str(unknown_name(f"argument of {name}", str(key), model.model_fields)).removesuffix(".")
        + argument_hint(name, str(key), model.model_fields)
        for key in given
        if key not in model.model_fields
    ]
    if len(faults) == len(given) == 1:
        raise MergeflowError(f"{faults[0]}.")
    known = {key: value for key, value in given.items() if key in model.model_fields}
    constant, varied = split(model, known) if issubclass(model, Args) else (known, {})
    constant |= {"scale": 1.0} if "scale" in varied else {}
    faults += check(model, constant, varied)
    try:
        found = model(**constant)
        if not faults:
            return found.with_varied(varied) if isinstance(found, Args) and varied else found
    except ValidationError as error:
        faults += faults_of(error, model)
    raise MergeflowError(f"{kind} '{name}': {'; '.join(fault.removesuffix('.') for fault in faults)}.")
