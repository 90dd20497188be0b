"""Which tensors the spectral methods treat as matrices, and as how many."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import ceil
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from torch import Tensor

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.errors import MergeflowError


def _selection(value: Any) -> Any:
    patterns = isinstance(value, list | tuple) and value and all(isinstance(one, str) for one in value)
    if not patterns and value not in ("attn_mlp", "all"):
        raise ValueError(f"expected attn_mlp, all, or a list of patterns of names, found {value!r:.60}")
    return value


Selection = Annotated[Literal["attn_mlp", "all"] | tuple[str, ...], BeforeValidator(_selection)]
"""`attn_mlp`: names holding attn or mlp; `all`: all matrices but text projection and token embedding; or patterns."""

_FUSED = ("in_proj_weight", "qkv.weight", "query_key_value.weight", "c_attn.weight")


def is_matrix(name: str, shape: Sequence[int], selection: Selection) -> bool:
    """Whether a tensor is a 2-D weight with both sides > 1 that the selection holds.

    Example:
        >>> is_matrix("visual.resblocks.0.attn.out_proj.weight", (8, 8), "attn_mlp")
        True
    """
    if not _is_wide(shape):
        return False
    if selection == "attn_mlp":
        return "attn" in name or "mlp" in name
    if selection == "all":
        return "text_projection" not in name and "token_embedding" not in name
    return any(fnmatchcase(name, pattern) for pattern in selection)


def count_matrices(
    owner: str, selection: Selection | None, infos: Mapping[str, TensorInfo], tied: Mapping[str, str]
) -> int:
    """Return how many tensors are treated as matrices.

    Args:
        owner: Who treats them, for the message: "method 'cart'".
        selection: What its arguments say; None where no matrices are treated apart.
        infos: The base's tensors.
        tied: Names that share storage, each with the first name of its group, by which both go.

    Raises:
        MergeflowError: A pattern, or `attn_mlp`, fits none of the matrices there are: all tensors would be treated like
            biases, and nobody told.
    """
    if selection is None:
        return 0
    shapes = {name: info.shape for name, info in infos.items() if info.dtype.is_floating_point and _is_wide(info.shape)}
    there = sorted({tied.get(name, name) for name in shapes})
    listed = "', '".join(there[:: max(1, len(there) // 5)][:6])
    known = f"The matrices are {len(there)}, such as '{listed}'." if there else "There is no matrix at all."
    for pattern in selection if isinstance(selection, tuple) else ():
        if not any(fnmatchcase(name, pattern) for name in there):
            raise MergeflowError(f"{owner}: the pattern '{pattern}' of `matrices` fits no matrix. {known}")
    chosen = sum(is_matrix(tied.get(name, name), shape, selection) for name, shape in shapes.items())
    if selection == "attn_mlp" and there and not chosen:
        raise MergeflowError(
            f"{owner}: `matrices: attn_mlp` takes names that hold attn or mlp, and no matrix has such a name. {known} "
            'Give `matrices: all`, or patterns such as ["*.attention.*", "*.dense.*"].'
        )
    return chosen


def _is_wide(shape: Sequence[int]) -> bool:
    return len(shape) == 2 and min(shape) > 1


def parts(name: str, matrix: Tensor, split_qkv: bool) -> list[Tensor]:
    """Return the matrix, or its query, key and value thirds where it is a fused one and these are wanted."""
    fused = name.endswith(_FUSED) and matrix.shape[-2] % 3 == 0 and matrix.shape[-2] > 3
    return list(matrix.chunk(3, dim=-2)) if split_qkv and fused else [matrix]


def join(pieces: list[Tensor]) -> Tensor:
    """Put the parts of a matrix together again; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def rank_of(shape: Sequence[int], ratio: float, rounding: Literal["ceil", "floor"]) -> int:
    """Return k for a matrix: ceil(ratio · min side), or max(1, floor(·)).

    Example:
        >>> rank_of((768, 3072), 0.08, "ceil"), rank_of((768, 3072), 0.08, "floor")
        (62, 61)
    """
    exact = ratio * min(shape)
    # A product such as 0.07 · 100 = 7.000000000000001 must not round up to 8.
    near = round(exact)
    if abs(exact - near) < 1e-9:
        return max(1, near)
    return ceil(exact) if rounding == "ceil" else max(1, int(exact))
