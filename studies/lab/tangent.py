"""Linearised experts judged as what they are: the base's first-order Taylor expansion, with its features."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow import layout
from mergeflow.linearity.affine import Featured
from mergeflow.modality import Model, device_of
from mergeflow.training import LinearisedModel
from mergeflow.training.linearised import LinearisedModule
from studies.lab.inputs import Laboratory
from tasks.models import load_model, modality_of


def in_tangent_space(inputs: Laboratory) -> Laboratory:
    """Return the same with weights loaded into the base's expansion at θ0, of which experts `linearised` are weights.

    Args:
        inputs: the study's; they stay as they are.
    """
    part = copy(inputs)
    fresh = load_model(inputs.io, layout.BASE_MODEL, inputs.device)
    vars(part).update(model=LinearisedModel.of(fresh, modality_of(inputs.io).tower), _judged={})
    return part


@dataclass(frozen=True)
class TangentFeatures:
    """Features of the expansion: f^ℓ(x; θ0) + ∇_θ f^ℓ(x; θ0)ᵀ (θ − θ0) at every layer ℓ, linear in θ − θ0.

    Attributes:
        examples: whose features these are.
    """

    examples: Featured

    def __len__(self) -> int:
        return len(self.examples)

    @torch.no_grad()
    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return them for `rows`, [n, d] each.

        Args:
            model: a LinearisedModel, whose base has the weights θ0.
            rows: int64 [n].
            layers: names of the base's submodules.
        """
        assert isinstance(model, LinearisedModel)
        look = _Look(self.examples, model.base, layers)
        expansion = LinearisedModule(look).to(device_of(model))
        _load(expansion, model.state())
        flat: Tensor = expansion(rows)
        return dict(zip(layers, flat.split(look.widths, dim=1), strict=True))


class _Look(nn.Module):
    """A module that gives the features of all layers beside each other, [n, Σ d]."""

    def __init__(self, examples: Featured, model: Model, layers: Sequence[str]) -> None:
        super().__init__()
        self.module = model.module
        self.widths: list[int] = []
        self._look: Any = lambda rows: examples.features(model, rows, layers)

    def forward(self, rows: Tensor) -> Tensor:
        found = [value.flatten(1) for value in self._look(rows).values()]
        self.widths = [value.shape[1] for value in found]
        return torch.cat(found, dim=1)


def _load(expansion: LinearisedModule, state: Mapping[str, Tensor]) -> None:
    for name, weight in expansion.trained().items():
        weight.copy_(state[name.removeprefix("module.")])
