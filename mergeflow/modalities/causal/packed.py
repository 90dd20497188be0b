"""Blocks of tokens as examples: the loss is the mean over tokens, the score the share that is predicted right."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mergeflow.errors import MergeflowError
from mergeflow.modalities.modules import activations
from mergeflow.modality import Model

_ROWS = 8192  # that are read at once: 17 MiB


class Blocks(NamedTuple):
    """All tokens of a split.

    Attributes:
        ids: int32 [N, block]; behind a shorter block stands the end token.
        lengths: int64 [N], 2 … block.
    """

    ids: Tensor
    lengths: Tensor


def stream(ids: np.ndarray, lengths: np.ndarray, documents: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the tokens of all pieces in a row, int32 [T], an end token where a text ends or its next piece is missing.

    Args:
        ids: int32 [P, R], the end token behind each piece's tokens.
        lengths: int [P], each less than R.
        documents: int64 [P], which document.
        places: int64 [P], which of its pieces.

    Example:
        >>> stream(np.array([[5, 6, 0], [7, 0, 0], [8, 0, 0]]), np.array([2, 1, 1]), np.array([0, 0, 1]), np.arange(3))
        array([5, 6, 7, 0, 8, 0])
    """
    goes_on = (np.diff(documents) == 0) & (np.diff(places) == 1)
    taken = lengths + np.append(~goes_on, True)
    columns = np.arange(ids.shape[1])
    return np.concatenate(
        [ids[at : at + _ROWS][columns < taken[at : at + _ROWS, None]] for at in range(0, len(ids), _ROWS)]
    )


def cut(tokens: np.ndarray, block: int, end: int) -> Blocks:
    """Cut tokens into blocks: every token is in one block, once, and no block has a single token.

    The first token of a block is predicted from nothing and has no loss, so a single one would have no loss at all: the
    block before it gives it its last token.

    Args:
        tokens: int [T], T ≥ 2.
        block: tokens of a block, at least 3.
        end: what stands behind a shorter block.

    Example:
        >>> [row[:n].tolist() for row, n in zip(*cut(np.arange(7), 3, 0))]
        [[0, 1, 2], [3, 4], [5, 6]]
    """
    count = -(-len(tokens) // block)
    lengths = np.full(count, block)
    lengths[-1] = len(tokens) - (count - 1) * block
    if count > 1 and lengths[-1] == 1:
        lengths[-2:] = block - 1, 2
    ids = np.full((count, block), end, np.int32)
    ids[np.arange(block) < lengths[:, None]] = tokens
    return Blocks(torch.from_numpy(ids), torch.from_numpy(lengths))


def windows(blocks: Blocks, stride: int) -> tuple[Blocks, Tensor]:
    """Lay windows as long as a block over the same tokens, so that each but the first token of all is new in one.

    Args:
        stride: tokens between the beginnings of two windows, 1 to block − 1.

    Returns:
        The windows, whose `ids` share memory where they overlap; and int64 [N], the place of the first token in each
        that no window before it has predicted: 1 in the first one, block − stride in the others.

    Example:
        >>> over, first = windows(cut(np.arange(7), 4, 0), 2)
        >>> [row[:n].tolist() for row, n in zip(*over, strict=True)], first.tolist()
        ([[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6]], [1, 2, 2])
    """
    block = blocks.ids.shape[1]
    if not 1 <= stride < block:
        raise MergeflowError(
            f"the stride is {stride}; expected 1 to {block - 1}: a window of {block} tokens begins with one that the "
            "window before it has predicted."
        )
    tokens = blocks.ids[torch.arange(block) < blocks.lengths[:, None]]
    starts = torch.arange(0, max(len(tokens) - block + stride, 1), stride)
    behind = int(starts[-1]) + block - len(tokens)
    padded = torch.cat([tokens, tokens[-1:].expand(behind)])
    first = torch.full_like(starts, block - stride)
    first[0] = 1
    return Blocks(padded.unfold(0, block, stride), (len(tokens) - starts).clamp(max=block)), first


IGNORED = -100  # the target where nothing is predicted: behind a block's end


@dataclass(frozen=True)
class PackedText:
    """One split of a task of texts; an example is a block.

    A token is predicted from those before it in its block; the first one of a block is not predicted.
    """

    task: str
    blocks: Blocks
    device: torch.device
    head: None = None
    metric: None = None

    def __len__(self) -> int:
        return len(self.blocks.lengths)

    def loss(self, model: Model, rows: Tensor) -> Tensor:
        r"""Return −(1/M) Σ log p(x_j | x_<j) over the M predicted tokens of `rows`, a scalar [], in nats."""
        logits, targets = self._predicted(model, rows)
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def scores(self, model: Model, rows: Tensor) -> Tensor:
        """Return the next-token accuracy of each of `rows`, float32 [n] in [0, 1].

        It is the share of a block's predicted tokens that are the likeliest one.
        """
        logits, targets = self._predicted(model, rows)
        right = (logits.argmax(dim=2) == targets).sum(dim=1)
        return right / (targets != IGNORED).sum(dim=1)

    def log_p(self, model: Model, rows: Tensor) -> Tensor:
        """Return log p(· | x_<j) for every predicted token of `rows`, [m, V]; m is n·(block − 1), less at the end."""
        logits, targets = self._predicted(model, rows)
        return logits[targets != IGNORED].log_softmax(dim=1)

    def token_losses(self, model: Model, rows: Tensor) -> Tensor:
        """Return −log p of each predicted token of `rows`, one block after the other, float32 [m]."""
        logits, targets = self._predicted(model, rows)
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return losses[targets.flatten() != IGNORED]

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the outputs of the named submodules for `rows`, [n, block, ...] each."""
        ids = self.blocks.ids[rows].to(self.device, torch.int64)
        return activations(model.module, layers, lambda: model.module(ids))

    def _predicted(self, model: Model, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, block, V] in float32 or wider, and the token that each place predicts, [n, block]."""
        ids = self.blocks.ids[rows].to(self.device, torch.int64)
        places = torch.arange(1, ids.shape[1] + 1)
        following = torch.cat([ids[:, 1:], ids[:, :1]], dim=1)
        inside = (places < self.blocks.lengths[rows][:, None]).to(self.device)
        logits: Tensor = model.module(ids)
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        return logits, following.masked_fill(~inside, IGNORED)
