"""The perplexity of a task's texts under a model."""

import math
from dataclasses import dataclass

import torch

from mergeflow.modalities.causal.packed import PackedText
from mergeflow.modality import Model


@dataclass(frozen=True)
class Likelihood:
    """How likely a model finds the texts of a split.

    Attributes:
        loss: Mean −log p of a predicted token, in nats: the logarithm of the perplexity.
        tokens: How many are predicted: all but the first of each block.
    """

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss), at least 1."""
        return math.exp(self.loss)


@torch.inference_mode()
def likelihood(model: Model, examples: PackedText, batch_size: int = 32) -> Likelihood:
    r"""Return −(1/M) Σ_j log p(x_j | x_<j) over all M predicted tokens of a split, and M.

    x_<j are the tokens before x_j in its block; the first token of a block is not predicted. The sum is in float64.

    Args:
        model: as it stands.
        examples: the split.
        batch_size: blocks that are computed at once; it changes the result by rounding alone.
    """
    total, count = 0.0, 0
    for rows in torch.arange(len(examples)).split(batch_size):
        found = examples.token_losses(model, rows).double()
        total, count = total + float(found.sum()), count + len(found)
    return Likelihood(total / count, count)


def perplexity(model: Model, examples: PackedText, batch_size: int = 32) -> float:
    r"""Return exp(−(1/M) Σ_j log p(x_j | x_<j)) over all M predicted tokens of a split, at least 1.

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
    return likelihood(model, examples, batch_size).perplexity
