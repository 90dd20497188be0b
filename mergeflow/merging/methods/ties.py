"""TIES: trim, elect signs, and average what agrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import floor
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.checkpoints.header import DType
from mergeflow.late import torch
from mergeflow.merging.method import Args, Copies, Parts, Pass, Stack, method, tensors
from mergeflow.merging.thresholds import (
    count_kept,
    kth_smallest,
    majority_of,
    threshold_passes,
    trim_to,
    trimming_passes,
)

if TYPE_CHECKING:
    from torch import Tensor

Reduce = Literal["mean", "weighted_mean", "sum"]
REDUCE = "of the agreeing entries w τ̂: their mean, their sum over that of their weights, or their sum"


class TiesArgs(Args):
    keep: float = Field(0.2, ge=0, le=1, description="share of entries kept by magnitude, 0 … 1")
    trim: Literal["global", "tensor"] = Field(
        "global",
        description="trim over the whole task vector (buffers count too, as in the published code; `ignore` takes them "
        "out), or per tensor, where each keeps one entry at least",
    )
    reduce: Reduce = Field("mean", description=REDUCE)
    per_expert: ClassVar[tuple[str, ...]] = ("keep",)


def tensor_thresholds(values: Tensor, keep: float | Sequence[float]) -> Tensor:
    """Return the max(1, ⌊keep · n⌋)-th largest magnitude of each row of [T, …]; +∞ where keep or n is 0."""
    shares = [keep] * len(values) if isinstance(keep, float | int) else keep
    n = values[0].numel() if len(values) else 0
    thresholds = torch.full((len(values),), torch.inf, dtype=values.dtype, device=values.device)
    for row, share, into in zip(values, shares, thresholds, strict=True):
        if share and n:  # one expert after the other: a copy of its magnitudes is held
            into.copy_(kth_smallest(row.abs().reshape(-1), n - max(1, floor(share * n + 1e-9)) + 1, overwrite=True))
    return thresholds


def disjoint_merge(
    values: Tensor, majority: float, reduce: Reduce, weights: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Elect a sign per entry from the sum, then reduce the entries that agree with it.

    Args:
        values: Trimmed task vectors, [T, …].
        majority: The sign that zero sums take, ±1.
        weights: w_t, shaped to multiply the values; needed for `weighted_mean`.
        out: Where the agreeing entries go, [T, …], which may be the values; a new tensor by default.
    """
    elected = values.sum(0).sign_()
    elected.add_(torch.eq(elected, 0, out=torch.empty_like(elected)), alpha=majority)
    # Signs are ±1, so the magnitudes that agree are exactly the positive products.
    agreeing = torch.mul(values, elected, out=out).relu_()
    total = agreeing.sum(0)
    if reduce == "mean":
        total /= agreeing.sign_().sum(0).clamp_(min=1)
    elif reduce == "weighted_mean":
        assert weights is not None
        divisor = (agreeing.sign_() * weights).sum(0)
        total /= divisor.masked_fill_(divisor == 0, 1)
    return total.mul_(elected)


def ties_of_blocks(blocks: Tensor, keep: float) -> Tensor:
    """TIES of the experts' blocks [T, …], each trimmed on its own, which are overwritten: the first by the result."""
    return merge_trimmed(trim_to(blocks, tensor_thresholds(blocks, keep), blocks))


def merge_trimmed(blocks: Tensor) -> Tensor:
    """Return the disjoint mean of trimmed blocks [T, …], in the place of the first; the others are overwritten."""
    # Some rows at a time, by a number that leaves the sums of many experts in the order of the whole.
    rows = 64 * max(1, BLOCK // (64 * max(1, blocks[0, :1].numel()))) if blocks.ndim > 1 else 1
    strips = blocks.split(rows, 1) if blocks.ndim > 1 else [blocks]
    signs = sum(float(strip.sum(0).sign_().sum()) for strip in strips)
    majority = -1.0 if signs < 0 else 1.0
    for strip in strips:
        strip[0] = disjoint_merge(strip, majority, "mean", out=strip)
    return blocks[0]


def trim_rounded(block: Tensor, rest: Tensor, keep: float) -> None:
    """Trim a block [r, n] in place as it was before it was rounded.

    Args:
        rest: What the rounding took from it, [r, n]: it tells entries apart that became equal at the cut.
    """
    (threshold,) = cut = tensor_thresholds(block[None], keep)
    trim_to(block[None], cut, block[None])
    surplus = int(block.count_nonzero()) - max(1, floor(keep * block.numel() + 1e-9))
    if keep and surplus > 0:
        equal = (block.abs() == threshold).nonzero(as_tuple=True)
        larger = rest[equal] * block[equal].sign()
        least = larger.sort(descending=True).values[len(larger) - surplus - 1]
        block[tuple(index[larger < least] for index in equal)] = 0


def majority_pass(trimmed: Callable[[Stack, Any], Tensor]) -> Pass:
    """Return the pass that finds the majority sign of the summed trimmed vectors over the whole model."""

    def observe(total: int, stack: Stack, args: Any) -> int:
        return total + int(trimmed(stack, args).sum(0).sign_().sum(dtype=torch.int64))

    return Pass(
        "majority",
        lambda model, args: 0,
        observe,
        lambda a, b: a + b,
        lambda total, model, args: majority_of(total),
        unless="majority",
    )


def _trimmed(stack: Stack, args: TiesArgs) -> Tensor:
    if args.trim == "global":
        thresholds = stack.model.results["threshold"]
    else:
        thresholds = tensor_thresholds(stack.taus, args.each("keep", len(stack.taus)))
    trimmed = trim_to(stack.taus, thresholds)
    return trimmed.mul_(stack.weight_column) if stack.model.has_weights else trimmed


def _passes(args: TiesArgs, dtype: DType) -> tuple[Pass, ...]:
    majority = majority_pass(_trimmed)
    if args.trim == "tensor":
        return (majority,)
    full = threshold_passes(lambda stack, args: stack.taus, lambda args: args.keep, dtype)
    return (*trimming_passes(lambda args, n: count_kept(args.keep, n)), *full, majority)


def ties_copies(args: Any) -> Copies:
    return Copies(3, 4) if args.reduce == "weighted_mean" else Copies(2, 4)


@method(
    "ties",
    TiesArgs,
    elementwise=lambda args, _name, _model: args.trim == "global",
    passes=_passes,
    workspace=tensors(lambda experts: experts + 4),
    on_device=ties_copies,
)
def ties(stack: Stack, args: TiesArgs) -> Parts:
    """Disjoint mean of the trimmed task vectors.

    τ̂_t = τ_t where abs(τ_t) ≥ the ⌊keep·n⌋-th largest magnitude of expert t, else 0
    γ = sign(Σ w_t τ̂_t), zero sums take the majority sign of the vector
    θ = θ0 + scale · mean over {t : sign(w_t τ̂_t) = γ} of w_t τ̂_t

    Property:
        Entries on which all kept experts agree keep their mean; a conflicting minority has no influence at all.

    Source:
        Yadav et al., TIES-Merging (NeurIPS 2023), algorithm 1.
    """
    majority, trimmed = stack.model.results["majority"], _trimmed(stack, args)
    return stack.base, disjoint_merge(trimmed, majority, args.reduce, stack.weight_column, out=trimmed)
