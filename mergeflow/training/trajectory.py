"""The record of a fine-tuning run: one row per epoch, and its cost."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class EpochRow:
    """One epoch, counted from 1; the last one may be a part of an epoch.

    Attributes:
        steps: optimiser steps done by its end.
        loss: mean loss over its steps, in nats.
        gradient_norm: mean 2-norm of the whole gradient before clipping.
        mean_gradient_norm: 2-norm of the mean of the gradients; for one full batch the same as `gradient_norm`.
        cosine_to_first: cosine of the mean gradient with that of the run's first epoch, in [−1, 1].
        parameter_norm: 2-norm of the trained parameters at its end.
        distance: 2-norm of (parameters − parameters at the start) at its end.
        validation_accuracy: fraction in [0, 1] at its end; mean over the tasks of a joint run.
    """

    epoch: int
    steps: int
    loss: float
    gradient_norm: float
    mean_gradient_norm: float
    cosine_to_first: float
    parameter_norm: float
    distance: float
    validation_accuracy: float


@dataclass
class Cost:
    """What a run took; not part of any fingerprint, because it differs from run to run.

    Attributes:
        examples: examples that went through the model in training.
        seconds: wall time of the training steps and validations.
        gpu_seconds: the part of `seconds` that held a CUDA device; 0 on a CPU.
        processor_seconds: processor time of the thread that trained; all of it where torch computes with one thread.
        peak_memory_mib: largest memory of the CUDA device, else of the process.
    """

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    peak_memory_mib: int = 0
    processor_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        per_second = self.examples / self.seconds if self.seconds else 0.0
        return {**asdict(self), "examples_per_second": round(per_second, 1)}

    def __add__(self, other: "Cost") -> "Cost":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Cost(**{**sums, "peak_memory_mib": max(self.peak_memory_mib, other.peak_memory_mib)})


@dataclass
class Trajectory:
    """The rows of a run, and the sums of the epoch that is under way."""

    rows: list[EpochRow] = field(default_factory=list)
    loss_sum: float = 0.0
    norm_sum: float = 0.0
    steps_in_epoch: int = 0
    gradient_sum: list[Tensor] = field(default_factory=list)
    first_gradient: list[Tensor] = field(default_factory=list)

    def add_step(self, loss: float, gradient_norm: float) -> None:
        self.loss_sum += loss
        self.norm_sum += gradient_norm
        self.steps_in_epoch += 1

    @torch.no_grad()
    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add a step's gradients before clipping, one per trained parameter and of its shape [...]."""
        if not self.gradient_sum:
            self.gradient_sum = [torch.zeros_like(gradient) for gradient in gradients]
        torch._foreach_add_(self.gradient_sum, list(gradients))

    @torch.no_grad()
    def close_epoch(self, steps: int, parameters: Sequence[Tensor], start: Sequence[Tensor], accuracy: float) -> None:
        """End the epoch under way with a row; `start` are the parameters [...] before the run."""
        count = self.steps_in_epoch
        mean = [gradient / count for gradient in self.gradient_sum]
        self.first_gradient = self.first_gradient or mean
        lengths = _norm(mean) * _norm(self.first_gradient)
        row = EpochRow(
            epoch=len(self.rows) + 1,
            steps=steps,
            loss=self.loss_sum / count,
            gradient_norm=self.norm_sum / count,
            mean_gradient_norm=_norm(mean),
            cosine_to_first=_dot(mean, self.first_gradient) / lengths if lengths else 0.0,
            parameter_norm=_norm(parameters),
            distance=_norm(p.double() - s.double() for p, s in zip(parameters, start, strict=True)),
            validation_accuracy=accuracy,
        )
        self.rows.append(row)
        self.loss_sum = self.norm_sum = 0.0
        self.steps_in_epoch = 0
        self.gradient_sum = []

    def as_json(self) -> list[dict[str, Any]]:
        """Return the rows as plain values."""
        return [asdict(row) for row in self.rows]

    def as_state(self) -> dict[str, Any]:
        """Return everything, to be saved with the run's state."""
        return {**vars(self), "rows": self.as_json()}

    @classmethod
    def from_state(cls, value: Mapping[str, Any], place: torch.device) -> "Trajectory":
        """Rebuild the trajectory from the state of `as_state`, wherever its tensors lie."""
        sums = {name: [tensor.to(place) for tensor in value[name]] for name in ("gradient_sum", "first_gradient")}
        return cls(**{**value, **sums, "rows": [EpochRow(**row) for row in value["rows"]]})


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float(x.double().flatten() @ y.double().flatten()) for x, y in zip(a, b, strict=True))


def _norm(a: Iterable[Tensor]) -> float:
    """Return the 2-norm of all tensors together; in double precision there is one of them at a time."""
    wide = (x.double().flatten() for x in a)
    return float(sum(float(x @ x) for x in wide) ** 0.5)
