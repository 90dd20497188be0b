"""The Hessian of a loss at a model's weights: products with vectors, and its largest eigenvalue."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

Product = Callable[[np.ndarray], np.ndarray]


def hessian_product(module: nn.Module, loss: Callable[[], Tensor]) -> Product:
    """Return v ↦ ∇²L(θ) v over the module's parameters, flattened one after the other.

    Args:
        module: At θ; its parameters must not change while the product is used.
        loss: Computes L(θ), twice differentiable.

    Example:
        >>> net = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        >>> factors = torch.tensor([1.0, 3.0], dtype=torch.float64)
        >>> product = hessian_product(net, lambda: (net.weight**2 @ factors).sum())
        >>> product(np.array([1.0, 1.0]))
        array([2., 6.])
    """
    parameters = [value for value in module.parameters() if value.requires_grad]
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(), parameters, create_graph=True)

    def product(vector: np.ndarray) -> np.ndarray:
        parts = _like(vector, parameters)
        total = sum(((g * v).sum() for g, v in zip(gradients, parts, strict=True)), torch.zeros(()))
        found = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        zeros = (torch.zeros_like(p) if f is None else f for f, p in zip(found, parameters, strict=True))
        return np.concatenate([value.detach().double().cpu().numpy().ravel() for value in zeros])

    return product


def top_eigenvalue(product: Product, size: int, seed: int = 0, tolerance: float = 1e-4) -> float:
    """Return the largest eigenvalue of the Hessian by Lanczos.

    Args:
        product: Of `hessian_product`.
        size: Number of parameters.
        seed: Of the vector to start from.
        tolerance: Relative accuracy.
    """
    start = np.random.default_rng(seed).normal(size=size)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    return float(eigsh(operator, k=1, which="LA", v0=start, tol=tolerance, return_eigenvectors=False)[0])


def _like(vector: np.ndarray, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    parts = np.split(np.asarray(vector).ravel(), np.cumsum([value.numel() for value in parameters])[:-1])
    return [
        torch.from_numpy(np.ascontiguousarray(part)).to(value).view_as(value)
        for part, value in zip(parts, parameters, strict=True)
    ]
