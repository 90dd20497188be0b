"""The perplexity of a task's texts under a model."""

import math
from dataclasses import replace

import torch

from mergeflow.modalities.causal.packed import Blocks, PackedText, windows
from mergeflow.modality import Model


def perplexity(
    model: Model, examples: PackedText, batch_size: int = 32, stride: int | None = None, start: int | None = None
) -> float:
    r"""Return exp(−(1/M) Σ_j log p(x_j | x_<j)) over all M predicted tokens of a split, at least 1.

    Without a stride x_<j are the tokens before x_j in its block, and the first token of a block is not predicted. With
    one they are at least the block − stride tokens before x_j, or all there are, and only the first token of the split
    is not predicted.

    Args:
        batch_size: blocks that are computed at once; it changes the result by rounding alone.
        stride: tokens between the beginnings of two windows as long as a block, 1 to block − 1; None for blocks that do
            not overlap. It takes block / stride times as long.
        start: the token that the model's tokenizer puts before every text. Then each block begins with it, as all that
            the model was trained on did, and the first token of a block is predicted too. None: there is none.

    Example:
        >>> from torch import nn
        >>> from mergeflow.modality import Network
        >>> from mergeflow.modalities.causal.packed import Blocks
        >>> even = Network(nn.Embedding.from_pretrained(torch.zeros(5, 5)))  # gives every token the same chance
        >>> blocks = Blocks(torch.tensor([[1, 2, 3, 0]], dtype=torch.int32), torch.tensor([3]))
        >>> round(perplexity(even, PackedText("tales", blocks, torch.device("cpu"))), 4)
        5.0
    """
    total, count = total_loss(model, examples, batch_size, stride, start)
    return math.exp(total / count)


@torch.inference_mode()
def total_loss(
    model: Model, examples: PackedText, batch_size: int = 32, stride: int | None = None, start: int | None = None
) -> tuple[float, int]:
    """Return −Σ_j log p(x_j | x_<j) in nats, summed in float64, and how many tokens are predicted."""
    blocks, first = examples.blocks, torch.ones(len(examples), dtype=torch.int64)
    if stride is not None:
        blocks, first = windows(blocks, stride)
    if start is not None:
        ids = torch.cat([torch.full_like(blocks.ids[:, :1], start), blocks.ids], dim=1)
        blocks, first = Blocks(ids, blocks.lengths + 1), torch.where(first > 1, first + 1, 1)
    examples = replace(examples, blocks=blocks)
    total, count, places = 0.0, 0, torch.arange(1, blocks.ids.shape[1])
    for rows in torch.arange(len(examples)).split(batch_size):
        losses = examples.token_losses(model, rows)
        new = (places >= first[rows][:, None])[places < blocks.lengths[rows][:, None]]
        losses = losses[new.to(losses.device)].double()
        total, count = total + float(losses.sum()), count + len(losses)
    return total, count
