"""What mergekit calls the methods and arguments of the catalog, for messages to people who know mergekit."""

from collections.abc import Mapping
from typing import Any

METHODS = {
    "linear": "average",
    "dare_linear": "dare",
    "della_linear": "della",
    "ramplus_tl": "ram_plus (with over: tensor)",
}

_DROP = "drop = 1 - density"
# (arguments of a method here that make the hint right, mergekit's argument) -> what to write here.
_ARGUMENTS: dict[str, dict[str, str]] = {
    "density": {"drop": _DROP, "beta": "beta = 1 - density - gamma", "keep": "keep"},
    "epsilon": {"window": "window = 2 * epsilon"},
    "lambda": {"scale": "scale"},
    "max_iter": {"iterations": "iterations"},
    "tol": {"tolerance": "tolerance"},
    "select_topk": {"keep": "keep"},
    "normalize_weights": {"normalize": "normalize"},
    "nuslerp_flatten": {"vectors": "vectors: tensor"},
    "nuslerp_row_wise": {"vectors": "vectors: columns"},
}

CONFIGURATION = ("merge_method", "models", "base_model", "tokenizer_source", "modules", "output_model")


def argument_hint(argument: str, known: Mapping[str, Any]) -> str:
    """Return what mergekit's argument is here, as the end of a message; empty where it is not one of mergekit's.

    Example:
        >>> argument_hint("density", {"keep": None, "scale": None})
        "; mergekit's 'density' is `keep` here"
    """
    here = next((text for name, text in _ARGUMENTS.get(argument, {}).items() if name in known), None)
    return f"; mergekit's '{argument}' is `{here}` here" if here else ""


def is_configuration(values: Mapping[str, Any]) -> bool:
    """Whether a mapping is one of mergekit's configurations rather than a recipe."""
    slices = values.get("slices")
    sources = isinstance(slices, list) and any(isinstance(one, Mapping) and "sources" in one for one in slices)
    return (sources or any(key in values for key in CONFIGURATION)) and "method" not in values
