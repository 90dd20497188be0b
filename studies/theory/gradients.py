"""Gradients along a fine-tuning run: the length of each epoch's gradient, and its angle to the first."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mergeflow.analysis.geometry import dot, norm
from mergeflow.modality import Examples, Model

Gradient = Mapping[str, Tensor]


def mean_gradient(model: Model, examples: Examples, batch_size: int = 256) -> dict[str, Tensor]:
    """Return ∇L of the mean loss L over all examples of a task, by parameter; chunks are summed in order.

    Args:
        model: its trained parameters' `grad` is overwritten.
        examples: at least one.
        batch_size: examples per chunk.
    """
    module = model.module
    module.zero_grad(set_to_none=True)
    for rows in torch.arange(len(examples)).split(batch_size):
        (examples.loss(model, rows) * (len(rows) / len(examples))).backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad and p.grad is not None}
    module.zero_grad(set_to_none=True)
    return gradients


def shares(norms: Sequence[float]) -> list[float]:
    """Return ‖g_k‖ / Σ_k' ‖g_k'‖.

    Source: Zhou et al. 2025, On Task Vectors and Gradients, Figure 3a.

    Example:
        >>> shares([2.0, 1.0, 1.0])
        [0.5, 0.25, 0.25]
    """
    total = sum(norms)
    return [value / total if total else 1 / len(norms) for value in norms]


def cosines_to_first(gradients: Sequence[Gradient]) -> list[float]:
    """Return cos(g_k, g_1) for every k, in float64; 0 where a gradient is zero.

    Source: Zhou et al. 2025, On Task Vectors and Gradients, Figure 3b.

    Example:
        >>> import torch
        >>> cosines_to_first([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}])
        [1.0, 0.0]
    """
    first = gradients[0]
    lengths = [norm(gradient) * norm(first) for gradient in gradients]
    return [dot(g, first) / length if length else 0.0 for g, length in zip(gradients, lengths, strict=True)]
