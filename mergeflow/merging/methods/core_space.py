"""Merging of low-rank task vectors in the small space that their factors share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from mergeflow.late import torch
from mergeflow.merging.linalg.spectra import is_zero, svd
from mergeflow.merging.method import (
    TWO_TENSORS,
    Copies,
    Matrix,
    Model,
    Parts,
    Stack,
    all_but_matrices,
    matrices,
    method,
)
from mergeflow.merging.method import svd as svd_bytes
from mergeflow.merging.methods.subspace import MatrixArgs, merge_iso_c, merge_tsv
from mergeflow.merging.methods.ties import ties_of_blocks

if TYPE_CHECKING:
    from torch import Tensor

Pair = tuple["Tensor", "Tensor"]
"""A, [r, n], and B, [m, r], of one expert; its scaling is in B."""


class CoreSpaceArgs(MatrixArgs):
    then: Literal["task_arithmetic", "ties", "tsv", "iso_c"] = Field("ties", description="how the cores are merged")
    keep: float = Field(0.2, ge=0, le=1, description="share of a core's entries that TIES keeps, 0 … 1")


def factors_of(tau: Tensor) -> Pair:
    """Return B = U Σ^½ [m, r] and A = Σ^½ Vᵀ [r, n], as (A, B), of a task vector [m, n] that comes without factors."""
    left, sigma, right = svd(tau)
    root = sigma.sqrt()
    return (right * root).T, left * root


def bases(pairs: list[Pair]) -> Pair:
    """Return U_B [m, R] and V_A [n, R'], orthonormal: directions of all B side by side, of all A below each other."""
    ups = torch.cat([up.double() for _, up in pairs], 1)
    downs = torch.cat([down.double() for down, _ in pairs])
    return svd(ups)[0], svd(downs)[2]


def merged_in_core(pairs: list[Pair | None], weights: tuple[float, ...], args: CoreSpaceArgs) -> Tensor:
    """Merge task vectors w_t B_t A_t in their core space into a matrix [m, n], in float64.

    Args:
        pairs: A_t and B_t of each expert, or None for a task vector that is zero; one at least is not None.
    """
    left, right = bases([pair for pair in pairs if pair is not None])
    cores = torch.zeros(len(pairs), left.shape[1], right.shape[1], dtype=torch.float64, device=left.device)
    for core, pair, weight in zip(cores, pairs, weights, strict=True):
        if pair is not None:
            torch.mm(left.T @ pair[1].double(), pair[0].double() @ right, out=core).mul_(weight)
    return left @ _MERGE[args.then](cores, args) @ right.T


_MERGE: dict[str, Callable[[Tensor, CoreSpaceArgs], Tensor]] = {
    "task_arithmetic": lambda cores, _: cores.sum(0),
    "ties": lambda cores, args: ties_of_blocks(cores, args.keep),
    "tsv": merge_tsv,
    "iso_c": merge_iso_c,
}


def _in_blocks(args: CoreSpaceArgs, name: str, model: Model) -> bool:
    return args.then != "ties" and all_but_matrices(args, name, model)


def _core_space_bytes(args: CoreSpaceArgs, shape: Matrix) -> int:
    width = shape.experts * shape.short
    factors = 8 * width * (shape.rows + shape.columns)  # all A and B
    ups, downs = (Matrix(side, width, 1, shape.itemsize) for side in (shape.rows, shape.columns))
    bases = 8 * (ups.short * shape.rows + downs.short * shape.columns)
    cores = 8 * ups.short * downs.short * (2 * shape.experts + 6)
    return factors + max(factors + max(svd_bytes(ups), svd_bytes(downs)) + bases, bases + cores + 2 * shape.wide)


def _workspace(args: CoreSpaceArgs, name: str, model: Model) -> int:
    return (_TRIMMED if all_but_matrices(args, name, model) else _IN_CORES)(args, name, model)


_IN_CORES, _TRIMMED = matrices(_core_space_bytes), TWO_TENSORS


@method("core_space", CoreSpaceArgs, elementwise=_in_blocks, workspace=_workspace, on_device=Copies(11, 8.3))
def core_space(stack: Stack, args: CoreSpaceArgs) -> Parts:
    """Low-rank task vectors merged as small cores between bases that all their factors share.

    τ_t = B_t A_t;  U_B Σ · = [B_1 … B_T],  · Σ V_Aᵀ = [A_1; … A_T];  M_t = U_Bᵀ B_t A_t V_A;
    θ = θ0 + scale · U_B merge(w_1 M_1 … w_T M_T) V_Aᵀ

    The factors are the adapters' own where every expert is a LoRA of the tensor and none is cut; else those of its SVD,
    B = U Σ^½ and A = Σ^½ Vᵀ. What is not treated as a matrix is merged by TIES or summed with `then: ties` and
    `task_arithmetic`, and averaged with the others.

    Property:
        The cores lose nothing: followed by task arithmetic it is task arithmetic. The result's rank is Σ r_t at most.

    Source:
        Panariello et al., Accurate and efficient low-rank model merging in core space (NeurIPS 2025), section 4.
    """
    if not stack.is_matrix(args.matrices):
        if args.then == "ties":
            return stack.base, ties_of_blocks(stack.take(), args.keep)
        return stack.base, stack.weighted.sum(0) / (len(stack.taus) if args.then in ("tsv", "iso_c") else 1)
    taus = stack.taus
    if is_zero(taus):
        return stack.base, torch.zeros_like(stack.base)
    form, given = stack.form(args.split_qkv), stack.factors()
    whole = form.cut is None and not form.stacked
    parts = []
    for part in form.split(taus):
        pairs = given if given is not None and whole else [None if is_zero(tau) else factors_of(tau) for tau in part]
        some = any(pair is not None for pair in pairs)
        merged = merged_in_core(pairs, stack.model.weights, args) if some else torch.zeros_like(part[0])
        parts.append(merged.to(taus.dtype))
    return stack.base, form.join(parts)
