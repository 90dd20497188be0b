"""mergekit's methods and parameters, each with its counterpart here."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


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

METHODS = {
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
_HERE = {entry.method for entry in METHODS.values()}
OTHER_NAMES = {name: entry.label for name, entry in METHODS.items() if name not in _HERE}
_CONFIGURATION = ("merge_method", "gate_mode", "models", "base_model", "modules", "output_model")


def argument_hint(method: str, argument: str, accepted: Iterable[str]) -> str:
    """Name our counterpart of mergekit's argument, as the end of a message; empty where it is not one of mergekit's.

    Example:
        >>> argument_hint("ties", "density", ["keep", "scale"])
        "; mergekit's 'density' is `keep` here"
    """
    nearest_first = sorted(METHODS.values(), key=lambda entry: entry.method != method)
    texts = [text for entry in nearest_first if (text := entry.reads.get(argument))]
    here = next((text for text in texts if re.findall(r"\w+", text)[0] in accepted), None)
    return f"; mergekit's '{argument}' is `{here}` here" if here else ""


def is_configuration(values: Any) -> bool:
    """Whether a document is one of mergekit's configurations rather than a recipe."""
    if not isinstance(values, Mapping) or "method" in values:
        return False
    listed = [part for key in ("slices", "experts") if isinstance(values.get(key), list) for part in values[key]]
    parts = [part for part in listed if isinstance(part, Mapping) and {"sources", "source_model"} & part.keys()]
    return bool(parts) or any(key in values for key in _CONFIGURATION)
