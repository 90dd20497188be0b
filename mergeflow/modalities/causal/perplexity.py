"""The perplexity of a task's texts under a model."""

import math

import torch

from mergeflow.modalities.causal.packed import PackedText
from mergeflow.modality import Model


@torch.inference_mode()
def perplexity(model: Model, examples: PackedText, batch_size: int = 32) -> float:
    r"""Return exp(−(1/M) Σ_j log p(x_j | x_<j)) over all M predicted tokens of a split, at least 1.

    x_<j are the tokens before x_j in its block; the first token of a block is not predicted. The sum is in float64.

    Args:
        model: as it stands.
        examples: the split.
        batch_size: blocks that are computed at once; it changes the result by rounding alone.

    Example:
        >>> from torch import nn
        >>> from mergeflow.modality import Network
        >>> from mergeflow.modalities.causal.blocks import Blocks
        >>> even = Network(nn.Embedding.from_pretrained(torch.zeros(5, 5)))  # gives every token the same chance
        >>> blocks = Blocks(torch.tensor([[1, 2, 3, 0]], dtype=torch.int32), torch.tensor([3]))
        >>> round(perplexity(even, PackedText("tales", blocks, torch.device("cpu"))), 4)
        5.0
    """
    total, count = 0.0, 0
    for rows in torch.arange(len(examples)).split(batch_size):
        found = examples.token_losses(model, rows).double()
        total, count = total + float(found.sum()), count + len(found)
    return math.exp(total / count)
