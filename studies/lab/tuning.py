"""How the studies train a model, on any examples from any weights, and what they do with its task vector."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import Field
from torch import Tensor

from mergeflow.modality import Examples, Model, State
from mergeflow.training import FineTuneSettings, fine_tune
from tasks.project.sections import Section


class Lasting(Protocol):
    """How long and how fast a model is trained."""

    def settings(self) -> FineTuneSettings:
        """Return it as the settings of the one training loop."""


class CosineSteps(Section):
    """AdamW without decay, at a rate that falls to 0 along a cosine."""

    learning_rate: float = Field(gt=0)
    steps: int = Field(ge=1)
    batch_size: int = Field(64, ge=1)

    def settings(self) -> FineTuneSettings:
        """Return these as the settings of the one training loop."""
        plain = {"optimiser": "adamw", "weight_decay": 0.0, "warmup": 0.1, "schedule": "cosine", "gradient_clip": 1.0}
        return FineTuneSettings.model_validate(
            {"regime": "steps", "save_every": 1_000_000, **plain, **self.model_dump()}
        )


def trained(model: Model, start: State, data: Examples, tuning: Lasting, seed: int) -> dict[str, Tensor]:
    """Return the weights after training.

    Args:
        model: whose weights are overwritten.
        seed: of the order of the examples.
    """
    return trained_together(model, start, [data], tuning, seed)


def trained_together(
    model: Model, start: State, tasks: Sequence[Examples], tuning: Lasting, seed: int
) -> dict[str, Tensor]:
    """Return the weights after training on several tasks, as many steps for each.

    Args:
        model: whose weights are overwritten.
        tasks: training examples of each; of one alone it is as `trained`.
        seed: of the order of the examples.
    """
    settings = tuning.settings()
    if len(tasks) > 1:
        settings = settings.model_copy(update={"regime": "joint"})
    model.load(start)
    with tempfile.TemporaryDirectory() as folder:
        fine_tune(model, tasks, settings, seed, Path(folder) / "state.safetensors", lambda: 0.0)
    return drawn_weights(model)


def drawn_weights(model: Model) -> dict[str, Tensor]:
    """Return a copy of the weights that a model has."""
    return {name: value.clone() for name, value in model.state().items()}


# Task vectors, their sums at scales, and the scale that is best


def task_vector(state: State, start: State) -> dict[str, Tensor]:
    """Return ΔΨ = Ψ − Ψ^(0), in the tensors' own types.

    Args:
        state: Ψ, tuned weights.
        start: Ψ^(0), what they were tuned from.
    """
    return {name: state[name] - value for name, value in start.items()}


def combined(start: State, vectors: Mapping[str, State], scales: Mapping[str, float]) -> dict[str, Tensor]:
    """Return Ψ^(0) + Σ λ_i ΔΨ_i.

    Args:
        start: Ψ^(0).
        vectors: ΔΨ by task.
        scales: λ by task; tasks that are not named have 0.
    """
    return {
        name: value + sum(scale * vectors[task][name] for task, scale in scales.items() if scale)
        for name, value in start.items()
    }


def best_scale(scales: Sequence[float], score: Callable[[float], float]) -> float:
    """Return the λ with the largest score; of several that are alike the middle one, the lower of two.

    Example:
        >>> [best_scale([0.1, 0.2, 0.3, 0.4], lambda scale: min(scale, most)) for most in (0.2, 0.3)]
        [0.3, 0.3]
    """
    scores = [score(scale) for scale in scales]
    best = [scale for scale, value in zip(scales, scores, strict=True) if value == max(scores)]
    return best[(len(best) - 1) // 2]
