"""Subspace methods: singular directions of all experts, orthogonalised, flattened or aligned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from mergeflow.checkpoints.fingerprint import BLOCK
from mergeflow.late import torch
from mergeflow.merging.linalg.spectra import (
    directions,
    gram,
    gram_of,
    is_zero,
    long_side,
    mirror_,
    polar_,
    short_side,
    whitening,
)
from mergeflow.merging.matrices import Matrices, SplitQkv
from mergeflow.merging.method import (
    TWO_TENSORS,
    Args,
    Copies,
    Matrix,
    Model,
    Parts,
    Stack,
    all_but_matrices,
    decomposition,
    matrices,
    method,
)
from mergeflow.merging.methods.ties import merge_trimmed, ties_of_blocks, trim_rounded

if TYPE_CHECKING:
    from torch import Tensor


# Rows of a float64 product that are held before they are rounded.
_ROWS = 1024
# Rows that are in float64 at a time where there are the sum, one expert's and all directions of them.
_FEW = 256


class MatrixArgs(Args):
    matrices: Matrices = "all"
    split_qkv: SplitQkv = False


class IsoCtsArgs(MatrixArgs):
    common: float = Field(0.8, ge=0, le=1, description="share of the rank taken from the common space, 0 … 1")


class KnotsArgs(MatrixArgs):
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
    shorts = [short_side(tau, rank) for tau in moved]
    longs = [long_side(tau, *pair) for tau, pair in zip(moved, shorts, strict=True)]
    del taus, moved
    if not sum(len(sigma) for sigma, _ in shorts):
        return like.new_zeros(shape)
    long, sigma = torch.cat(longs, 1), torch.cat([sigma for sigma, _ in shorts])
    del longs
    short = torch.cat([side for _, side in shorts], 1)
    left, right = (long, short) if shape[0] >= shape[1] else (short, long)
    return _product(polar_(left).mul_(sigma), polar_(right), like)


def merge_iso_c(taus: Tensor, args: MatrixArgs) -> Tensor:
    """Iso-C of matrices [T, m, n] → [m, n]."""
    total = taus.sum(0)
    del taus
    return _flat(total)


def _flat(total: Tensor) -> Tensor:
    return total.zero_() if is_zero(total) else polar_(total, flat=True)


def _shares(side: int, experts: int, common: float) -> tuple[int, int]:
    """Return the directions of the common space, and those of each expert."""
    specific = round((side - int(side * common)) / experts)
    return max(side - specific * experts, 0), specific


def merge_iso_cts(taus: Tensor, args: IsoCtsArgs) -> Tensor:
    """Iso-CTS of matrices [T, m, n] → [m, n]; the longer sides of all directions take the place of τ_1 and τ_2."""
    shape, count = taus.shape[1:], len(taus)
    rank, specific = _shares(min(shape), count, args.common)
    if count == 1 or not specific:
        total = taus.sum(0)
        del taus
        return _flat(total)
    longer = shape[0] >= shape[1]
    tall = taus if longer else taus.mT
    common = common_directions(tall, rank)
    ways = ([] if common is None else [common]) + expert_directions(tall, common, specific, longer)
    sigma, short = (torch.cat(sides, -1) for sides in ([way.sigma for way in ways], [way.short for way in ways]))
    # Rounding may give more directions than the shorter side has, where the common space is empty.
    place = tall if len(sigma) <= min(shape) else tall.new_empty(2, max(shape), len(sigma))
    put_long_sides(tall, ways, place)
    del ways, common
    mean = float(sigma.mean())
    polar_(short)
    factor = whitening(gram_of(long_sides(place, len(sigma)), len(sigma)))[0] @ short.T
    result = taus.new_empty(shape)
    turned = result if longer else result.mT
    for into, rows in zip(turned.split(_FEW), long_sides(place, len(sigma)), strict=True):
        into.copy_((rows @ factor).mul_(mean))
    return result


# Directions that experts have in common, and those that each has outside of them, for Iso-CTS.
#
# For A_t [m, n] with n ≤ m and A = Σ A_t = U Σ Vᵀ, the part of A_t outside the leading U_k is A_t − U_k U_kᵀ A_t. Its
# Gram matrix is A_tᵀA_t − XᵀX with X = U_kᵀA_t = Σ_k⁻¹ V_kᵀ(AᵀA_t); outside V_k, where the matrices are turned, it is
# that of A_t between two projectors. So the shorter side is enough to find all directions, and no part
# is held in float64. It leaves in σ about 1e-8 of ‖A_t‖, which is why directions below 1e-7 of it are left out.


@dataclass(frozen=True)
class Outside:
    """Some directions [r] of one matrix, in float64.

    Attributes:
        sigma: Singular values, falling, [r].
        short: Singular vectors of the shorter side, [n, r].
        weights: What gives those of the longer side, A_t W − U_k Y, [n, r]; None for W = V Σ⁻¹.
        shared: Y, [k, r]; None where the common space is one of the shorter side.
        expert: t; None for the sum of all.
    """

    sigma: Tensor
    short: Tensor
    weights: Tensor | None = None
    shared: Tensor | None = None
    expert: int | None = None


def common_directions(tall: Tensor, rank: int) -> Outside | None:
    """Return the `rank` leading directions of Σ A_t, of A_t [T, m, n] with n ≤ m; None where there are none."""
    if not rank:
        return None
    sums = (strip.sum(0) for strip in tall.split(4 * _FEW, 1))
    sigma, short = directions(gram_of(sums, tall.shape[2]), rank)
    return Outside(sigma, short) if len(sigma) else None


def expert_directions(tall: Tensor, common: Outside | None, rank: int, longer: bool) -> list[Outside]:
    """Return the leading directions of each A_t [m, n], n ≤ m, outside the common space; of a zero matrix none."""
    moved = [expert for expert, tau in enumerate(tall) if not is_zero(tau)]
    of_one = _outside_long if longer else _outside_short
    return [of_one(tall, expert, common, rank) for expert in moved]


def _outside_long(tall: Tensor, expert: int, common: Outside | None, rank: int) -> Outside:
    shared = None
    if common is not None:
        across = common.short.new_zeros(tall.shape[2], tall.shape[2])
        for rows in tall.split(_FEW, 1):
            across.addmm_(rows.sum(0).double().T, rows[expert].double())
        shared = (common.short.T @ across).div_(common.sigma[:, None])
        del across
    product = gram(tall[expert])
    norm = _norm(product)
    if shared is not None:
        product.addmm_(shared.T, shared, alpha=-1)
    sigma, short = directions(product, rank, norm)
    return Outside(sigma, short, None, None if shared is None else (shared @ short).div_(sigma), expert)


def _outside_short(tall: Tensor, expert: int, common: Outside | None, rank: int) -> Outside:
    product = gram(tall[expert])
    norm = _norm(product)
    if common is not None:
        basis = common.short
        image = mirror_(product) @ basis
        image.addmm_(basis, basis.T @ image, alpha=-0.5)
        product.addmm_(basis, image.T, alpha=-1).addmm_(image, basis.T, alpha=-1)
        del image
    sigma, short = directions(product, rank, norm)
    if common is None:
        return Outside(sigma, short, expert=expert)
    weights = torch.addmm(short, common.short, common.short.T @ short, alpha=-1).div_(sigma)
    return Outside(sigma, short, weights, None, expert)


def _norm(product: Tensor) -> float:
    return float(product.trace().sqrt())


def put_long_sides(tall: Tensor, ways: list[Outside], place: Tensor) -> None:
    """Put the longer sides [m, Σ r] of all directions, exact, into two matrices of another type, word by word.

    Args:
        tall: A_t, [T, m, n] with n ≤ m, in float32 or float64.
        ways: Those of the sum first.
        place: [2 or more, m, Σ r or more] in the type of A_t, which it may be.
    """
    weights = [way.short / way.sigma if way.weights is None else way.weights for way in ways]
    for rows, into in zip(tall.split(_FEW, 1), place.split(_FEW, 1), strict=True):
        sides: list[Tensor] = []
        for way, weight in zip(ways, weights, strict=True):
            side = (rows.sum(0) if way.expert is None else rows[way.expert]).double() @ weight
            sides.append(side if way.shared is None else side.addmm_(sides[0], way.shared, alpha=-1))
        words = torch.cat(sides, 1).view(_word(rows)).chunk(8 // rows.itemsize, 1)
        for target, half in zip(into.view(_word(into)), words, strict=False):
            target[:, : half.shape[1]] = half


def long_sides(place: Tensor, count: int) -> Iterator[Tensor]:
    """Read back what `put_long_sides` put into a place, some rows [any, count = Σ r] of float64 at a time."""
    for rows in place.split(_FEW, 1):
        halves = rows.view(_word(rows))[: 8 // rows.itemsize, :, :count]
        yield torch.cat(list(halves), 1).view(torch.float64)


def _word(tensor: Tensor) -> torch.dtype:
    return torch.int32 if tensor.itemsize == 4 else torch.int64


def merge_knots(taus: Tensor, args: KnotsArgs) -> Tensor:
    """KnOTS with TIES of matrices [T, m, n] → [m, n]; V_t takes the place of τ_t, in its type, where it has room."""
    count, rows, columns = taus.shape
    if rows > count * columns:
        return _knots_of_few(taus, args)
    sigma, left = directions(gram_of((strip for tau in taus for strip in tau.mT.split(_ROWS)), rows), rows)
    blocks = taus[:, : len(sigma)]
    for tau, block in zip(taus, blocks, strict=True):
        rest = torch.empty_like(block, dtype=torch.bfloat16)
        for strip, into, beyond in zip(*(part.mT.split(_ROWS) for part in (tau, block, rest)), strict=True):
            exact = (strip.double() @ left).div_(sigma)
            beyond.copy_(exact.sub_(into.copy_(exact)))
        trim_rounded(block, rest, args.keep)
    merged = merge_trimmed(blocks)
    left.mul_(sigma)
    result = merged.new_empty(rows, columns)
    for into, some in zip(result.split(_ROWS, 1), merged.split(_ROWS, 1), strict=True):
        into.copy_(left @ some.double())
    return result


def _knots_of_few(taus: Tensor, args: KnotsArgs) -> Tensor:
    """KnOTS with TIES where all columns of [τ_1 … τ_T] = U Σ Vᵀ are fewer than its rows: U Σ M = [τ_1 … τ_T] V M."""
    count, _, columns = taus.shape
    wide = (strip.transpose(0, 1).flatten(1) for strip in taus.split(_ROWS, 1))
    sigma, right = directions(gram_of(wide, count * columns), count * columns)
    blocks = right.T.reshape(len(sigma), count, columns).transpose(0, 1).clone()
    factors = (right @ ties_of_blocks(blocks, args.keep)).reshape(count, columns, columns)
    result = torch.empty_like(taus[0])
    for into, some in zip(result.split(_ROWS), taus.split(_ROWS, 1), strict=True):
        into.copy_(sum(tau.double() @ factor for tau, factor in zip(some, factors, strict=True)))
    return result


def _tsv_bytes(args: MatrixArgs, shape: Matrix) -> int:
    rank = shape.short // shape.experts
    shorts, longs = (8 * side * rank * shape.experts for side in (shape.short, shape.long))
    first = shorts + max(decomposition(shape, rank), longs + shape.strips())
    product = shape.nbytes + 8 * _ROWS * shape.columns
    joined = shorts + longs + max(shorts, longs, decomposition(shape), product)
    return max(first, joined - shape.freed)


def _iso_c_bytes(args: MatrixArgs, shape: Matrix) -> int:
    return shape.nbytes + max(0, decomposition(shape) + shape.strips(2) - shape.freed)


def _iso_cts_bytes(args: IsoCtsArgs, shape: Matrix) -> int:
    rank, specific = _shares(shape.short, shape.experts, args.common)
    if shape.experts == 1 or not specific:
        return _iso_c_bytes(args, shape)
    count = rank + specific * shape.experts
    beyond = 2 * shape.long * count * shape.itemsize + 32 * shape.short * shape.experts if count > shape.short else 0
    square, few = 8 * shape.short * shape.short, 8 * min(_FEW, shape.long) * shape.short
    whole = max(4 * square, square + shape.strips(2))  # polar factors of the shorter sides; the sum, as it is read
    return max(whole, 3 * square + 5 * few, 2 * square + shape.nbytes + 2 * few) + 560 * shape.short + beyond


def _knots_bytes(args: KnotsArgs, shape: Matrix) -> int:
    side = min(shape.rows, shape.columns * shape.experts)
    vectors = 8 * side * side
    if shape.rows > side:
        factors = 8 * side * shape.columns
        first, merged = 2 * vectors + factors, vectors + factors + shape.nbytes + 24 * _ROWS * shape.columns
    else:
        strips = 16 * min(_ROWS, shape.columns) * shape.rows
        trimmed = shape.nbytes + 2 * shape.rows * shape.columns  # magnitudes, and what rounding took
        first = vectors + max(trimmed, strips, 4 * shape.itemsize * max(BLOCK, 64 * shape.columns))
        merged = vectors + shape.nbytes + strips
    return max(2 * vectors + 8 * 70 * side, vectors + 12 * _ROWS * side, first, merged)


def _knots_workspace(args: KnotsArgs, name: str, model: Model) -> int:
    return (TWO_TENSORS if all_but_matrices(args, name, model) else matrices(_knots_bytes))(args, name, model)


@method(
    "tsv", MatrixArgs, elementwise=all_but_matrices, workspace=matrices(_tsv_bytes), on_device=Copies(1, 7, least=13.1)
)
def tsv(stack: Stack, args: MatrixArgs) -> Parts:
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
    "iso_c", MatrixArgs, elementwise=all_but_matrices, workspace=matrices(_iso_c_bytes), on_device=Copies(1, 2, least=8)
)
def iso_c(stack: Stack, args: MatrixArgs) -> Parts:
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
    "iso_cts", IsoCtsArgs, elementwise=all_but_matrices, workspace=matrices(_iso_cts_bytes), on_device=Copies(1, 11.4)
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


@method(
    "knots",
    KnotsArgs,
    elementwise=lambda args, _name, _model: args.then == "task_arithmetic",
    workspace=_knots_workspace,
    on_device=lambda args: Copies(1, 8.5, joint=2) if args.then == "ties" else Copies(1, 2),
)
def knots(stack: Stack, args: KnotsArgs) -> Parts:
    """Task vectors aligned in one joint SVD, then merged by TIES or summed.

    [w_1 τ_1 … w_T τ_T] = U Σ [V_1ᵀ … V_Tᵀ],  θ = θ0 + scale · U Σ merge(V_1 … V_T)ᵀ

    TIES trims each expert's block of a matrix on its own. What is not treated as a matrix is merged without alignment.

    Property:
        Followed by task arithmetic it is task arithmetic, and computed so: U Σ Σ V_tᵀ = Σ w_t τ_t.

    Source:
        Stoica et al., Model merging with SVD to tie the KnOTS (ICLR 2025), section 4.
    """
    if args.then == "task_arithmetic":
        return stack.base, stack.weighted.sum(0)
    if _treated(stack, args):
        return stack.base, _merged(stack, args, merge_knots)
    return stack.base, ties_of_blocks(stack.take(), args.keep)
