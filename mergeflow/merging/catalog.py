"""The catalog: every method by name, by mergekit's too; and a configured method (or compressor) as a frozen record."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from mergeflow.checkpoints.header import FLOAT32
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.merging import methods as families
from mergeflow.merging.method import Args, Method
from mergeflow.merging.values import check, split, together
from mergeflow.plugins import Named, Shelf
from mergeflow.schema import Frozen, faults_of

# The package of methods is imported here, before `mergeflow.merging` gives its name to the function below.
METHODS = Shelf("method", Method, families.__name__, "methods", "`@method(…)` of mergeflow.merging.method")


def methods() -> dict[str, Method]:
    """List every method by name: those of mergeflow, of installed packages and of the project.

    Example:
        >>> "ties" in methods()
        True
    """
    return METHODS.all()


def get(name: str) -> Method:
    """Find a method by name."""
    if isinstance(name, str) and name in OTHER_NAMES and name not in methods():
        raise MergeflowError(f"unknown method '{name}': mergekit's '{name}' is '{OTHER_NAMES[name]}' here.")
    return METHODS.get(name)


M = TypeVar("M", bound=Named)


@dataclass(frozen=True)
class Call(Generic[M]):
    """A method or compressor with all its arguments: frozen, hashable, replayable from its name and `args`."""

    method: M
    arguments: Any

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def args(self) -> dict[str, Any]:
        """All arguments with their defaults, as plain values."""
        args: dict[str, Any] = self.arguments.model_dump(mode="json")
        return {**args, **getattr(self.arguments, "varied", {})}


@dataclass(frozen=True)
class MethodCall(Call[Method]):
    """A method with all its arguments; `configure(call.name, call.args)` makes the same call."""

    arguments: Args

    @property
    def scale(self) -> float:
        return self.arguments.scale

    def with_scale(self, scale: float) -> "MethodCall":
        return MethodCall(self.method, self.arguments.model_copy(update={"scale": float(scale)}))

    def without_scale(self) -> "MethodCall":
        """Return the call with scale 1: equal for all calls that share a direction."""
        return self.with_scale(1.0)


def configure(name: str, args: Mapping[str, Any] | None = None) -> MethodCall:
    """Validate a method's arguments, of which those not given take their defaults, and return the frozen call.

    Example:
        >>> configure("ties", {"keep": 0.1}).args["scale"]
        1.0
    """
    method = get(name)
    call = MethodCall(method, arguments_of("method", name, method.args, args))
    if "keep" in call.arguments.varied:
        # One threshold over the whole model cannot have a share of its own in each tensor.
        trimming = call.arguments.model_copy(update={"keep": 0.5})  # by its default a method may trim nothing
        passes = {step.name.partition(".")[0] for step in method.passes(trimming, FLOAT32)}
        if passes & {"threshold", "pcb"}:
            way = ": give one number, or trim: tensor" if "trim" in method.args.model_fields else ": give one number"
            raise MergeflowError(f"method '{name}': `keep` is a share of the whole model and cannot vary{way}.")
    return call


A = TypeVar("A", bound=BaseModel)


def arguments_of(kind: str, name: str, model: type[A], args: Mapping[str, Any] | None) -> A:
    """Return the arguments of a method or compressor, validated."""
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
    values = {key: value for key, value in given.items() if key in model.model_fields}
    constant, varied = split(model, values) if issubclass(model, Args) else (values, {})
    constant |= {"scale": 1.0} if "scale" in varied else {}
    faults += check(model, constant, varied)
    if not faults:  # one that varies has a default that may not go with the others
        constant |= next((values for values in together(model, varied) if not _fits(model, constant)), {})
    try:
        arguments = model(**constant)
        if not faults:
            return arguments.with_varied(varied) if isinstance(arguments, Args) and varied else arguments
    except ValidationError as error:
        faults += faults_of(error, model)
    raise MergeflowError(f"{kind} '{name}': {'; '.join(fault.removesuffix('.') for fault in faults)}.")


def _fits(model: type[BaseModel], values: Mapping[str, Any]) -> bool:
    try:
        model(**values)
    except ValidationError as error:
        return any(fault["loc"] for fault in error.errors())
    return True


def weights_by_name(
    weights: Mapping[str, float] | Sequence[float] | None, experts: Mapping[str, Any], call: MethodCall
) -> dict[str, float]:
    """Return one weight per expert, checked.

    Args:
        weights: Factors by name, where a missing one is 1; or one per expert, in their order; None for 1 each.
    """
    if weights is None:
        return dict.fromkeys(experts, 1.0)
    values = weights.values() if isinstance(weights, Mapping) else weights
    if call.method.weights == "none" and any(weight != 1 for weight in values):
        raise MergeflowError(f"method '{call.name}' takes no weights per expert: remove `weights`.")
    if isinstance(weights, Mapping):
        unknown = sorted(set(weights) - set(experts))
        if unknown:
            raise MergeflowError(f"weights are given for unknown experts {unknown}. Known: {', '.join(experts)}.")
        by_name = {name: float(weights.get(name, 1.0)) for name in experts}
    else:
        if len(weights) != len(experts):
            raise MergeflowError(f"{len(weights)} weights for {len(experts)} experts: give one per expert.")
        by_name = dict(zip(experts, map(float, weights), strict=True))
    if not all(abs(weight) < float("inf") for weight in by_name.values()):
        raise MergeflowError(f"weights must be finite numbers, found {by_name}.")
    if getattr(call.arguments, "normalize", call.method.weights == "shares") and sum(by_name.values()) == 0:
        raise MergeflowError("the weights of an average sum to 0: they cannot be normalised.")
    return by_name


def check_inputs(call: MethodCall, experts: Mapping[str, Any], data: Mapping[str, Any] | None) -> None:
    """Check the number of experts, arguments that depend on it, and that needed data statistics are there."""
    if not isinstance(experts, Mapping):
        raise MergeflowError(f"experts are a mapping of names to state dicts, found a {type(experts).__name__}.")
    least, most = call.method.experts
    if not least <= len(experts) <= (most or len(experts)):
        wanted = f"{least}" if most == least else f"{least} or more" if most is None else f"{least} to {most}"
        raise MergeflowError(f"method '{call.name}' merges {wanted} experts, found {len(experts)}.")
    call.arguments.check_experts(len(experts))
    for key, value in call.arguments.varied.items():
        for name in value if isinstance(value, Mapping) and "value" not in value else ():
            if name not in experts:
                raise unknown_name(f"expert of `{key}`", name, experts)
    kinds = {datum.name for method in methods().values() for datum in method.given}
    for kind, by_expert in (data or {}).items():
        if kind not in kinds:
            raise unknown_name("statistic", kind, kinds)
        for name in by_expert:
            if name not in experts:
                raise unknown_name(f"expert of the statistic '{kind}'", name, experts)
    for kind in call.method.data:
        missing = sorted(set(experts) - set((data or {}).get(kind, {})))
        if missing:
            raise MergeflowError(f"method '{call.name}' needs the statistic '{kind}' of experts {missing}.")


class Code(Frozen):
    """Where a method was declared, and the SHA-256 digest of its source."""

    place: str
    sha256: str


def code_of(call: MethodCall) -> dict[str, Code]:
    """Return the code of the methods that a call uses and that are not the package's own, by their names."""
    origins = {name: METHODS.origin(name) for name in (call.name, *call.arguments.uses)}
    return {
        name: Code(place=code.place, sha256=code.digest) for name, code in origins.items() if code.digest is not None
    }


def code_record(call: MethodCall) -> dict[str, Any]:
    """Return a recipe's field `code` for a call; nothing where all of its code is the package's own."""
    codes = {name: code.model_dump() for name, code in code_of(call).items()}
    return {"code": codes} if codes else {}


def check_known(name: str, recorded: Mapping[str, Code]) -> None:
    """Check that a method that a record names is here."""
    if name in recorded and name not in METHODS.names():
        raise MergeflowError(
            f"the method '{name}' was declared in '{recorded[name].place}', which is not here: put that file "
            "into the folder `methods` of a project and run the command there, or name it with --from."
        )


def check_code(recorded: Mapping[str, Code], call: MethodCall) -> None:
    """Check that the methods of a call are made of the code that a record names."""
    code = code_of(call)
    for name in (call.name, *call.arguments.uses):
        if name not in recorded or (name in code and recorded[name].sha256 == code[name].sha256):
            continue
        place = f"'{code[name].place}' ({code[name].sha256[:12]}…)" if name in code else "the package's own"
        raise MergeflowError(
            f"the method '{name}' is not the one that the recipe records: that is '{recorded[name].place}' "
            f"({recorded[name].sha256[:12]}…), this is {place}. Bring that code back, or remove `code` from the "
            "recipe to merge with what is here."
        )


# The methods and parameters of mergekit, each with its counterpart here.


@dataclass(frozen=True)
class Counterpart:
    """A method of mergekit.

    Attributes:
        method: The method here.
        reads: Every parameter that mergekit reads for it, and what to write here; empty where it changes nothing here.
        fixed: Arguments that make the method here the same one.
        base_is_model: Whether `base_model` is one of the models that are merged.
    """

    method: str
    reads: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    base_is_model: bool = False

    @property
    def sums_task_vectors(self) -> bool:
        """Whether it adds weighted task vectors to the base."""
        return "lambda" in self.reads

    @property
    def by_model(self) -> set[str]:
        """The parameters that each model may have by itself."""
        return {"weight", *(("density", "gamma", "epsilon") if self.sums_task_vectors else ("scale",))}

    @property
    def label(self) -> str:
        """The method's name here, with the arguments that make it the same."""
        extra = ", ".join(f"{key}: {value}" for key, value in self.fixed.items())
        return f"{self.method} (with {extra})" if extra else self.method


_SUM = {"weight": "weights", "lambda": "scale", "normalize": "normalize", "rescale": "", "int8_mask": "", "density": ""}
_TIES = _SUM | {"normalize": "reduce: weighted_mean"}
_DROP = {"density": "drop = 1 - density"}
_CUTS = {"density": "beta = 1 - density - gamma", "gamma": "gamma"}
_DELLA = _DROP | {"epsilon": "window = 2 * epsilon"}
_RAM = {"epsilon": "epsilon"}

MERGEKIT = {
    "linear": Counterpart("average", {"weight": "weights", "normalize": "normalize"}, base_is_model=True),
    "slerp": Counterpart("slerp", {"t": "t"}, base_is_model=True),
    "karcher": Counterpart("karcher", {"max_iter": "iterations", "tol": "tolerance"}, base_is_model=True),
    "passthrough": Counterpart("passthrough", {"scale": "scale"}, base_is_model=True),
    "task_arithmetic": Counterpart("task_arithmetic", _SUM),
    "ties": Counterpart("ties", _TIES | {"density": "keep"}, {"trim": "tensor"}),
    "dare_linear": Counterpart("dare", _SUM | _DROP),
    "dare_ties": Counterpart("dare_ties", _TIES | _DROP),
    "della_linear": Counterpart("della", _SUM | _DELLA),
    "della": Counterpart("della_ties", _TIES | _DELLA),
    "breadcrumbs": Counterpart("breadcrumbs", _SUM | _CUTS),
    "breadcrumbs_ties": Counterpart("breadcrumbs_ties", _TIES | _CUTS),
    "nuslerp": Counterpart(
        "nuslerp", {"weight": "weights", "nuslerp_flatten": "vectors: tensor", "nuslerp_row_wise": "vectors: columns"}
    ),
    "multislerp": Counterpart("multislerp", {"weight": "weights", "normalize_weights": "normalize", "eps": ""}),
    "nearswap": Counterpart("nearswap", {"t": "t"}),
    "arcee_fusion": Counterpart("arcee_fusion"),
    "model_stock": Counterpart("model_stock", {"filter_wise": "vectors: rows"}),
    "sce": Counterpart("sce", {"select_topk": "keep", "int8_mask": ""}),
    "ram": Counterpart("ram", _RAM),
    "ramplus_tl": Counterpart("ram_plus", _RAM | {"r": "r", "alpha": "alpha"}, {"over": "tensor"}),
}
_HERE = {entry.method for entry in MERGEKIT.values()}
OTHER_NAMES = {name: entry.label for name, entry in MERGEKIT.items() if name not in _HERE}
_CONFIGURATION = ("merge_method", "gate_mode", "models", "base_model", "modules", "output_model")


def argument_hint(method: str, argument: str, accepted: Iterable[str]) -> str:
    """Name our counterpart of mergekit's argument, as the end of a message; empty where it is not one of mergekit's.

    Example:
        >>> argument_hint("ties", "density", ["keep", "scale"])
        "; mergekit's 'density' is `keep` here"
    """
    nearest_first = sorted(MERGEKIT.values(), key=lambda entry: entry.method != method)
    texts = [text for entry in nearest_first if (text := entry.reads.get(argument))]
    accepting = next((text for text in texts if re.findall(r"\w+", text)[0] in accepted), None)
    return f"; mergekit's '{argument}' is `{accepting}` here" if accepting else ""


def is_configuration(values: Any) -> bool:
    """Whether a document is one of mergekit's configurations rather than a recipe."""
    if not isinstance(values, Mapping) or "method" in values:
        return False
    listed = [part for key in ("slices", "experts") if isinstance(values.get(key), list) for part in values[key]]
    parts = [part for part in listed if isinstance(part, Mapping) and {"sources", "source_model"} & part.keys()]
    return bool(parts) or any(key in values for key in _CONFIGURATION)
