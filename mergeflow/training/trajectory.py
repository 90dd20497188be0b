"""What is remembered of a fine-tuning run: one row per epoch, small enough to keep for ever."""

from dataclasses import asdict, dataclass, field
from typing import Any

import torch


@dataclass
class EpochRow:
    """Means over the steps of one epoch.

    Attributes:
        epoch: from 1.
        steps: optimiser steps done by its end.
        loss: mean cross-entropy in nats.
        gradient_norm: mean 2-norm of the whole gradient before clipping.
        distance: 2-norm of (weights − base weights) at its end.
        validation_accuracy: fraction in [0, 1] at its end.
    """

    epoch: int
    steps: int
    loss: float
    gradient_norm: float
    distance: float
    validation_accuracy: float


@dataclass
class Trajectory:
    """The rows of a run, and the sums of the epoch that is under way."""

    rows: list[EpochRow] = field(default_factory=list)
    loss_sum: float = 0.0
    norm_sum: float = 0.0
    steps_in_epoch: int = 0

    def add_step(self, loss: float, gradient_norm: float) -> None:
        self.loss_sum += loss
        self.norm_sum += gradient_norm
        self.steps_in_epoch += 1

    def close_epoch(self, steps: int, distance: float, validation_accuracy: float) -> None:
        count = self.steps_in_epoch
        row = EpochRow(
            len(self.rows) + 1, steps, self.loss_sum / count, self.norm_sum / count, distance, validation_accuracy
        )
        self.rows.append(row)
        self.loss_sum = self.norm_sum = 0.0
        self.steps_in_epoch = 0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Trajectory":
        return cls(**{**value, "rows": [EpochRow(**row) for row in value["rows"]]})


def distance_between(parameters: dict[str, torch.Tensor], origin: dict[str, torch.Tensor]) -> float:
    """Return ‖θ − θ0‖₂ over all parameters, in float64."""
    squares = sum(float((parameters[name].detach().double() - origin[name].double()).square().sum()) for name in origin)
    return float(squares**0.5)
