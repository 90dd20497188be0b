"""Gradients along a fine-tuning run: how long each epoch's is, and how it lies to the first."""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mergeflow.analysis.geometry import dot, norm

Gradient = Mapping[str, Tensor]


def mean_gradient(
    encoder: nn.Module,
    images: Tensor,
    labels: Tensor,
    logits: Callable[[Tensor], Tensor],
    batch_size: int = 256,
) -> dict[str, Tensor]:
    """Return ∇L of the mean cross-entropy L over all images of a task, by parameter; chunks are summed in order.

    Args:
        encoder: maps uint8 images [B, S, S, 3] to features [B, D]; its trained parameters' `grad` is overwritten.
        images: uint8 [N, S, S, 3], on the encoder's device.
        labels: int64 [N].
        logits: maps features [B, D] to class logits [B, C].
        batch_size: images per chunk.
    """
    encoder.zero_grad(set_to_none=True)
    for chunk, targets in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        loss = cross_entropy(logits(encoder(chunk)), targets, reduction="sum")
        (loss / len(labels)).backward()
    gradients = {name: p.grad for name, p in encoder.named_parameters() if p.requires_grad and p.grad is not None}
    encoder.zero_grad(set_to_none=True)
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
