"""The nets of Theorem 2: weight matrices, one activation, no biases, cross-entropy; and small random tasks for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mergeflow.analysis.equivalence.gradient_descent import Loss
from mergeflow.errors import unknown_name

# name: the function, β = sup |φ'|, γ = sup |φ''| where it exists. All have φ(0) = 0.
ACTIVATIONS = {
    "tanh": (torch.tanh, 1.0, 4 / (3 * 3**0.5)),
    "relu": (torch.relu, 1.0, 0.0),
    "linear": (lambda hidden: hidden, 1.0, 0.0),
}


@dataclass(frozen=True)
class FeedForward:
    r"""A depth-L net f(x) = W_L φ(W_{L−1} ... φ(W_1 x)) on flat parameters.

    Args:
        widths: D_0 (input), ..., D_L (classes); layer l has the weight W_l of shape [D_l, D_{l−1}].
        activation: a name of `ACTIVATIONS`.

    Raises:
        MergeflowError: for an unknown activation.

    Source: Zhou et al. 2025, Theorem 2.
    """

    widths: tuple[int, ...]
    activation: str

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise unknown_name("activation", self.activation, ACTIVATIONS)

    @property
    def slopes(self) -> tuple[float, float]:
        """Return β ≥ |φ'| and γ ≥ |φ''|."""
        return ACTIVATIONS[self.activation][1:]

    def weights(self, point: Tensor) -> list[Tensor]:
        """Return W_1, ..., W_L of the flat parameters [P]."""
        shapes = list(zip(self.widths[1:], self.widths[:-1], strict=True))
        parts = point.split([rows * columns for rows, columns in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def logits(self, point: Tensor, inputs: Tensor) -> Tensor:
        """Return f(x) of inputs [N, D_0] as [N, D_L]."""
        activate = ACTIVATIONS[self.activation][0]
        *hidden, last = self.weights(point)
        for weight in hidden:
            inputs = activate(inputs @ weight.T)
        return inputs @ last.T

    def switched(self, points: Sequence[Tensor], inputs: Tensor) -> int:
        """Count the (input, hidden unit) pairs whose pre-activation changes its sign between the points.

        A Taylor expansion of a ReLU net holds while none does: beyond a kink the gradient jumps.
        """
        sides = torch.stack([self._sides(point, inputs) for point in points])
        return int((sides != sides[0]).any(dim=0).sum())

    def _sides(self, point: Tensor, inputs: Tensor) -> Tensor:
        activate, sides = ACTIVATIONS[self.activation][0], []
        for weight in self.weights(point)[:-1]:
            inputs = inputs @ weight.T
            sides.append(inputs > 0)
            inputs = activate(inputs)
        return torch.cat(sides, dim=1)

    def loss(self, inputs: Tensor, labels: Tensor) -> Loss:
        """Return the mean cross-entropy over inputs [N, D_0] and labels [N] as a function of the flat parameters."""
        return lambda point: cross_entropy(self.logits(point, inputs), labels)

    def spectral_norms(self, points: Sequence[Tensor]) -> list[float]:
        """Return s_l = max over the points of ‖W_l‖₂, for every layer."""
        norms = [[float(torch.linalg.matrix_norm(w, 2)) for w in self.weights(point)] for point in points]
        return [max(layer) for layer in zip(*norms, strict=True)]


def random_feed_forward(net: FeedForward, seed: int, gain: float = 1.0) -> Tensor:
    """Return flat float64 weights with entries N(0, gain² · 2 / fan-in)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = zip(net.widths[1:], net.widths[:-1], strict=True)
    return torch.cat(
        [
            gain * (2 / columns) ** 0.5 * torch.randn(rows * columns, generator=generator, dtype=torch.float64)
            for rows, columns in shapes
        ]
    )


def random_tasks(count: int, inputs: int, classes: int, images: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return `count` tasks of (inputs [N, D] with ‖x‖₂ ≤ 1, labels [N]): Gaussian clouds labelled by linear teachers.

    Every task has its own mean and its own teacher, so that the tasks' gradients differ.
    """
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for _ in range(count):
        mean, teacher = (torch.randn(*shape, generator=generator).double() for shape in ((inputs,), (inputs, classes)))
        cloud = torch.randn(images, inputs, generator=generator).double()
        labels = (cloud @ teacher).argmax(dim=1)
        points = cloud + 0.5 * mean
        tasks.append((points / points.norm(dim=1).max(), labels))
    return tasks
