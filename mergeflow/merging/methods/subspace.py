"""Subspace methods: singular directions of all experts, orthogonalised, flattened or aligned."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mergeflow.late import torch
from mergeflow.merging.linalg.spectra import is_zero, polar, polar_and_values, svd
from mergeflow.merging.matrices import Matrices, SplitQkv
from mergeflow.merging.method import Args, Model, Parts, Stack, all_but_matrices, method
from mergeflow.merging.methods.ties import disjoint_merge, tensor_thresholds, trim_to

if TYPE_CHECKING:
    from torch import Tensor


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
    form = stack.form(args.split_qkv)
    return form.join([merge(part, args) for part in form.split(stack.weighted)]).to(stack.taus.dtype)


def _joined(factors: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Put the experts' U, σ and V side by side; the parts are released, so that they are not held twice."""
    sides = [list(side) for side in zip(*factors, strict=True)]
    factors.clear()
    joined = []
    for side in sides:
        joined.append(torch.cat(side, dim=-1))
        side.clear()
    return joined


def merge_tsv(taus: Tensor, args: MatrixArgs) -> Tensor:
    """TSV-M of matrices [T, m, n] → [m, n]; their average where a side is shorter than their number."""
    rank = min(taus.shape[1:]) // len(taus)
    if not rank:
        return taus.sum(0) / len(taus)
    factors = [svd(tau, rank) for tau in taus if not is_zero(tau)]
    if not factors:
        return torch.zeros_like(taus[0])
    left, sigma, right = _joined(factors)
    return polar(left).mul_(sigma) @ polar(right).T


def merge_iso_c(taus: Tensor, args: MatrixArgs) -> Tensor:
    """Iso-C of matrices [T, m, n] → [m, n]."""
    total = taus.sum(0)
    if is_zero(total):
        return torch.zeros_like(total)
    factor, sigma = polar_and_values(total)
    return factor.mul_(sigma.mean())


def merge_iso_cts(taus: Tensor, args: IsoCtsArgs) -> Tensor:
    """Iso-CTS of matrices [T, m, n] → [m, n]."""
    total = taus.sum(0)
    side = min(total.shape)
    own = round((side - int(side * args.common)) / len(taus))
    rank = side - own * len(taus)
    factors = [svd(total, rank)] if rank > 0 and not is_zero(total) else []
    for tau in taus if own else ():
        outside = tau.double()
        if factors:
            common = factors[0][0]
            outside.sub_(common @ (common.T @ outside))
        if not is_zero(outside):
            factors.append(svd(outside, own))
    if not factors:
        return torch.zeros_like(total)
    left, sigma, right = _joined(factors)
    return (polar(left) @ polar(right).T).mul_(sigma.mean())


def ties_of_blocks(blocks: Tensor, keep: float) -> Tensor:
    """TIES of the experts' blocks [T, …], each trimmed on its own."""
    trimmed = trim_to(blocks, tensor_thresholds(blocks, keep))
    majority = -1.0 if float(trimmed.sum(0).sign().sum()) < 0 else 1.0
    return disjoint_merge(trimmed, majority, "mean")


def merge_knots(taus: Tensor, args: KnotsArgs) -> Tensor:
    """KnOTS of matrices [T, m, n] → [m, n]."""
    count, rows, columns = taus.shape
    joined = taus.transpose(0, 1).reshape(rows, count * columns)
    left, sigma, right = svd(joined)
    blocks = right.T.reshape(len(sigma), count, columns).transpose(0, 1)
    merged = blocks.sum(0) if args.then == "task_arithmetic" else ties_of_blocks(blocks, args.keep)
    return (left * sigma) @ merged


@method("tsv", TsvArgs, elementwise=all_but_matrices)
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


@method("iso_c", IsoCArgs, elementwise=all_but_matrices)
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


@method("iso_cts", IsoCtsArgs, elementwise=all_but_matrices)
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


@method("knots", KnotsArgs, elementwise=_summed)
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
