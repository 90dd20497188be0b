"""The one-layer nonlinear Transformer, its hinge loss and its training by mini-batch SGD."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from mergeflow.analysis.provable.data import PatternTask

_IN_CACHE = 32  # sequences at a time: their hidden layer [32, P, m] stays in the processor's cache


@dataclass(frozen=True)
class Weights:
    """Ψ = {V, W} with the frozen output weights a, one or a stack of them.

    Attributes:
        attention: W = W_Kᵀ W_Q, [..., d, d].
        value: V = W_O W_V, [..., m, d].
    """

    attention: Tensor
    value: Tensor

    def plus(self, other: "Weights", scale: float | Tensor = 1.0) -> "Weights":
        """Return Ψ + scale · Ψ′, entry by entry; a scale [k] gives a stack of k."""
        factor = torch.as_tensor(scale, dtype=self.value.dtype)[..., None, None]
        return Weights(self.attention + factor * other.attention, self.value + factor * other.value)

    def minus(self, other: "Weights") -> "Weights":
        """Return Ψ − Ψ′: with Ψ′ = Ψ^(0), the task vector."""
        return self.plus(other, -1.0)


def initial(
    dimensions: int, width: int, seed: int, spread: float = 0.5, positions: int | None = None
) -> tuple[Weights, Tensor]:
    """Draw Ψ^(0) and a.

    W, V ~ N(0, ξ²), ξ = spread/√m;  a_i ∈ {1/√m, −1/√m}

    Args:
        dimensions: d.
        width: m.
        seed: of the draw.
        spread: ξ√m, at most 1 in the paper.
        positions: P for an a of its own at every position, as Equation 4 is indexed; by default one a is shared, as
            the proofs (Definition 4) have it.

    Returns:
        Ψ^(0), and a, [m] or [P, m].
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(rows, dimensions, generator=generator, dtype=torch.float64) for rows in (dimensions, width)]
    shape = (width,) if positions is None else (positions, width)
    signs = torch.randint(2, shape, generator=generator).double() * 2 - 1
    attention, value = (spread / width**0.5 * one for one in drawn)
    return Weights(attention, value), signs / width**0.5


def outputs(attention: Tensor, value: Tensor, output: Tensor, inputs: Tensor) -> Tensor:
    """Return f(X; Ψ), [n].

    f(X; Ψ) = (1/P) Σ_l aᵀ ReLU(V Σ_s x_s softmax_s(x_sᵀ W x_l))

    Args:
        attention: W, [d, d].
        value: V, [m, d].
        output: a, [m], or [P, m] for one at every position.
        inputs: X, [n, P, d].

    Source:
        Li et al. 2025, Equation 4, with W = W_Kᵀ W_Q and V = W_O W_V.
    """
    return torch.cat([_scores(attention, value, output, part) for part in inputs.split(_IN_CACHE)])


def _scores(attention: Tensor, value: Tensor, output: Tensor, inputs: Tensor) -> Tensor:
    mass = torch.softmax(inputs @ attention @ inputs.mT, dim=-2)  # [n, s, l], a distribution over s
    hidden = torch.relu(mass.mT @ inputs @ value.mT)  # [n, l, m]
    at_positions = hidden @ output if output.dim() == 1 else (hidden * output).sum(-1)
    return at_positions.mean(-1)


def hinge(attention: Tensor, value: Tensor, output: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of max(1 − y f(X; Ψ), 0).

    Args:
        attention: W, [d, d].
        value: V, [m, d].
        output: a, [m] or [P, m].
        inputs: X, [n, P, d].
        labels: y, [n], −1 or 1.
    """
    return torch.relu(1 - labels * outputs(attention, value, output, inputs)).mean()


_GRADIENTS = grad(hinge, argnums=(0, 1))


@dataclass(frozen=True)
class Training:
    """Mini-batch SGD: step η, batch B, T steps, seed of the batches."""

    step: float
    batch: int
    steps: int
    seed: int = 0


def fine_tune(
    start: Weights,
    output: Tensor,
    task: PatternTask,
    training: Training,
    watch: Callable[[int, Weights], bool] | None = None,
) -> Weights:
    """Return Ψ*_T: V and W after T steps of SGD on the hinge loss with fresh batches; a stays as it is.

    Args:
        start: Ψ^(0).
        output: a, [m] or [P, m].
        task: the task.
        training: its settings.
        watch: called with the number of steps taken and the weights, before the first step and after each; True ends
            the training.
    """
    generator = torch.Generator().manual_seed(training.seed)
    attention, value = start.attention, start.value
    for done in range(training.steps):
        if watch and watch(done, Weights(attention, value)):
            break
        inputs, labels = task.draw(training.batch, generator)
        by_attention, by_value = _GRADIENTS(attention, value, output, inputs, labels)
        attention, value = attention - training.step * by_attention, value - training.step * by_value
    return Weights(attention, value)


@dataclass(frozen=True)
class Judged:
    """How models do on a test set; arrays over a stack of models.

    Attributes:
        hinge: mean hinge loss.
        accuracy: share of y f > 0, in [0, 1].
        margin: mean of y f.
    """

    hinge: Tensor
    accuracy: Tensor
    margin: Tensor


def judge(models: Weights, output: Tensor, inputs: Tensor, labels: Tensor) -> Judged:
    """Judge a stack of models on test data.

    Args:
        models: W [k, d, d] and V [k, m, d].
        output: a.
        inputs: X, [n, P, d].
        labels: y, [n].
    """
    along = vmap(lambda attention, value: labels * outputs(attention, value, output, inputs), chunk_size=1)
    margins = along(models.attention, models.value)
    return Judged(torch.relu(1 - margins).mean(1), (margins > 0).double().mean(1), margins.mean(1))


def combined(start: Weights, vectors: Sequence[Weights], scales: Tensor) -> Weights:
    """Return the stack Ψ^(0) + Σ_i λ_i ΔΨ_i.

    Args:
        start: Ψ^(0).
        vectors: K task vectors.
        scales: λ, [k, K].
    """
    attention = start.attention + torch.einsum("kt,tij->kij", scales, torch.stack([one.attention for one in vectors]))
    value = start.value + torch.einsum("kt,tij->kij", scales, torch.stack([one.value for one in vectors]))
    return Weights(attention, value)
