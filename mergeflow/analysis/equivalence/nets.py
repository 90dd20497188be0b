"""The nets of Theorem 2, which are those of the modality `toy` without heads; and small random tasks for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mergeflow.analysis.equivalence.flat import flat_weights, weights_at
from mergeflow.errors import unknown_name
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.toy.net import ACTIVATIONS, FeedForward
from mergeflow.modalities.toy.preparation import open_toy

# name: β = sup |φ'|, γ = sup |φ''| where it exists. All have φ(0) = 0.
SLOPES = {"tanh": (1.0, 4 / (3 * 3**0.5)), "relu": (1.0, 0.0), "linear": (1.0, 0.0)}


@dataclass(frozen=True)
class Net:
    r"""A depth-L net f(x) = W_L φ(W_{L−1} ... φ(W_1 x)), and what the theorem bounds of it at flat weights.

    Args:
        widths: D_0 (input), ..., D_L (classes); layer l has the weight W_l of shape [D_l, D_{l−1}].
        activation: a name of `SLOPES`.
        seed: of the weights, N(0, 2 / fan-in).

    Raises:
        MergeflowError: for an unknown activation.

    Source: Zhou et al. 2025, Theorem 2.
    """

    widths: tuple[int, ...]
    activation: str
    seed: int = 0

    def __post_init__(self) -> None:
        if self.activation not in SLOPES:
            raise unknown_name("activation", self.activation, SLOPES)

    @cached_property
    def module(self) -> FeedForward:
        """The net in float64, its last layer without activation."""
        return FeedForward(self.widths, self.activation, seed=self.seed, logits=True)

    @property
    def start(self) -> Tensor:
        """The drawn weights, [P]."""
        return flat_weights(self.module)

    @property
    def slopes(self) -> tuple[float, float]:
        """Return β ≥ |φ'| and γ ≥ |φ''|."""
        return SLOPES[self.activation]

    def switched(self, points: Sequence[Tensor], inputs: Tensor) -> int:
        """Count the (input, hidden unit) pairs whose pre-activation changes its sign between the points.

        A Taylor expansion of a ReLU net holds while none does: beyond a kink the gradient jumps.

        Args:
            points: flat weights, [P] each.
            inputs: [N, D_0].
        """
        sides = torch.stack([self._sides(point, inputs) for point in points])
        return int((sides != sides[0]).any(dim=0).sum())

    def spectral_norms(self, points: Sequence[Tensor]) -> list[float]:
        """Return s_l = max over the points, flat weights [P], of ‖W_l‖₂, for every layer."""
        norms = [[float(torch.linalg.matrix_norm(w, 2)) for w in self._matrices(point)] for point in points]
        return [max(layer) for layer in zip(*norms, strict=True)]

    def _matrices(self, point: Tensor) -> list[Tensor]:
        return [*weights_at(self.module, point).values()]

    def _sides(self, point: Tensor, inputs: Tensor) -> Tensor:
        sides = []
        for weight in self._matrices(point)[:-1]:
            inputs = inputs @ weight.T
            sides.append(inputs > 0)
            inputs = ACTIVATIONS[self.activation]()(inputs)
        return torch.cat(sides, dim=1)


def random_tasks(count: int, inputs: int, classes: int, examples: int, seed: int) -> list[Classification]:
    """Return `count` tasks of the source `toy:clouds` with float64 inputs [N, D], ‖x‖₂ ≤ 1, and labels [N].

    Every task has its own mean and its own teacher, so that the tasks' gradients differ.

    Args:
        count: T ≥ 1.
        inputs: D, the width of the inputs.
        classes: labels of each task.
        examples: N, for each task.
        seed: of all that is drawn.
    """
    place = f"clouds,inputs={inputs},classes={classes},train={examples},seed={seed}"
    tasks = []
    for number in range(1, count + 1):
        drawn = list(open_toy(f"task {number}", place, 0, Path()).splits["train"]())
        points = torch.stack([torch.from_numpy(example.read()) for example in drawn])
        labels = torch.tensor([example.label for example in drawn])
        tasks.append(Classification(f"task {number}", points / points.norm(dim=1).max(), labels))
    return tasks
