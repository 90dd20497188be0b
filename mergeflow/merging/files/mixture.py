"""A mixture of experts put together from dense models: attention of one, the MLPs of all, and a router."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from mergeflow.checkpoints.folders import config_of
from mergeflow.checkpoints.header import DType, TensorInfo
from mergeflow.checkpoints.reader import Entry, LazyStateDict
from mergeflow.errors import MergeflowError, together
from mergeflow.late import torch
from mergeflow.merging.architectures.mixtures import TARGETS, Target, mixture_config
from mergeflow.merging.files.fields import Location
from mergeflow.merging.files.output import shards_like
from mergeflow.merging.files.router import Router, RouterEntry
from mergeflow.schema import Frozen

if TYPE_CHECKING:
    from torch import Tensor

Gate = Literal["hidden", "cheap_embed", "random"]


class Expert(Frozen):
    """One dense model of a mixture.

    Attributes:
        model: The model.
        prompts: Texts that it should answer; gates other than `random` need some.
        negative_prompts: Texts that it should not answer.
    """

    model: Location
    prompts: tuple[str, ...] = ()
    negative_prompts: tuple[str, ...] = ()


class Shared(Frozen):
    """The expert that every token passes through.

    Attributes:
        model: The model.
        scale: Factor of its output.
    """

    model: Location
    scale: float = 1.0


class Mixture(Frozen):
    """A mixture of experts.

    Attributes:
        base: The model that gives embeddings, attention, norms and head.
        experts: The models that give the MLPs.
        gate: What the router's rows are: `hidden`, what the base's MLPs see of the prompts; `cheap_embed`, the
            prompts' embeddings; `random`, for a training to come.
        experts_per_token: How many experts a token passes through.
        shared: An expert that every token passes through, where the architecture has one.
        seed: Of the random router.
    """

    base: Location
    experts: tuple[Expert, ...] = Field(min_length=2)
    gate: Gate = "hidden"
    experts_per_token: int = Field(2, ge=1)
    shared: Shared | None = None
    seed: int = 0

    @field_validator("experts", mode="before")
    @classmethod
    def _paths(cls, value: Any) -> Any:
        """Take a plain path for an expert without prompts."""
        if isinstance(value, list | tuple):
            return [{"model": one} if isinstance(one, str) else one for one in value]
        return value

    @model_validator(mode="after")
    def _fits(self) -> Mixture:
        faults = []
        if self.experts_per_token > len(self.experts):
            faults.append(f"experts_per_token is {self.experts_per_token}, of {len(self.experts)} experts")
        bare = [str(index) for index, one in enumerate(self.experts) if not one.prompts]
        if self.gate != "random" and bare:
            faults.append(f"gate {self.gate} needs `prompts` of every expert; {', '.join(bare)} (from 0) has none")
        if faults:
            raise ValueError("\n".join(faults))
        return self

    def paths(self) -> Iterator[str]:
        """Yield the models it is made of."""
        yield self.base
        yield from (one.model for one in self.experts)
        yield from (one.model for one in (self.shared,) if one is not None)


@dataclass(frozen=True)
class _Changed:
    """A tensor in another type, times a factor."""

    entry: Entry
    dtype: DType
    factor: float = 1.0

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened tensor."""
        found = self.entry.read(start, stop)
        return (found.float() * self.factor if self.factor != 1 else found).to(self.dtype.torch)


@dataclass(frozen=True)
class _Zeros:
    """A tensor of zeros."""

    dtype: DType

    def read(self, start: int, stop: int) -> Tensor:
        """Return elements start..stop of the flattened tensor."""
        return torch.zeros(stop - start, dtype=self.dtype.torch)


def mixed(mixture: Mixture, states: Mapping[str, LazyStateDict]) -> LazyStateDict:
    """Return the mixture as a state dict; nothing is copied or read.

    Router row of expert e in block l: the unit vector of mean(x over its prompts) − mean(x over its negative prompts),
    x as `gate` says. The weights of the chosen experts sum to 1, so that equal experts give the dense model.

    Args:
        mixture: What it is made of.
        states: The opened models by path.

    Raises:
        MergeflowError: A model that is not dense Llama, Mistral, Qwen2 or Qwen3 of the base's sizes, or what the
            architecture of the mixture lacks.
    """
    base = states[mixture.base]
    config = config_of(base)
    target = _target(mixture, config)
    blocks = _blocks(mixture.base, base, target)
    together(*(partial(_check, path, states[path], base) for path in mixture.paths()))
    found = mixture_config(config, target, len(mixture.experts), mixture.experts_per_token, mixture.shared is not None)
    entries: dict[str, Entry] = {name: entry for name, entry in base.entries.items() if ".mlp." not in name}
    infos = {name: info for name, info in base.infos.items() if ".mlp." not in name}
    for name, (entry, info) in _moe_tensors(mixture, target, states, blocks).items():
        entries[name], infos[name] = entry, info
    return LazyStateDict(
        base.path,
        entries,
        dict(sorted(infos.items())),
        {},
        tied={name: first for name, first in base.tied.items() if name in infos and first in infos},
        shards=shards_like(list(states.values()), infos),
        config=found,
    )


def _target(mixture: Mixture, config: Mapping[str, Any]) -> Target:
    """Return the architecture of a mixture."""
    target = TARGETS.get(str(config.get("model_type")))
    if target is None:
        raise MergeflowError(
            f"'{mixture.base}' has model_type {config.get('model_type', 'of no config.json')}: mixtures are made of "
            f"dense models of {', '.join(TARGETS)}, in folders with config.json."
        )
    if mixture.shared is not None and not target.shared:
        raise MergeflowError(
            f"`shared`: a {target.model_type} has no expert that every token passes through; remove it."
        )
    return target


def _moe_tensors(
    mixture: Mixture, target: Target, states: Mapping[str, LazyStateDict], blocks: int
) -> dict[str, tuple[Entry, TensorInfo]]:
    """Return the experts and routers of all blocks, by name."""
    base = states[mixture.base]
    found: dict[str, tuple[Entry, TensorInfo]] = {}

    def put(name: str, path: str, source: str, factor: float = 1.0) -> None:
        info, own, entry = base.infos[source], states[path].infos[source], states[path].entries[source]
        plain = own.dtype == info.dtype and factor == 1
        found[name] = (entry if plain else _Changed(entry, info.dtype, factor), info)

    first = base.infos[f"model.layers.0.mlp.{target.parts[0]}.weight"]
    width, prompts = first.shape[1], [(one.prompts, one.negative_prompts) for one in mixture.experts]
    router = Router(base, config_of(base), mixture.gate, prompts, mixture.seed, width, blocks)
    for block in range(blocks):
        dense = f"model.layers.{block}.mlp."
        for part in target.parts:
            for index, one in enumerate(mixture.experts):
                put(target.expert(block, index, part), one.model, f"{dense}{part}.weight")
            if mixture.shared is not None:
                scale = mixture.shared.scale if part == "down_proj" else 1.0
                put(f"{dense}shared_expert.{part}.weight", mixture.shared.model, f"{dense}{part}.weight", scale)
        info = TensorInfo((len(mixture.experts), width), first.dtype)
        found[target.router(block)] = (RouterEntry(router, block, first.dtype), info)
        if target.shared:
            zeros = _shared_zeros(target, f"{dense}shared_expert", width, mixture.shared is None)
            for name, shape in zeros.items():
                found[name] = (_Zeros(first.dtype), TensorInfo(shape, first.dtype))
    return found


def _blocks(path: str, base: LazyStateDict, target: Target) -> int:
    """Return the number of blocks, whose MLPs must all be there."""
    config = config_of(base)
    count = int(config.get("num_hidden_layers") or 0)
    wanted = [f"model.layers.{block}.mlp.{part}.weight" for block in range(count) for part in target.parts]
    missing = [name for name in wanted if name not in base]
    strange = [name for name in base if ".mlp." in name and name not in wanted]
    if not wanted or missing or strange:
        odd = f"lacks '{missing[0]}'" if missing else f"has '{strange[0]}'" if strange else "says no number of layers"
        raise MergeflowError(
            f"'{path}' {odd}: a mixture is made of models with {', '.join(target.parts)} in model.layers.*.mlp, "
            "without biases, as many as config.json says."
        )
    return count


def _check(path: str, state: LazyStateDict, base: LazyStateDict) -> None:
    if state.is_task_vector:
        raise MergeflowError(
            f"'{path}' is an adapter or a task vector: merge it first, in a step (task_arithmetic with scale 1)."
        )
    names = [name for name in base if ".mlp." in name]
    odd = [name for name in names if name not in state or state.infos[name].shape != base.infos[name].shape]
    if odd:
        found = list(state.infos[odd[0]].shape) if odd[0] in state else "missing"
        raise MergeflowError(
            f"'{path}': '{odd[0]}' is {found}, the base's is {list(base.infos[odd[0]].shape)}"
            + (f", and {len(odd) - 1} more" if len(odd) > 1 else "")
            + ": experts of a mixture have the base's sizes."
        )


def _shared_zeros(target: Target, place: str, width: int, alone: bool) -> dict[str, tuple[int, ...]]:
    """Return shapes of zeros: a gate of the shared expert, open by half; where there is none an expert that adds 0."""
    found: dict[str, tuple[int, ...]] = {f"{place}_gate.weight": (1, width)}
    if alone:
        found |= {f"{place}.{part}.weight": (width, 1) if part == "down_proj" else (1, width) for part in target.parts}
    return found
