"""A model's architecture: its family and its config.json, and what they say of each tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mergeflow.checkpoints.folders import config_of
from mergeflow.merging.architectures.cuts import Config, Form, Rule
from mergeflow.merging.architectures.families import BARE, EVERYWHERE, UNKNOWN, Family, family_of
from mergeflow.merging.architectures.roles import TREATED, Role, Word, role_of

if TYPE_CHECKING:
    from torch import Tensor

Selected = Word | tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """What a model's tensors are, by its line of the table and its config.json, empty where there is none."""

    family: Family = UNKNOWN
    config: Config = field(default_factory=dict)

    def role(self, name: str, shape: Sequence[int]) -> Role | None:
        """Return a tensor's role; None where its name says nothing and it could be a matrix."""
        return role_of(name, shape, self.family.roles)

    def is_wide(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a tensor is a matrix with both sides > 1, or a stack of such matrices of experts."""
        if name.endswith("bias") or min(shape[-2:], default=0) < 2:
            return False
        return len(shape) == 2 or (len(shape) == 3 and self.role(name, shape) == "expert")

    def treats(self, name: str, shape: Sequence[int], selection: Selected) -> bool:
        """Whether a selection, a word or glob patterns of names, takes a tensor as a matrix or a stack of matrices."""
        if not self.is_wide(name, shape):
            return False
        if isinstance(selection, tuple):
            return any(fnmatchcase(name, pattern) for pattern in selection)
        role = self.role(name, shape)
        return role in TREATED[selection] or (selection == "all" and role in self.family.also)

    def fused(self, name: str) -> Rule | None:
        """Return the rule by which a fused weight is cut, where one is known."""
        rules = (*self.family.fused, *(EVERYWHERE if "model_type" in self.config else BARE))
        return next((rule for pattern, rule in rules if re.search(pattern, name, re.IGNORECASE)), None)

    def form(self, name: str, shape: Sequence[int], split_fused: bool) -> Form:
        """Return how a treated tensor of a shape, [m, n] or [E, m, n], is made of matrices."""
        rule = self.fused(name)
        cut = rule(name, shape, self.config) if rule is not None and (split_fused or rule.always) else None
        transposed = self.family.transposed is not None and bool(re.search(self.family.transposed, name))
        return Form(len(shape) == 3, cut, transposed)


def architecture_of(state: Mapping[str, Tensor], config: Config | None = None) -> Architecture:
    """Return a model's architecture: by `model_type` of config.json, given or its folder's, or without one by names.

    Example:
        >>> architecture_of({}, {"model_type": "gpt2"}).family.name
        'gpt2'
    """
    if config is None:
        config = config_of(state)
    model_type = config.get("model_type")
    return Architecture(family_of(model_type if isinstance(model_type, str) else None, state), config)
