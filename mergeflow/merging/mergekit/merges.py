"""One merge of mergekit as a recipe: what means the same is carried over, and everything else is named."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergeflow.merging.values import varies
from mergeflow.merging.vocabulary.named_templates import NAMED

# Keys that change neither the result's weights nor its files here.
_WITHOUT_MEANING = {"int8_mask", "allow_negative_weights"}
_TASK_VECTORS = ("task_arithmetic", "ties", "dare_linear", "dare_ties", "della_linear", "della", "breadcrumbs")
_NAMES = {
    "linear": "average",
    "dare_linear": "dare",
    "della_linear": "della",
    "della": "della_ties",
    "ramplus_tl": "ram_plus",
}
_SPARSE = {"ties": "keep", "dare": "drop", "dare_ties": "drop", "della": "drop", "della_ties": "drop"}
_ARGUMENTS: dict[str, dict[str, str]] = {
    "slerp": {"t": "t"},
    "nearswap": {"t": "t"},
    "sce": {"select_topk": "keep"},
    "karcher": {"max_iter": "iterations", "tol": "tolerance"},
    "multislerp": {"normalize_weights": "normalize"},
    "average": {"normalize": "normalize"},
    "ram": {"epsilon": "epsilon"},
    "ram_plus": {"epsilon": "epsilon", "r": "r", "alpha": "alpha"},
    "arcee_fusion": {},
    "model_stock": {},
    "nuslerp": {},
    "passthrough": {"scale": "scale"},
}


class _Reader:
    """A configuration on its way to a recipe: what was used of it, and what cannot be carried over."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.faults: list[str] = []
        self.notes: list[str] = []
        self.config = config
        self.sources: list[Mapping[str, Any]] = list(config.get("models") or [])
        self.base = config.get("base_model")
        self.paths = list(dict.fromkeys(str(source.get("model")) for source in self.sources))
        self.scopes: list[Mapping[str, Any]] = [config.get("parameters") or {}]
        self.used: set[str] = set()

    def shared(self, key: str, default: Any = None) -> Any:
        """Return a parameter of the whole merge."""
        self.used.add(key)
        return next((scope[key] for scope in self.scopes if key in scope), default)

    def own(self, path: str, key: str, default: Any) -> Any:
        """Return a parameter of one model."""
        self.used.add(key)
        parameters = next(
            (source.get("parameters") or {} for source in self.sources if source.get("model") == path), {}
        )
        return parameters[key] if key in parameters else self.shared(key, default)

    def unused(self) -> list[str]:
        """Return the parameters that nothing asked for."""
        scopes = [*self.scopes, *(source.get("parameters") or {} for source in self.sources)]
        return sorted({key for scope in scopes for key in scope} - self.used - _WITHOUT_MEANING)


def recipe_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return the recipe of one merge of whole models, notes on what means something else here, and what is left out.

    Args:
        config: The configuration, with `models` and without `slices`.
    """
    reader = _Reader(config)
    theirs = str(config.get("merge_method"))
    method = _NAMES.get(theirs, theirs)
    delta = theirs in _TASK_VECTORS or theirs == "breadcrumbs_ties"
    if not delta and method not in _ARGUMENTS:
        reader.faults.append(f"merge_method '{theirs}'")
    experts = _experts(reader, method)
    recipe: dict[str, Any] = {"method": method}
    args = _delta_arguments(reader, theirs, method, experts) if delta else _plain_arguments(reader, method)
    if reader.base and method not in ("average", "slerp", "karcher", "passthrough"):
        recipe["base"] = str(reader.base)
    recipe |= {"experts": experts}
    weights = {name: reader.own(path, "weight", 1.0) for name, path in experts.items()}
    weights = _normalised(reader, theirs, weights)
    if any(weight != 1.0 for weight in weights.values()):
        recipe["weights"] = weights
    if args:
        recipe["args"] = args
    if dtype := config.get("out_dtype") or config.get("dtype"):
        recipe["dtype"] = str(dtype)
    if any(_reaches_the_head(value) for value in (*weights.values(), *args.values())):
        reader.notes.append(
            "a list over depth gives what stands behind the last block (final norm, head) its last value here, and its "
            "first one in mergekit"
        )
    _tokens(reader, experts, recipe)
    _rest(reader)
    return recipe, reader.notes, reader.faults


def _reaches_the_head(value: Any) -> bool:
    """Whether a value varies over depth without a filter."""
    if isinstance(value, Mapping):
        return "filter" not in value and any(map(_reaches_the_head, value.values()))
    if not isinstance(value, list) or len(value) < 2:
        return False
    return not any(isinstance(one, Mapping) for one in value) or any(map(_reaches_the_head, value))


def _experts(reader: _Reader, method: str) -> dict[str, str]:
    """Return the experts by name: all models for methods between models, else all but the base."""
    paths = list(reader.paths)
    if method == "slerp" and reader.base:
        paths = [str(reader.base), *(path for path in paths if path != reader.base)]
    elif method not in ("average", "karcher", "passthrough") and reader.base:
        paths = [path for path in paths if path != reader.base]
    names = [Path(path).stem if path.endswith(".safetensors") else Path(path).name for path in paths]
    names = [name.removeprefix("step:") for name in names]
    names = ["base_model" if name == "base" else name for name in names]  # a recipe keeps `base` for the base
    unique = len(set(names)) == len(names)
    return {name if unique else path.replace("/", "_"): path for name, path in zip(names, paths, strict=True)}


def _delta_arguments(reader: _Reader, theirs: str, method: str, experts: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments of methods that sum task vectors."""
    args: dict[str, Any] = {"scale": reader.shared("lambda", 1.0)}
    normalize = reader.shared("normalize", theirs in ("ties", "della"))
    if method.endswith("ties"):
        args["reduce"] = "weighted_mean" if normalize else "sum"
    if method == "ties":
        args["trim"] = "tensor"
    if key := _SPARSE.get(method):
        density = {name: reader.own(path, "density", 1.0) for name, path in experts.items()}
        args[key] = _by_expert(density if key == "keep" else {n: _mapped(d, _less) for n, d in density.items()})
    if key == "drop":
        if not reader.shared("rescale", True):
            reader.faults.append("rescale: false (what DARE and DELLA leave is always rescaled)")
        if any(value not in (0, 0.0) for value in _numbers(args[key])):
            reader.notes.append(
                "masks are drawn by another generator, and rescaled by 1/(1 - drop) instead of the L1 norm"
            )
    if method.startswith("della"):
        widths = [reader.own(path, "epsilon", 0.15) for path in experts.values()]
        if any(width != widths[0] for width in widths):
            reader.faults.append("epsilon that differs between models")
        args["window"] = _mapped(widths[0] if widths else 0.15, lambda epsilon: round(2 * epsilon, 12))
        drops = _numbers(args["drop"])
        if all(value == 0 for value in drops):
            args["window"] = 0.0  # at density 1 nothing is dropped, whatever epsilon says
        elif 0 in drops and any(_numbers(args["window"])):
            reader.faults.append("a density of 1 beside smaller ones, unless epsilon is 0 (all models have one window)")
    if method.startswith("breadcrumbs"):
        cuts = {name: _breadcrumbs(reader, path) for name, path in experts.items()}
        args["beta"] = _by_expert({name: beta for name, (beta, _) in cuts.items()})
        args["gamma"] = _by_expert({name: gamma for name, (_, gamma) in cuts.items()})
    return args


def _breadcrumbs(reader: _Reader, path: str) -> tuple[float, float]:
    """Return the shares of smallest and largest entries that an expert loses; the density is kept in any case."""
    density, gamma = reader.own(path, "density", 1.0), reader.own(path, "gamma", 0.01)
    if varies(density) or varies(gamma):
        reader.faults.append("breadcrumbs with a density or gamma that varies over the model")
        return 0.0, 0.0
    gamma = 0.0 if density >= 1 else min(gamma, 1 - density)
    return round(max(0.0, 1 - density - gamma), 12), round(gamma, 12)


def _plain_arguments(reader: _Reader, method: str) -> dict[str, Any]:
    """Return the arguments of all other methods."""
    found = {here: reader.shared(there) for there, here in _ARGUMENTS.get(method, {}).items()}
    if method == "passthrough" and reader.paths:  # its one model may have a scale of its own
        found = {"scale": reader.own(reader.paths[0], "scale", None)}
    args = {key: value for key, value in found.items() if value is not None}
    if method in ("nuslerp", "multislerp"):
        args["on"] = "task_vectors" if reader.base else "weights"
    if method == "nuslerp":
        rows, flat = reader.shared("nuslerp_row_wise", False), reader.shared("nuslerp_flatten", True)
        args["vectors"] = "tensor" if flat else "columns" if rows else "rows"
    if method == "ram_plus":
        args["over"] = "tensor"
    return args


def _normalised(reader: _Reader, theirs: str, weights: dict[str, Any]) -> dict[str, Any]:
    """Divide weights by their sum where a method without TIES is told to."""
    ties = theirs.endswith("ties") or theirs == "della"
    if theirs not in _TASK_VECTORS or ties or not reader.shared("normalize", False):
        return weights
    if any(varies(weight) for weight in weights.values()):
        reader.faults.append("normalize: true with weights that vary over the model")
        return weights
    total = sum(weights.values())
    return {name: weight / total if abs(total) > 1e-8 else weight for name, weight in weights.items()}


def _tokens(reader: _Reader, experts: Mapping[str, str], recipe: dict[str, Any]) -> None:
    """Carry over whose tokenizer and chat template the result has."""
    given = reader.config.get("tokenizer")
    given = {"source": given} if isinstance(given, str) else given
    asked = given.get("source", "union") if isinstance(given, Mapping) else reader.config.get("tokenizer_source")
    if asked == "base" and reader.base and str(reader.base) not in experts.values():
        recipe.setdefault("base", str(reader.base))  # nothing else is read of it where only models are averaged
    names = {path: name for name, path in experts.items()} | ({str(recipe["base"]): "base"} if "base" in recipe else {})

    def named(value: Any) -> Any:
        path = str(value).removeprefix("model:")
        if value not in ("base", "union") and path not in names:
            reader.faults.append(f"the tokenizer of '{path}', which is not among the models")
        return names.get(path, value)

    if (source := reader.config.get("tokenizer_source")) is not None:
        recipe["tokenizer_source"] = named(source)
    if isinstance(given, Mapping):
        found = {**given, "source": named(given.get("source", "union"))}
        if given.get("tokens"):
            found["tokens"] = {token: _token(own, named) for token, own in given["tokens"].items()}
        recipe["tokenizer"] = found
    template = reader.config.get("chat_template")
    if template == "auto" or template in NAMED or (template and ("{" in template or template.endswith(".jinja"))):
        recipe["chat_template"] = template
    elif template:
        reader.faults.append(f"chat_template: {template}, which is not known here (give its Jinja text or file)")


def _token(own: Mapping[str, Any], named: Callable[[Any], Any]) -> dict[str, Any]:
    source = own.get("source")
    if isinstance(source, Mapping) and "model" in source:
        source = {**source, "model": named(source["model"])}
    elif isinstance(source, str):
        source = named(source)
    return {**own, **({"source": source} if source is not None else {})}


def _rest(reader: _Reader) -> None:
    """Name what is left of a configuration."""
    config = reader.config
    reader.faults += [f"parameter '{key}'" for key in reader.unused()]
    known = {"merge_method", "models", "base_model", "parameters", "dtype", "out_dtype", "tokenizer_source"}
    known |= {"tokenizer", "chat_template", "name"}
    reader.faults += [f"`{key}`" for key in config if key not in known]


def _less(share: float) -> float:
    return round(1 - share, 12)


def _mapped(setting: Any, function: Callable[[float], float]) -> Any:
    """Return a value with every number of it changed."""
    if isinstance(setting, Mapping):
        return {**setting, "value": _mapped(setting["value"], function)}
    return [_mapped(one, function) for one in setting] if isinstance(setting, list | tuple) else function(setting)


def _numbers(setting: Any) -> Sequence[Any]:
    if isinstance(setting, Mapping):
        return _numbers([value for key, value in setting.items() if key != "filter"])
    return [n for one in setting for n in _numbers(one)] if isinstance(setting, list | tuple) else [setting]


def _by_expert(values: dict[str, Any]) -> Any:
    """Return one value where all experts have the same."""
    found = list(values.values())
    return found[0] if all(value == found[0] for value in found) else values
