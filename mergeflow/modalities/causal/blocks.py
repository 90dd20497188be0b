"""Blocks of tokens: the texts of a split one after the other, an end token behind each, cut into equal parts."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mergeflow.errors import MergeflowError

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
        blocks: of a split.
        stride: tokens between the beginnings of two windows, 1 to block − 1.

    Returns:
        The windows, whose `ids` share memory where they overlap; and int64 [N], the place of the first token in each
        that no window before it has predicted: 1 in the first one, block − stride in the others.

    Raises:
        MergeflowError: such windows do not overlap.

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
