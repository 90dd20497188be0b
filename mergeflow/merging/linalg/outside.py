"""Directions that experts have in common, and those that each has outside of them, for Iso-CTS.

For A_t [m, n] with n ≤ m and A = Σ A_t = U Σ Vᵀ, the part of A_t outside the leading U_k is A_t − U_k U_kᵀ A_t. Its
Gram matrix is A_tᵀA_t − XᵀX with X = U_kᵀA_t = Σ_k⁻¹ V_kᵀ(AᵀA_t); outside V_k, where the matrices are turned, it is
that of A_t between two projectors. So the shorter side is enough to find all directions, and no part
is held in float64. It leaves in σ about 1e-8 of ‖A_t‖, which is why directions below 1e-7 of it are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergeflow.late import torch
from mergeflow.merging.linalg.spectra import directions, gram, gram_of, is_zero, mirror_

if TYPE_CHECKING:
    from torch import Tensor

# Rows that are in float64 at a time: of them there are the sum, one expert's and all directions.
ROWS = 256


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
    sums = (strip.sum(0) for strip in tall.split(4 * ROWS, 1))
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
        for rows in tall.split(ROWS, 1):
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
    for rows, into in zip(tall.split(ROWS, 1), place.split(ROWS, 1), strict=True):
        sides: list[Tensor] = []
        for way, weight in zip(ways, weights, strict=True):
            side = (rows.sum(0) if way.expert is None else rows[way.expert]).double() @ weight
            sides.append(side if way.shared is None else side.addmm_(sides[0], way.shared, alpha=-1))
        words = torch.cat(sides, 1).view(_word(rows)).chunk(8 // rows.itemsize, 1)
        for target, half in zip(into.view(_word(into)), words, strict=False):
            target[:, : half.shape[1]] = half


def long_sides(place: Tensor, count: int) -> Iterator[Tensor]:
    """Read back what `put_long_sides` put into a place, some rows [any, count = Σ r] of float64 at a time."""
    for rows in place.split(ROWS, 1):
        halves = rows.view(_word(rows))[: 8 // rows.itemsize, :, :count]
        yield torch.cat(list(halves), 1).view(torch.float64)


def _word(tensor: Tensor) -> torch.dtype:
    return torch.int32 if tensor.itemsize == 4 else torch.int64
