"""Subspace methods: singular directions of all experts, orthogonalised, flattened or aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mergeflow.late import torch
from mergeflow.merging.linalg.spectra import is_zero, long_side, polar_, short_side, svd
from mergeflow.merging.matrices import Matrices, SplitQkv
from mergeflow.merging.method import Args, Model, Parts, Stack, all_but_matrices, method
from mergeflow.merging.methods.ties import disjoint_merge, tensor_thresholds, trim_to
from mergeflow.merging.workspace import Copies, Matrix, decomposition, matrices, tensors
from mergeflow.merging.workspace import svd as svd_bytes

if TYPE_CHECKING:
    from torch import Tensor


# Rows of a float64 product that are held before they are rounded.
_ROWS = 1024


class MatrixArgs(Args):
    """Arguments of methods that treat matrices."""

    matrices: Matrices = "all"
    split_qkv: SplitQkv = False


class TsvArgs(MatrixArgs):
    """Arguments of `tsv`."""


class IsoCArgs(MatrixArgs):
    """Arguments of `iso_c`."""


class IsoCtsArgs(MatrixArgs):
    """Arguments of `iso_cts`."""

    common: float = Field(0.8, ge=0, le=1, description="share of the rank taken from the common space, 0 … 1")


class KnotsArgs(MatrixArgs):
    """Arguments of `knots`."""

    then: Literal["task_arithmetic", "ties"] = Field("ties", description="how the aligned blocks are merged")
    keep: float = Field(0.2, ge=0, le=1, description="share of a block's entries that TIES keeps, 0 … 1")


def _treated(stack: Stack, args: MatrixArgs) -> bool:
    return stack.is_matrix(args.matrices) and not is_zero(stack.taus)


def _merged(stack: Stack, args: MatrixArgs, merge: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """Merge each matrix of a tensor by [T, m, n] → [m, n]; average what is not treated as one."""
    if not _treated(stack, args):
        return stack.weighted.sum(0) / len(stack.taus)
    return stack.merged(merge, args)


def _product(left: Tensor, right: Tensor, like: Tensor, factor: float = 1.0) -> Tensor:
    """Return factor · L Rᵀ of L [m, r] and R [n, r] in another tensor's type, never whole in their own."""
    out = like.new_empty(len(left), len(right))
    for into, rows in zip(out.split(_ROWS), left.split(_ROWS), strict=True):
        into.copy_((rows @ right.T).mul_(factor))
    return out


def merge_tsv(taus: Tensor, args: MatrixArgs) -> Tensor:
    """TSV-M of matrices [T, m, n] → [m, n]; their average where a side is shorter than their number."""
    rank = min(taus.shape[1:]) // len(taus)
    if not rank:
        return taus.sum(0) / len(taus)
    shape, like = taus.shape[1:], taus.new_empty(0)
    moved = [tau for tau in taus if not is_zero(tau)]
    # The decompositions come first: their work and the longer sides are never held at once.
    found = [short_side(tau, rank) for tau in moved]
    longs = [long_side(tau, *pair) for tau, pair in zip(moved, found, strict=True)]
    del taus, moved
    if not sum(len(sigma) for sigma, _ in found):
        return like.new_zeros(shape)
    long, sigma = torch.cat(longs, 1), torch.cat([sigma for sigma, _ in found])
    del longs
    short = torch.cat([side for _, side in found], 1)
    left, right = (long, short) if shape[0] >= shape[1] else (short, long)
    return _product(polar_(left).mul_(sigma), polar_(right), like)


def merge_iso_c(taus: Tensor, args: MatrixArgs) -> Tensor:
    """Iso-C of matrices [T, m, n] → [m, n]."""
    total = taus.sum(0)
    del taus
    return total.zero_() if is_zero(total) else polar_(total, flat=True)


def _shares(side: int, experts: int, common: float) -> tuple[int, int]:
    """Return the directions of the common space, and those of each expert."""
    own = round((side - int(side * common)) / experts)
    return max(side - own * experts, 0), own


def merge_iso_cts(taus: Tensor, args: IsoCtsArgs) -> Tensor:
    """Iso-CTS of matrices [T, m, n] → [m, n]."""
    total, like = taus.sum(0), taus.new_empty(0)
    shape = total.shape
    rank, own = _shares(min(shape), len(taus), args.common)
    found = [svd(total, rank)] if rank and not is_zero(total) else []
    del total
    found += _outside(taus, found[0][0] if found else None, own) if own else []
    del taus
    if not sum(len(sigma) for _, sigma, _ in found):
        return like.new_zeros(shape)
    left, sigma, right = (torch.cat(sides, -1) for sides in zip(*found, strict=True))
    del found
    return _product(polar_(left), polar_(right), like, float(sigma.mean()))


def _outside(taus: Tensor, common: Tensor | None, rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return U, σ and V at a rank of each τ_t − C Cᵀ τ_t that is not zero, C being the common space."""
    found = []
    for tau in taus:
        outside = tau.double()
        if common is not None:
            outside.addmm_(common, common.T @ outside, alpha=-1)
        if not is_zero(outside):
            found.append(svd(outside, rank))
    return found


def ties_of_blocks(blocks: Tensor, keep: float, out: Tensor | None = None) -> Tensor:
    """TIES of the experts' blocks [T, …], each trimmed on its own.

    Args:
        blocks: One for each expert, [T, …].
        keep: Share of the entries of a block that is kept, 0 … 1.
        out: Where the trimmed blocks go, which may be the blocks; a new tensor by default.
    """
    trimmed = trim_to(blocks, tensor_thresholds(blocks, keep), out)
    majority = -1.0 if float(trimmed.sum(0).sign().sum()) < 0 else 1.0
    return disjoint_merge(trimmed, majority, "mean", out=trimmed)


def merge_knots(taus: Tensor, args: KnotsArgs) -> Tensor:
    """KnOTS of matrices [T, m, n] → [m, n]."""
    (count, rows, columns), like = taus.shape, taus.new_empty(0)
    beside = taus.transpose(0, 1).reshape(rows, count * columns)
    del taus
    left, sigma, right = svd(beside)
    del beside
    blocks = right.T.reshape(len(sigma), count, columns).transpose(0, 1)
    merged = blocks.sum(0) if args.then == "task_arithmetic" else ties_of_blocks(blocks, args.keep, blocks)
    del blocks, right
    return _product(left.mul_(sigma), merged.T, like)


def _tsv_bytes(args: TsvArgs, one: Matrix) -> int:
    rank = one.short // one.experts
    shorts, longs = (8 * side * rank * one.experts for side in (one.short, one.long))
    found = shorts + max(decomposition(one, rank), longs + one.strips())
    joined = shorts + longs + max(shorts, longs, decomposition(one), _product_bytes(one))
    return max(found, joined - one.freed)


def _product_bytes(one: Matrix) -> int:
    return one.nbytes + 8 * _ROWS * one.columns


def _iso_c_bytes(args: IsoCArgs, one: Matrix) -> int:
    return one.nbytes + max(0, decomposition(one) + one.strips(2) - one.freed)


def _iso_cts_bytes(args: IsoCtsArgs, one: Matrix) -> int:
    rank, own = _shares(one.short, one.experts, args.common)
    found = 8 * (one.rows + one.columns) * (rank + own * one.experts)
    outside = one.wide + max(8 * rank * one.columns, svd_bytes(one, own)) if own else 0
    joined = found + max(found, decomposition(one), _product_bytes(one))
    return max(one.nbytes + svd_bytes(one, rank), found + outside, joined - one.freed)


def _knots_bytes(args: KnotsArgs, one: Matrix) -> int:
    beside = Matrix(one.rows, one.columns * one.experts, 1, one.itemsize)
    found = 8 * beside.short * (beside.rows + beside.columns)
    aligned = max(beside.nbytes + svd_bytes(beside), found + 32 * beside.short * one.columns + one.nbytes)
    return max(beside.nbytes, aligned - one.freed)


def _knots_workspace(args: KnotsArgs, name: str, model: Model) -> int:
    return (_ALIGNED if not all_but_matrices(args, name, model) else _TRIMMED)(args, name, model)


_ALIGNED, _TRIMMED = matrices(_knots_bytes), tensors(lambda experts: experts + 4, weighted=True)


@method(
    "tsv", TsvArgs, elementwise=all_but_matrices, workspace=matrices(_tsv_bytes), on_device=Copies(1, 7, least=13.1)
)
def tsv(stack: Stack, args: TsvArgs) -> Parts:
    """Task singular vectors of all experts, made orthogonal to each other (TSV-M).

    w_t τ_t ≈ U_t Σ_t V_tᵀ at rank ⌊min side / T⌋;  U = [U_1 … U_T], V, Σ alike;  θ = θ0 + scale · polar(U) Σ polar(V)ᵀ

    What is not treated as a matrix is averaged; so is a matrix with fewer than T rows or columns, whose rank is 0.

    Property:
        Experts with orthogonal row and column spaces of low rank are summed without loss.

    Source:
        Gargiulo et al., Task singular vectors (CVPR 2025), algorithm 1.
    """
    return stack.base, _merged(stack, args, merge_tsv)


@method(
    "iso_c", IsoCArgs, elementwise=all_but_matrices, workspace=matrices(_iso_c_bytes), on_device=Copies(1, 2, least=8)
)
def iso_c(stack: Stack, args: IsoCArgs) -> Parts:
    """Sum of the task vectors with all singular values replaced by their mean.

    Σ w_t τ_t = U Σ Vᵀ,  θ = θ0 + scale · σ̄ U Vᵀ

    What is not treated as a matrix is averaged; directions without any singular value stay zero.

    Property:
        The spectrum is flat and its sum is that of Σ τ_t.

    Source:
        Marczak et al., No task left behind (ICML 2025), algorithm 1.
    """
    return stack.base, _merged(stack, args, merge_iso_c)


@method(
    "iso_cts", IsoCtsArgs, elementwise=all_but_matrices, workspace=matrices(_iso_cts_bytes), on_device=Copies(1, 10.9)
)
def iso_cts(stack: Stack, args: IsoCtsArgs) -> Parts:
    """A flat spectrum over the common space and each expert's own directions outside it.

    common: the leading k singular directions of Σ w_t τ_t; own: the leading s = round((r − ⌊common·r⌋)/T) of each
    w_t τ_t projected outside the common space, k = r − s·T;  θ = θ0 + scale · σ̄ polar(U) polar(V)ᵀ

    What is not treated as a matrix is averaged.

    Property:
        With common = 1 it is Iso-C; the spectrum is flat.

    Source:
        Marczak et al., No task left behind (ICML 2025), algorithm 2.
    """
    return stack.base, _merged(stack, args, merge_iso_cts)


def _summed(args: KnotsArgs, name: str, model: Model) -> bool:
    return args.then == "task_arithmetic" and all_but_matrices(args, name, model)


@method("knots", KnotsArgs, elementwise=_summed, workspace=_knots_workspace, on_device=Copies(6, 5))
def knots(stack: Stack, args: KnotsArgs) -> Parts:
    """Task vectors aligned in one joint SVD, then merged by TIES or summed.

    [w_1 τ_1 … w_T τ_T] = U Σ [V_1ᵀ … V_Tᵀ],  θ = θ0 + scale · U Σ merge(V_1 … V_T)ᵀ

    TIES trims each expert's block of a matrix on its own. What is not treated as a matrix is merged without alignment.

    Property:
        Followed by task arithmetic it is task arithmetic.

    Source:
        Stoica et al., Model merging with SVD to tie the KnOTS (ICLR 2025), section 4.
    """
    if _treated(stack, args):
        return stack.base, _merged(stack, args, merge_knots)
    if args.then == "task_arithmetic":
        return stack.base, stack.weighted.sum(0)
    return stack.base, ties_of_blocks(stack.weighted, args.keep)
