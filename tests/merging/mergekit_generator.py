"""Random configurations of mergekit: every method, form and way to write a parameter, without random masks."""

import random
from collections.abc import Mapping
from typing import Any

from mergeflow.merging.catalog import MERGEKIT as METHODS

LAYERS = 5
FILTERS = ("self_attn", "mlp", "q_proj", "norm", "embed", "lm_head", "*")
SUMS = (
    "task_arithmetic",
    "ties",
    "dare_linear",
    "dare_ties",
    "della_linear",
    "della",
    "breadcrumbs",
    "breadcrumbs_ties",
)
UNREAD = (
    "weight",
    "density",
    "lambda",
    "normalize",
    "t",
    "epsilon",
    "gamma",
    "select_topk",
    "int8_mask",
    "scale",
    "made_up",
)


class Generator:
    """Draws configurations; the same seed gives the same one.

    Args:
        seed: Of the one configuration.
        modules: Whose layers slices move: the number of layers of each, 0 where it is merged as it is.
    """

    def __init__(self, seed: int, modules: Mapping[str, int] | None = None) -> None:
        self.random, self.modules = random.Random(seed), modules or {}
        self.method = list(METHODS)[seed % len(METHODS)]

    def chance(self, share: float) -> bool:
        """Return true in a share of the cases."""
        return self.random.random() < share

    def number(self, low: float, high: float) -> Any:
        """Return a number, sometimes as the text that YAML makes of 5e-1."""
        value = round(self.random.uniform(low, high), 2)
        return f"{value:.2e}" if self.chance(0.1) else value

    def setting(self, low: float, high: float, varied: float = 0.4) -> Any:
        """Return a number, numbers over depth, or filters."""
        if not self.chance(varied):
            return self.number(low, high)
        over_depth = [self.number(low, high) for _ in range(self.random.randint(2, 4))]
        if self.chance(0.5):
            return over_depth
        names = self.random.sample(FILTERS, 2)
        rules: list[dict[str, Any]] = [{"filter": names[0], "value": self.number(low, high)}]
        if self.chance(0.5):
            rules.append({"filter": names[1], "value": over_depth})
        return rules + [{"value": self.number(low, high)}] * self.chance(0.8)

    def configuration(self) -> dict[str, Any]:
        """Return one configuration of models `base`, `a`, `b` and `c`."""
        count = {"passthrough": 1, "nearswap": 1, "arcee_fusion": 1, "slerp": 1, "nuslerp": 2}.get(self.method)
        models = self.random.sample(["a", "b", "c"], count or self.random.randint(2, 3))
        sources: list[dict[str, Any]] = [{"model": model, "parameters": self.of_model()} for model in models]
        config: dict[str, Any] = {"merge_method": self.method}
        optional = self.method in ("linear", "nuslerp", "multislerp", "karcher")
        if self.method != "passthrough" and (not optional or self.chance(0.5)):
            config["base_model"] = "base"
            if self.chance(0.4) and self.method != "nuslerp":
                sources.insert(self.random.randint(0, len(sources)), {"model": "base", "parameters": self.of_model()})
        shared = self.of_all()
        if shared:
            config["parameters"] = shared
        for key in self.random.sample(UNREAD, self.random.randint(0, 2)):
            place: dict[str, Any] = (
                config.setdefault("parameters", {}) if self.chance(0.5) else sources[0]["parameters"]
            )
            if key not in METHODS[self.method].reads:
                place[key] = self.number(0.2, 0.9)
        for source in sources:
            if not source["parameters"]:
                del source["parameters"]
        return config | self.form(sources, config.get("base_model"))

    def form(self, sources: list[dict[str, Any]], base: str | None) -> dict[str, Any]:
        """Return the sources as models, slices or modules."""
        forms = {
            name: {"slices": self.moved(sources, base, layers)} if layers else {"models": sources}
            for name, layers in self.modules.items()
        }
        if forms:
            return forms.get("default") or {"modules": forms}
        kind = self.random.choice(("models", "models", "modules", "module of slices", "slices", "two slices"))
        if kind == "models":
            return {"models": sources}
        if kind == "modules":
            return {"modules": {"default": {"models": sources}}}
        listed = {source["model"] for source in sources}
        if base is not None and base not in listed:
            sources = [*sources, {"model": base}]
        cut = self.random.randint(1, LAYERS - 1) if kind == "two slices" else LAYERS
        ranges = [(0, cut), (cut, LAYERS)] if cut < LAYERS else [(0, LAYERS)]
        slices: list[dict[str, Any]] = [
            {"sources": [{**source, "layer_range": [*limits]} for source in sources]} for limits in ranges
        ]
        if self.chance(0.3):
            slices[0]["parameters"] = self.of_all()
        return {"modules": {"default": {"slices": slices}}} if kind == "module of slices" else {"slices": slices}

    def moved(self, sources: list[dict[str, Any]], base: str | None, layers: int) -> list[dict[str, Any]]:
        """Return two or three slices: layers that come twice, are left out, or differ between the sources."""
        listed = {source["model"] for source in sources}
        sources = sources if base is None or base in listed else [*sources, {"model": base}]
        slices: list[dict[str, Any]] = []
        for _ in range(self.random.randint(2, 3)):
            length = self.random.randint(1, layers)
            first = self.random.randint(0, layers - length)
            firsts = [self.random.randint(0, layers - length) if self.chance(0.2) else first for _ in sources]
            ranges = [{**source, "layer_range": [at, at + length]} for source, at in zip(sources, firsts, strict=True)]
            parameters = self.of_all() if self.chance(0.3) else {}
            slices.append({"sources": ranges} | ({"parameters": parameters} if parameters else {}))
        return slices

    def of_model(self) -> dict[str, Any]:
        """Return the parameters of one model."""
        settings: dict[str, Any] = {}
        reads = "weight" in METHODS[self.method].reads
        if self.chance(0.8 if reads else 0.1):
            settings["weight"] = self.setting(0.2, 1.2)
        if self.method == "ties" and self.chance(0.7):
            settings["density"] = self.setting(0.3, 1.0)
        if self.method.startswith("breadcrumbs"):
            settings |= {"density": self.number(0.4, 0.9), "gamma": self.number(0.01, 0.1)}
        if self.method == "passthrough" and self.chance(0.8):
            settings["scale"] = self.setting(0.5, 1.5)
        return settings

    def of_all(self) -> dict[str, Any]:
        """Return the parameters of the merge."""
        settings: dict[str, Any] = {}
        if self.method in (*SUMS, "linear", "nuslerp", "multislerp"):
            settings["weight"] = self.setting(0.2, 1.2, 0.2)
        if self.method in SUMS:
            settings |= {"lambda": self.setting(0.3, 1.5, 0.2)} if self.chance(0.5) else {}
            settings |= {"normalize": self.chance(0.5)} if self.chance(0.5) else {}
            settings |= {"int8_mask": True} if self.chance(0.3) else {}
        choices: dict[str, dict[str, Any]] = {
            "linear": {"normalize": self.chance(0.7)},
            "slerp": {"t": self.setting(0.1, 0.9)},
            "nearswap": {"t": self.setting(0.001, 0.1)},
            "nuslerp": {"nuslerp_flatten": self.chance(0.5), "nuslerp_row_wise": self.chance(0.5)},
            "multislerp": {"normalize_weights": self.chance(0.7)},
            "sce": {"select_topk": self.setting(0.2, 1.0, 0.2)},
            "ram": {"epsilon": self.number(0.01, 0.1)},
            "ramplus_tl": {"epsilon": self.number(0.01, 0.1), "r": self.number(0, 0.5), "alpha": self.number(0, 1)},
            "karcher": {"max_iter": self.random.randint(1, 20), "tol": 1e-9},
            "model_stock": {"filter_wise": self.chance(0.5)},
        }
        return settings | choices.get(self.method, {})
