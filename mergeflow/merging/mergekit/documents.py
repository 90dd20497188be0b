"""Whole configurations of mergekit as recipes: several documents, slices of layers, mixtures of experts."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mergeflow.checkpoints.writer import write_text
from mergeflow.errors import MergeflowError
from mergeflow.merging.architectures.blocks import COUNTS
from mergeflow.merging.files.recipe import make_recipe
from mergeflow.merging.files.step_fields import ASSEMBLED, PREFIX
from mergeflow.merging.mergekit.keys import check_keys, reference
from mergeflow.merging.mergekit.merges import recipe_of
from mergeflow.yaml_text import read_documents


def write_recipe(
    source: str | Path, out: str | Path, *, dtype: str | None = None, shard_size: str | None = None, force: bool = False
) -> list[str]:
    """Write the recipe of a configuration in a file; notes stand in it as comments.

    Args:
        source: The configuration: one document, or several as `mergekit-multi` takes them, or one of `mergekit-moe`.
        out: The `.yaml`, `.yml` or `.json` file to make.
        dtype: Type of the result, instead of the configuration's.
        shard_size: Largest shard of the result, such as 5GB.
        force: Replace `out` if it exists.

    Returns:
        The notes: what means something else here.

    Raises:
        MergeflowError: As `converted`; the file cannot be read or is not a configuration, or `out` exists.
    """
    documents, target = read_documents(Path(source), "configuration"), Path(out)
    if not documents or not all(map(_is_configuration, documents)):
        raise MergeflowError(f"'{source}' is not a configuration of mergekit: it has no merge_method.")
    if target.suffix not in (".yaml", ".yml", ".json"):
        raise MergeflowError(f"out '{out}': a recipe is a text file, end its name in .yaml.")
    if target.exists() and not force:
        raise MergeflowError(f"out '{out}' exists: choose another name, or give --force to replace it.")
    recipe, notes = converted(documents, f"configuration '{source}'")
    recipe |= {key: value for key, value in (("dtype", dtype), ("shard_size", shard_size)) if value is not None}
    make_recipe(recipe, f"the recipe of configuration '{source}'")
    if target.suffix == ".json":
        text = json.dumps(recipe, indent=2, ensure_ascii=False) + "\n"
    else:
        comments = [f"# {line}\n" for line in (f"From {Path(source).name}, a configuration of mergekit.", *notes)]
        text = "".join(comments) + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    write_text(target, text)
    return notes


def _is_configuration(document: Any) -> bool:
    """Whether it says how to merge; a mixture names its experts' `source_model`, and need not name a `gate_mode`."""
    if not isinstance(document, dict):
        return False
    experts = document.get("experts")
    sources = isinstance(experts, list) and any(isinstance(one, dict) and "source_model" in one for one in experts)
    return bool({"merge_method", "gate_mode"} & document.keys()) or sources


def converted(
    documents: Sequence[Mapping[str, Any]], origin: str = "configuration"
) -> tuple[dict[str, Any], list[str]]:
    """Return the recipe that merges as a configuration says, and notes on what means something else here.

    Args:
        documents: Its documents: merges, all but one with a name by which others read their results.
        origin: Its name, for messages.

    Raises:
        MergeflowError: What cannot be carried over, all of it, or a form that mergekit does not document.
    """
    check_keys(documents, origin)
    work = _Conversion()
    named = {str(one["name"]): one for one in documents if "name" in one} if len(documents) > 1 else {}
    last = [one for one in documents if one not in list(named.values())]
    if not last:
        read = {path for one in named.values() for path in _paths(one)}
        last = [one for name, one in named.items() if name not in read]
    if len(last) != 1:
        raise MergeflowError(
            f"{origin} has {len(last)} merges that no other reads, and a recipe has one result: give one file each."
        )
    work.names = [name for name, one in named.items() if one is not last[0]]
    for name in work.names:
        work.steps[name] = work.inner(named[name])
    recipe = work.document(last[0])
    if work.faults:
        listed = "\n".join(f"  - {fault}" for fault in dict.fromkeys(work.faults))
        raise MergeflowError(f"{origin} cannot be carried over whole; a recipe has nothing for:\n{listed}")
    if work.steps:
        recipe = work.passed(recipe) | {"steps": work.steps}
    return recipe, list(dict.fromkeys(work.notes))


def _paths(document: Mapping[str, Any]) -> list[str]:
    sources = [*(document.get("models") or []), *(s for one in document.get("slices") or [] for s in one["sources"])]
    return [str(document.get("base_model")), *(str(one.get("model")) for one in sources)]


class _Conversion:
    """The documents of a configuration on their way to one recipe: its steps so far, notes and faults."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.steps: dict[str, Any] = {}
        self.notes: list[str] = []
        self.faults: list[str] = []

    def inner(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a document as a step."""
        found = self.passed(self.document(document))
        if found.pop("chat_template", None) is not None:
            self.faults.append("`chat_template` of a merge that another one reads")
        return found

    def passed(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return a recipe with its slices or mixture as a step, which a type or a scale needs a merge around."""
        for key in ASSEMBLED:
            if key in found:
                self.steps[inner := self._free(key)] = {key: found[key]}
                rest = {name: value for name, value in found.items() if name != key}
                return {"method": "passthrough", "experts": {inner: PREFIX + inner}, **rest}
        return dict(found)

    def document(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return one document as a recipe."""
        if "merge_method" not in document:
            return self._mixture(document)
        slices = document.get("slices")
        if slices is None:
            return self._merge(document, document.get("models") or [], {})
        if document.get("merge_method") == "passthrough" and all(_plain(one) for one in slices):
            return self._stack(document, slices)
        parts = [self._slice(document, one) for one in slices]
        if len(parts) == 1:
            return parts[0]
        lifted = ("dtype", "chat_template", "tokenizer", "tokenizer_source")
        around = {key: part.pop(key) for part in parts for key in lifted if key in part}
        if {"tokenizer", "tokenizer_source"} & around.keys():
            self.faults.append("a tokenizer for slices of layers that are merged one by one")
        steps = []
        for part in parts:
            self.steps[name := self._free("slice")] = part
            steps.append({"model": PREFIX + name})
        return {"slices": steps} | around

    def _free(self, name: str) -> str:
        taken = {*self.steps, *self.names}
        return name if name not in taken else next(f"{name}_{i}" for i in range(2, 9999) if f"{name}_{i}" not in taken)

    def _merge(
        self, document: Mapping[str, Any], models: Sequence[Mapping[str, Any]], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        plain = {key: value for key, value in document.items() if key not in ("slices", "models")}
        plain["models"] = [{**one, "model": self._path(one.get("model"))} for one in models]
        if plain.get("base_model") is not None:
            plain["base_model"] = self._path(plain["base_model"])
        if parameters or plain.get("parameters"):
            plain["parameters"] = {**(plain.get("parameters") or {}), **parameters}
        recipe, notes, faults = recipe_of(plain)
        self.notes += notes
        self.faults += faults
        return recipe

    def _path(self, model: Any) -> str:
        """Return a model's path: a step where it names a merge, or is a model with an adapter."""
        path = reference(model)
        if path in self.names:
            return PREFIX + path
        base, plus, adapter = path.partition("+")
        if plus and not path.startswith(PREFIX):
            step = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": base, "experts": {"adapter": adapter}}
            known = next((name for name, found in self.steps.items() if found == step), None)
            if known is None:
                known = self._free(re.sub(r"[^\w.-]", "-", f"{Path(base).name}_{Path(adapter).name}"))
                self.steps[known] = step
            return PREFIX + known
        return path

    def _stack(self, document: Mapping[str, Any], slices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return layers behind each other, as they are or scaled."""
        sources = [one["sources"][0] for one in slices]
        plain = self._merge({**document, "merge_method": "passthrough"}, sources[:1], {})
        if document.get("tokenizer") or document.get("tokenizer_source") not in (None, "base"):
            self.faults.append("a tokenizer of its own for slices of layers (it is the first model's)")
        found: dict[str, Any] = {"slices": [self._layers(one) for one in sources]}
        return found | {key: plain[key] for key in ("args", "dtype", "chat_template") if key in plain}

    def _layers(self, source: Mapping[str, Any]) -> dict[str, Any]:
        layers = source.get("layer_range")
        return {"model": self._path(source["model"]), **({"layers": list(layers)} if layers else {})}

    def _slice(self, document: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
        """Return one slice as a merge of its sources' layers."""
        sources, base = one["sources"], document.get("base_model")
        ranges = {tuple(source.get("layer_range") or ()) for source in sources}
        whole = self._whole(document, sources, ranges)
        places = {str(source["model"]): self._part(source, whole) for source in sources}
        if base is not None and str(base) not in places and not whole:
            self.faults.append(f"a slice without layers of the base '{base}'")
        models = [
            {"model": places[str(source["model"])], "parameters": source.get("parameters") or {}} for source in sources
        ]
        own = {**document, **({"base_model": places.get(str(base), base)} if base is not None else {})}
        return self._merge(own, models, one.get("parameters") or {})

    def _part(self, source: Mapping[str, Any], whole: bool) -> str:
        if whole or not source.get("layer_range"):
            return self._path(source["model"])
        layers = [self._layers(source)]
        known = next((name for name, found in self.steps.items() if found == layers), None)
        if known is None:
            self.steps[known := self._free("layers")] = layers
        return PREFIX + known

    def _whole(self, document: Mapping[str, Any], sources: Sequence[Mapping[str, Any]], ranges: set[Any]) -> bool:
        """Whether the one slice of a configuration is the models as they are."""
        if len(document["slices"]) > 1 or len(ranges) > 1:
            return False
        layers = next(iter(ranges), ())
        if not layers:
            return True
        counts = {found for source in sources if (found := _count(str(source["model"]))) is not None}
        if layers[0] != 0 or counts - {layers[1]}:
            return False
        if not counts:
            self.notes.append(f"layer_range {list(layers)} is taken for the whole model, whose config.json is not here")
        return True

    def _mixture(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """Return a configuration of mergekit-moe as a recipe."""
        known = {"base_model", "gate_mode", "dtype", "experts_per_token", "experts", "shared_experts", "architecture"}
        self.faults += [f"`{key}`" for key in document if key not in known]
        gate = document.get("gate_mode", "hidden")
        if gate not in ("hidden", "cheap_embed", "random"):
            self.faults.append(f"gate_mode: {gate}")
        self.notes.append(
            "router rows are means of what the MLPs see, not of layers' inputs; the architecture is the base's"
        )
        found: dict[str, Any] = {"base": self._path(document["base_model"]), "gate": gate}
        found["experts"] = [self._moe_expert(one) for one in document.get("experts") or []]
        if "experts_per_token" in document:
            found["experts_per_token"] = document["experts_per_token"]
        shared = document.get("shared_experts") or []
        for one in shared[:1]:
            found["shared"] = {"model": self._path(one["source_model"]), "scale": one.get("residual_scale", 1.0)}
            self.notes.append("the gate of the shared expert is open by half, whatever the prompts")
        if len(shared) > 1:
            self.faults.append("a second shared expert")
        return {"mixture": found, **({"dtype": document["dtype"]} if document.get("dtype") else {})}

    def _moe_expert(self, one: Mapping[str, Any]) -> dict[str, Any]:
        known = {"source_model": "model", "positive_prompts": "prompts", "negative_prompts": "negative_prompts"}
        self.faults += [f"`{key}` of an expert" for key in one if key not in known]
        found = {known[key]: value for key, value in one.items() if key in known and value}
        return {**found, "model": self._path(one["source_model"])}


def _plain(one: Mapping[str, Any]) -> bool:
    """Whether a slice is layers of one model without parameters of its own."""
    sources = one.get("sources") or []
    return set(one) == {"sources"} and len(sources) == 1 and not sources[0].get("parameters")


def _count(path: str) -> int | None:
    """Return the number of blocks that a model folder's config.json says; None where it is not here."""
    try:
        config = json.loads((Path(path).expanduser() / "config.json").read_bytes())
        return next((int(config[key]) for key in COUNTS if key in config), None)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
