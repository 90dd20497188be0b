"""Low-rank methods: the leading singular directions of task vectors, centred or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mergeflow.late import torch
from mergeflow.merging.linalg.spectra import add_truncated, is_zero
from mergeflow.merging.matrices import Matrices, SplitQkv, rank_of
from mergeflow.merging.method import (
    Args,
    Copies,
    Matrix,
    Parts,
    Stack,
    all_but_matrices,
    decomposition,
    matrices,
    method,
)

if TYPE_CHECKING:
    from torch import Tensor


class LowRankArgs(Args):
    rank_ratio: float = Field(0.08, gt=0, le=1, description="rank kept, as a share of the smaller side, (0, 1]")
    rounding: Literal["ceil", "floor"] = Field("ceil", description="ceil(ratio · side), or max(1, floor(ratio · side))")
    matrices: Matrices = "attn_mlp"
    split_qkv: SplitQkv = False


class CartArgs(LowRankArgs):
    @property
    def needs_base(self) -> bool:
        return False


def sum_truncated(stack: Stack, taus: Tensor, args: LowRankArgs) -> Tensor:
    """Return Σ w_t SVD_k(τ_t) of each matrix of a tensor, in the place of τ_1, of τ_t [T, *base.shape]."""
    form = stack.form(args.split_qkv)
    totals = form.split(taus[0])
    for index, weight in enumerate(stack.model.weights):
        for total, part in zip(totals, form.split(taus[index]) if index else totals, strict=True):
            rank = rank_of(part.shape, args.rank_ratio, args.rounding)
            add_truncated(total, part, rank, weight, stack.model.cache)
    return form.join(totals)


def _factor_bytes(args: LowRankArgs, shape: Matrix) -> int:
    rank = rank_of((shape.rows, shape.columns), args.rank_ratio, args.rounding)
    rank_found = shape.short // 8 if rank <= shape.short // 8 else shape.short
    factors = (shape.rows + shape.columns) * (max(rank, shape.short // 8) + rank) * shape.itemsize
    return max(decomposition(shape, rank_found), 16 * shape.short * rank_found + factors)


@method(
    "cart",
    CartArgs,
    elementwise=all_but_matrices,
    anchor="mean θ_t",
    workspace=matrices(lambda args, shape: shape.nbytes + _factor_bytes(args, shape)),  # with the mean
    on_device=Copies(1, 6),
)
def cart(stack: Stack, args: CartArgs) -> Parts:
    """Low-rank parts of the task vectors centred at the experts' mean.

    θ̄ = mean θ_t,  θ = θ̄ + scale · Σ w_t SVD_k(θ_t − θ̄),  k = ceil(rank_ratio · min side)

    What is not treated as a matrix is averaged: its centred task vectors sum to zero.

    Property:
        At rank ratio 1 (and equal weights) the direction is zero, so the result is the average; so it is at scale 0.

    Source:
        Choi et al., Revisiting weight averaging for model merging (CART), algorithm 1.
    """
    mean = stack.taus.mean(0)
    if not stack.is_matrix(args.matrices) or is_zero(stack.taus):
        return mean.add_(stack.base), torch.zeros_like(mean)
    taus = stack.take(weighted=False).sub_(mean)
    return mean.add_(stack.base), sum_truncated(stack, taus, args)


@method(
    "low_rank", LowRankArgs, elementwise=all_but_matrices, workspace=matrices(_factor_bytes), on_device=Copies(1, 5)
)
def low_rank(stack: Stack, args: LowRankArgs) -> Parts:
    """Low-rank parts of the original task vectors.

    θ = θ0 + scale · Σ w_t SVD_k(τ_t),  k = ceil(rank_ratio · min side);  other tensors: θ0 + scale · Σ w_t τ_t

    Property:
        At rank ratio 1 it is task arithmetic.

    Source:
        Choi et al., Revisiting weight averaging for model merging (CART), section 4, "original task vectors".
    """
    if not stack.is_matrix(args.matrices):
        return stack.base, stack.weighted.sum(0)
    return stack.base, sum_truncated(stack, stack.take(weighted=False), args)
