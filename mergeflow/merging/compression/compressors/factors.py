"""Low-rank factors of each task's difference from the mean or from the base."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mergeflow.late import torch
from mergeflow.merging.architectures.architecture import ROWS, Cut, Form
from mergeflow.merging.compression.compressor import CompressArgs, Named, Payload, Stored, compressor
from mergeflow.merging.linalg.spectra import is_zero, low_rank_factors
from mergeflow.merging.matrices import Matrices, SplitQkv, rank_of
from mergeflow.merging.method import Shape, Stack

if TYPE_CHECKING:
    from torch import Tensor

Rank = Callable[[Shape], int]
"""The rank kept of a matrix of a shape."""


class FactorArgs(CompressArgs):
    """Arguments of compressors that keep factors."""

    split_qkv: SplitQkv = False
    non_matrices: Literal["average", "own"] = Field("average", description="what is kept of other tensors")


class CartIndexingArgs(FactorArgs):
    """Arguments of `cart_indexing`."""

    rank_ratio: float = Field(0.08, gt=0, le=1, description="rank kept, as a share of the smaller side, (0, 1]")
    rounding: Literal["ceil", "floor"] = Field("ceil", description="ceil(ratio · side), or max(1, floor(ratio · side))")
    matrices: Matrices = "attn_mlp"


class TsvCompressArgs(FactorArgs):
    """Arguments of `tsv_compress`."""

    rank_ratio: float | None = Field(
        None, gt=0, le=1, description="rank kept, as a share of the smaller side, (0, 1]; by default 1/T"
    )
    matrices: Matrices = "all"


def _factors(stack: Stack, delta: Tensor, ranks: list[int], form: Form) -> Named:
    if is_zero(delta):
        return {}
    named: Named = {}
    for index, (part, rank) in enumerate(zip(form.split(delta), ranks, strict=True)):
        if rank >= min(part.shape):
            named[f"full{index}"] = part
        else:
            left, right = low_rank_factors(part, rank, stack.model.cache)
            named[f"left{index}"], named[f"right{index}"] = left.contiguous(), right.contiguous()
    return named


def _product(stored: Stored, like: Tensor) -> Tensor:
    factors, pieces = stored.task_part, []
    for index in count():
        if f"full{index}" in factors:
            pieces.append(factors[f"full{index}"].to(like.dtype))
        elif f"left{index}" in factors:
            pieces.append(factors[f"left{index}"].to(like.dtype) @ factors[f"right{index}"].to(like.dtype))
        else:
            break
    if not pieces:
        return factors["delta"].to(like.dtype).reshape(like.shape) if "delta" in factors else torch.zeros_like(like)
    # Files without a form hold one matrix, or parts that are rows below each other.
    return _form(stored.shared["form"], like).join(pieces) if "form" in stored.shared else torch.cat(pieces)


def _code(form: Form) -> Named:
    """Return how a reader puts the parts together where they are not rows below each other: transposed, and the cut."""
    cut = form.cut
    if not form.stacked and not form.transposed and (cut is None or (cut.axis, cut.groups) == (ROWS, 1)):
        return {}
    return {"form": torch.tensor([form.transposed, *((cut.axis, cut.groups, *cut.sizes) if cut else ())])}


def _form(code: Tensor, like: Tensor) -> Form:
    transposed, *cut = code.tolist()
    return Form(like.ndim == 3, Cut(cut[0], cut[1], tuple(cut[2:])) if cut else None, bool(transposed))


def _payload(
    stack: Stack, shared: Named, deltas: Tensor, rank: Rank, args: CartIndexingArgs | TsvCompressArgs
) -> Payload:
    """Return factors of the matrices, and of other tensors what `non_matrices` says."""
    if stack.is_matrix(args.matrices):
        form = stack.form(args.split_qkv)
        ranks = [rank(tuple(part.shape)) for part in form.split(stack.base)]
        return Payload({**shared, **_code(form)}, tuple(_factors(stack, delta, ranks, form) for delta in deltas))
    if args.non_matrices == "own":
        return Payload(shared, tuple({} if is_zero(delta) else {"delta": delta} for delta in deltas))
    return Payload(shared, tuple({} for _ in deltas))


def _mean_plus(stored: Stored, args: CartIndexingArgs) -> Tensor:
    mean = stored.shared["mean"].to(torch.promote_types(stored.shared["mean"].dtype, torch.float32))
    return mean + _product(stored, mean)


@compressor("cart_indexing", CartIndexingArgs, _mean_plus, needs_base=False)
def cart_indexing(stack: Stack, args: CartIndexingArgs) -> Payload:
    """The experts' mean and each task's low-rank difference from it.

    θ̂_t = θ̄ + SVD_k(θ_t − θ̄),  θ̄ = mean θ_t,  k = ceil(rank_ratio · min side)

    Other tensors are the mean's, or with non_matrices: own each task's.

    Property:
        At rank ratio 1 with non_matrices: own every expert comes back, up to the rounding of the type it is stored in.

    Source:
        Choi et al., Revisiting weight averaging for model merging (CART), section 5, CART-Indexing.
    """
    mean = stack.taus.mean(0)
    shared = {"mean": stack.base + mean}
    return _payload(
        stack, shared, stack.taus - mean, lambda shape: rank_of(shape, args.rank_ratio, args.rounding), args
    )


def _base_plus(stored: Stored, args: TsvCompressArgs) -> Tensor:
    assert stored.base is not None
    if "mean" in stored.shared:
        return stored.base + stored.shared["mean"].to(stored.base.dtype).reshape(stored.base.shape)
    return stored.base + _product(stored, stored.base)


@compressor("tsv_compress", TsvCompressArgs, _base_plus)
def tsv_compress(stack: Stack, args: TsvCompressArgs) -> Payload:
    """The leading singular directions of each task vector (TSV-C).

    θ̂_t = θ0 + SVD_k(τ_t),  k = max(1, ⌊min side / T⌋), or max(1, ⌊rank_ratio · min side⌋)

    Other tensors are averaged, or with non_matrices: own each task's.

    Property:
        All tasks together take about the storage of one; one task alone is kept, up to the rounding of its type.

    Source:
        Gargiulo et al., Task singular vectors (CVPR 2025), section 4.1.
    """
    if not stack.is_matrix(args.matrices) and args.non_matrices == "average":
        return Payload({"mean": stack.taus.mean(0)}, tuple({} for _ in stack.taus))

    def rank(shape: Shape) -> int:
        if args.rank_ratio is not None:
            return rank_of(shape, args.rank_ratio, "floor")
        return max(1, min(shape) // len(stack.taus))

    return _payload(stack, {}, stack.taus, rank, args)
