"""What is known of a whole model before any weight is read: from names, shapes, types and ties alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.checks import infos_of
from mergeflow.checkpoints.header import FLOAT32, FLOAT64
from mergeflow.checkpoints.reader import tied_names
from mergeflow.late import torch
from mergeflow.merging.architectures.architecture import architecture_of
from mergeflow.merging.linalg.cache import FactorCache
from mergeflow.merging.stack import Model

if TYPE_CHECKING:
    from torch import Tensor

State = Mapping[str, "Tensor"]


def model_of(
    base: State,
    experts: Mapping[str, State],
    weights: Mapping[str, float] | None = None,
    data: Mapping[str, Any] | None = None,
    cache: FactorCache | None = None,
    config: Mapping[str, Any] | None = None,
    kept: Collection[str] = (),
    varied: Mapping[str, Any] | None = None,
    beside: int = 0,
) -> Model:
    """Return what methods may know about the whole model, from shapes and types alone.

    Args:
        base: The base's state dict, in memory or lazy.
        experts: The experts' state dicts by name, in the order of the recipe.
        weights: Weights by expert; missing ones are 1.
        data: Statistics of data that some methods need, by kind, then expert.
        cache: Kept factorisations.
        config: The base's config.json, for a base in memory.
        kept: Names of tensors that stay the base's.
        varied: Weights that vary over the model, by expert.
        beside: As of `Model`.
    """
    infos, given = infos_of(base), weights or {}
    found = [info.dtype for state in (base, *experts.values()) for info in infos_of(state).values()]
    return Model(
        experts=tuple(sorted(experts)),
        listed=tuple(experts),
        weights=tuple(float(given.get(name, 1.0)) for name in sorted(experts)),
        shapes={
            name: info.shape
            for name, info in sorted(infos.items())
            if info.dtype.is_floating_point and name not in kept
        },
        dtype=FLOAT64 if FLOAT64 in found else FLOAT32,
        data=data or {},
        tied=common_ties(base, experts),
        cache=cache,
        varied=varied or {},
        architecture=architecture_of(base, config),
        beside=beside,
    )


def common_ties(base: State, experts: Mapping[str, State]) -> dict[str, str]:
    """Return the names that share storage in the base and stay equal in every expert, with the first of their group."""
    return {
        name: first
        for name, first in tied_names(base).items()
        if all(_tied_in(state, name, first) for state in experts.values())
    }


def _tied_in(state: State, name: str, first: str) -> bool:
    """Whether two names tied in the base are so in an expert; of task vectors only their values can tell."""
    if tied_names(state).get(name) == first:
        return True
    if not getattr(state, "is_task_vector", False) or (name in state) != (first in state):
        return False
    return name not in state or torch.equal(state[name], state[first])
