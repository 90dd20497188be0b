"""Pruning by rows: which neurons of the task vectors are summed."""

from __future__ import annotations

from math import floor
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mergeflow.merging.matrices import Matrices, SplitQkv
from mergeflow.merging.method import Args, Copies, Parts, Stack, all_but_matrices, matrices, method

if TYPE_CHECKING:
    from torch import Tensor


class RowPruneArgs(Args):
    """Arguments of `row_prune`."""

    keep: float = Field(0.5, ge=0, le=1, description="share of the rows of each matrix that are kept, 0 … 1")
    rows: Literal["largest", "smallest"] = Field("largest", description="which rows are kept, by their 2-norm")
    matrices: Matrices = "mlp"
    split_qkv: SplitQkv = False


@method(
    "row_prune",
    RowPruneArgs,
    elementwise=all_but_matrices,
    workspace=matrices(lambda args, shape: shape.nbytes),  # the sum
    on_device=Copies(1, 2.1),
)
def row_prune(stack: Stack, args: RowPruneArgs) -> Parts:
    """Sum of the task vectors without the smallest rows of their matrices.

    m_t = 1 for the ⌊keep·m⌋ rows of a matrix [m, n] of τ_t with the largest 2-norm, else 0; of equal rows the first
    θ = θ0 + scale · Σ w_t m_t ⊙ τ_t;  other tensors: θ0 + scale · Σ w_t τ_t

    A row of a matrix [out, in] is what one neuron reads. `rows: smallest` is the control, which should do harm.

    Property:
        At keep 1 it is task arithmetic; whole neurons of each expert are either taken or left at the base.

    Source:
        Li et al., When is task vector provably effective for model editing? (ICLR 2025), corollary 2.
    """
    if not stack.is_matrix(args.matrices):
        return stack.base, stack.weighted.sum(0)
    return stack.base, stack.merged(_sum_of_kept_rows, args)


def _sum_of_kept_rows(matrices: Tensor, args: RowPruneArgs) -> Tensor:
    """Return the sum [m, n] of matrices [T, m, n], whose other rows become 0."""
    order = matrices.norm(dim=2).argsort(dim=1, descending=args.rows == "largest", stable=True)
    count = floor(args.keep * order.shape[1] + 1e-9)
    for matrix, rows in zip(matrices, order, strict=True):
        matrix[rows[count:]] = 0
    return matrices.sum(0)
