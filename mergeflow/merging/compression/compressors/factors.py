"""Low-rank factors of each task's difference from the mean or from the base."""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from mergeflow.merging.compression.compressor import CompressArgs, Named, Payload, Stored, compressor
from mergeflow.merging.linalg.spectra import is_zero, low_rank_factors
from mergeflow.merging.matrices import Selection, is_matrix, parts, rank_of
from mergeflow.merging.method import Stack


class FactorArgs(CompressArgs):
    """Arguments of compressors that keep factors."""

    split_qkv: bool = Field(False, description="treat a fused q/k/v weight as three matrices")
    non_matrices: Literal["average", "own"] = Field("average", description="what is kept of other tensors")


class CartIndexingArgs(FactorArgs):
    """Arguments of `cart_indexing`."""

    rank_ratio: float = Field(0.08, gt=0, le=1, description="rank kept, as a share of the smaller side, (0, 1]")
    rounding: Literal["ceil", "floor"] = Field("ceil", description="ceil(ratio · side), or max(1, floor(ratio · side))")
    matrices: Selection = Field("attn_mlp", description="which matrices are treated: attn_mlp, all, or glob patterns")


class TsvCompressArgs(FactorArgs):
    """Arguments of `tsv_compress`."""

    rank_ratio: float | None = Field(
        None, gt=0, le=1, description="rank kept, as a share of the smaller side, (0, 1]; by default 1/T"
    )
    matrices: Selection = Field("all", description="which matrices are treated: attn_mlp, all, or glob patterns")


def _factors(stack: Stack, delta: Tensor, ranks: list[int], args: FactorArgs) -> Named:
    if is_zero(delta):
        return {}
    found: Named = {}
    for index, (part, rank) in enumerate(zip(parts(stack.name, delta, args.split_qkv), ranks, strict=True)):
        if rank >= min(part.shape):
            found[f"full{index}"] = part
        else:
            left, right = low_rank_factors(part, rank, stack.model.cache)
            found[f"left{index}"], found[f"right{index}"] = left.contiguous(), right.contiguous()
    return found


def _product(own: Named, like: Tensor) -> Tensor:
    pieces = []
    for index in range(3):
        if f"full{index}" in own:
            pieces.append(own[f"full{index}"].to(like.dtype))
        elif f"left{index}" in own:
            pieces.append(own[f"left{index}"].to(like.dtype) @ own[f"right{index}"].to(like.dtype))
    if pieces:
        return torch.cat(pieces)
    return own["delta"].to(like.dtype).reshape(like.shape) if "delta" in own else torch.zeros_like(like)


def _payload(stack: Stack, deltas: Tensor, treated: bool, ranks: list[int], args: FactorArgs) -> tuple[Named, ...]:
    if treated:
        return tuple(_factors(stack, delta, ranks, args) for delta in deltas)
    if args.non_matrices == "own":
        return tuple({} if is_zero(delta) else {"delta": delta} for delta in deltas)
    return tuple({} for _ in deltas)


def _mean_plus(stored: Stored, args: CartIndexingArgs) -> Tensor:
    mean = stored.shared["mean"].to(torch.promote_types(stored.shared["mean"].dtype, torch.float32))
    return mean + _product(stored.own, mean)


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
    treated = is_matrix(stack.name, stack.base.shape, args.matrices)
    ranks = (
        [rank_of(part.shape, args.rank_ratio, args.rounding) for part in parts(stack.name, mean, args.split_qkv)]
        if treated
        else []
    )
    return Payload({"mean": stack.base + mean}, _payload(stack, stack.taus - mean, treated, ranks, args))


def _base_plus(stored: Stored, args: TsvCompressArgs) -> Tensor:
    assert stored.base is not None
    if "mean" in stored.shared:
        return stored.base + stored.shared["mean"].to(stored.base.dtype).reshape(stored.base.shape)
    return stored.base + _product(stored.own, stored.base)


@compressor("tsv_compress", TsvCompressArgs, _base_plus)
def tsv_compress(stack: Stack, args: TsvCompressArgs) -> Payload:
    """The leading singular directions of each task vector (TSV-C).

    θ̂_t = θ0 + SVD_k(τ_t),  k = ⌊min side / T⌋, or max(1, ⌊rank_ratio · min side⌋)

    Other tensors are averaged, or with non_matrices: own each task's.

    Property:
        All tasks together take about the storage of one; one task alone is kept exactly.

    Source:
        Gargiulo et al., Task singular vectors (CVPR 2025), section 4.1.
    """
    treated = is_matrix(stack.name, stack.base.shape, args.matrices)
    if not treated and args.non_matrices == "average":
        return Payload({"mean": stack.taus.mean(0)}, tuple({} for _ in stack.taus))
    pieces = parts(stack.name, stack.base, args.split_qkv) if treated else []
    if args.rank_ratio is None:
        ranks = [max(1, min(part.shape) // len(stack.taus)) for part in pieces]
    else:
        ranks = [rank_of(part.shape, args.rank_ratio, "floor") for part in pieces]
    return Payload({}, _payload(stack, stack.taus, treated, ranks, args))
