"""Full-batch gradient descent on losses of one flat parameter vector, and products with their Hessians."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mergeflow.errors import MergeflowError

Loss: TypeAlias = Callable[[Tensor], Tensor]
"""A mean loss over all data of a task, a scalar, as a function of the flat parameters [P]."""


def gradient(loss: Loss, point: Tensor) -> Tensor:
    """Return ∇L(θ), [P].

    Example:
        >>> gradient(lambda theta: (theta**3).sum(), torch.tensor([1.0, 2.0])).tolist()
        [3.0, 12.0]
    """
    leaf = point.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf)
    return slope


def hessian_vector(loss: Loss, point: Tensor, vector: Tensor) -> Tensor:
    """Return ∇²L(θ) v, [P], by differentiating ⟨∇L(θ), v⟩: twice the memory of a gradient, no matrix.

    Args:
        loss: L.
        point: θ, [P].
        vector: v, [P].

    Example:
        >>> hessian_vector(lambda theta: (theta**3).sum(), torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])).tolist()
        [6.0, 12.0]
    """
    leaf = point.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (product,) = torch.autograd.grad(slope @ vector, leaf)
    return product


def hessian(loss: Loss, point: Tensor) -> Tensor:
    """Return ∇²L(θ), [P, P], all its rows in one batch; for small nets only.

    Example:
        >>> hessian(lambda theta: theta.prod(), torch.tensor([2.0, 3.0])).tolist()
        [[0.0, 1.0], [1.0, 0.0]]
    """
    leaf = point.detach().clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (rows,) = torch.autograd.grad(slope, leaf, torch.eye(len(point)).to(point), is_grads_batched=True)
    return rows


def spectral_norm(loss: Loss, point: Tensor, products: int, seed: int = 0) -> float:
    """Return an estimate from below of ‖∇²L(θ)‖₂: power iteration with `products` Hessian-vector products.

    Args:
        loss: L.
        point: θ, [P].
        products: Hessian-vector products, at least 1.
        seed: of the vector that the iteration starts from.

    Example:
        >>> round(spectral_norm(lambda theta: (theta**2 * torch.tensor([1.0, -3.0])).sum(), torch.zeros(2), 20), 4)
        6.0
    """
    vector = torch.randn(len(point), generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(point)
    for _ in range(products):
        vector = hessian_vector(loss, point, vector / vector.norm())
        if not vector.any():
            return 0.0
    return float(vector.norm())


def summed(losses: Sequence[Loss]) -> Loss:
    """Return the joint loss Σ_t L_t(θ)."""
    return lambda point: torch.stack([loss(point) for loss in losses]).sum()


def descend(loss: Loss, start: Tensor, step: float, epochs: int) -> list[Tensor]:
    r"""Run full-batch gradient descent; one epoch is one step.

    τ^(0) = 0,  τ^(e+1) = τ^(e) − η ∇L(θ0 + τ^(e)).

    The displacement is summed in a variable of its own: rounding is relative to τ and not to θ0, and differences of
    order η³ stay visible in float64 down to η = 1e-6.

    Args:
        loss: the loss; of the task, or `summed` of all tasks.
        start: θ0, [P].
        step: η > 0.
        epochs: k ≥ 0.

    Returns:
        The k + 1 displacements τ^(0), ..., τ^(k) from θ0; the last is the task vector.

    Raises:
        MergeflowError: the descent leaves the finite numbers.

    Example:
        >>> descend(lambda theta: (theta**2).sum() / 2, torch.tensor([1.0]), 0.5, 2)
        [tensor([0.]), tensor([-0.5000]), tensor([-0.7500])]

    Source: Zhou et al. 2025, On Task Vectors and Gradients, section 2.
    """
    moves = [torch.zeros_like(start)]
    for epoch in range(epochs):
        moves.append(moves[-1] - step * gradient(loss, start + moves[-1]))
        if not moves[-1].isfinite().all():
            raise MergeflowError(
                f"gradient descent with step {step:g} diverged in epoch {epoch + 1} of {epochs}: choose a smaller step."
            )
    return moves


def merge(vectors: Sequence[Tensor], scale: float) -> Tensor:
    """Return the displacement of task arithmetic, θ_TA − θ0 = α Σ_t τ_t.

    Args:
        vectors: T task vectors, each [P].
        scale: α.

    Example:
        >>> merge([torch.tensor([1.0]), torch.tensor([3.0])], 0.5)
        tensor([2.])

    Source: Ilharco et al. 2023, Editing Models with Task Arithmetic.
    """
    return scale * torch.stack(list(vectors)).sum(dim=0)
