"""Directions found by optimisation without data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from mergeflow.late import torch
from mergeflow.merging.linalg.spectra import is_zero
from mergeflow.merging.matrices import Matrices, SplitQkv
from mergeflow.merging.method import Args, Copies, Matrix, Parts, Stack, all_but_matrices, matrices, method

if TYPE_CHECKING:
    from torch import Tensor

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8
_ROWS = 256  # of τ, that take all steps together
_WIDTH = 512  # columns of a block of H

Norms = list["Tensor | None"]
"""‖τ_i‖² of each expert; None where τ_i is zero."""


class WudiArgs(Args):
    steps: int = Field(300, ge=0, description="Adam steps per matrix, ≥ 0")
    lr: float = Field(1e-5, gt=0, le=1e30, description="Adam's learning rate, > 0")
    matrices: Matrices = "attn_mlp"
    split_qkv: SplitQkv = False


def minimise_interference(taus: Tensor, args: WudiArgs) -> Tensor:
    """Return the τ that Adam finds from Στ_i for Σ ‖(τ − τ_i) τ_iᵀ‖² / ‖τ_i‖².

    The gradient is 2 (τ H − B) with H = Σ τ_iᵀτ_i/‖τ_i‖² and B = Σ τ_i τ_iᵀτ_i/‖τ_i‖², both formed once, so that a step
    costs one product of matrices however many experts there are. It is taken for some rows of τ at a time.

    Args:
        taus: τ_i, [T, m, n]; they are overwritten, the first by τ, [m, n].
    """
    squares = [tau.square().sum() for tau in taus]
    norms = [None if square == 0 else square for square in squares]  # also of numbers whose squares are too small
    if not args.steps or norms.count(None) >= len(taus) - 1:  # of a single τ_i it is the minimum
        return taus.sum(0)
    curvature = _curvature(taus, norms)
    result, pull = _start_and_pull(taus, norms)
    for some, pulled in zip(result.split(_ROWS), pull.split(_ROWS), strict=True):
        _descend(some, pulled, curvature, args)
    return result


def _descend(result: Tensor, pull: Tensor, curvature: list[Tensor], args: WudiArgs) -> None:
    """Take all steps of Adam with some rows of τ [r, n], in place: none depends on another."""
    mean, square, room = torch.zeros_like(result), torch.zeros_like(result), torch.empty_like(result)
    for step in range(1, args.steps + 1):
        gradient = _times(result, curvature, room).sub_(pull).mul_(2)
        mean.mul_(_BETA1).add_(gradient, alpha=1 - _BETA1)
        square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        size = args.lr / (1 - _BETA1**step)
        spread = torch.div(square, 1 - _BETA2**step, out=room).sqrt_().add_(_EPSILON)
        result.addcdiv_(mean, spread, value=-size)


def _curvature(taus: Tensor, norms: Norms) -> list[Tensor]:
    """Return H [n, n] as blocks of columns, each from its diagonal down: H is symmetric."""
    blocks, columns = [], taus.shape[2]
    for start in range(0, columns, _WIDTH):
        block = taus.new_zeros(columns - start, min(_WIDTH, columns - start))
        for tau, norm in zip(taus, norms, strict=True):
            if norm is not None:
                block += tau[:, start:].T @ (tau[:, start : start + _WIDTH] / norm)
        blocks.append(block)
    return blocks


def _times(rows: Tensor, curvature: list[Tensor], out: Tensor) -> Tensor:
    """Return rows [r, n] times H, in another tensor of that shape."""
    if len(curvature) == 1:
        return torch.mm(rows, curvature[0], out=out)
    out.zero_()
    start = 0
    for block in curvature:
        stop = start + block.shape[1]
        out[:, start:stop].addmm_(rows[:, start:], block)
        if stop < out.shape[1]:
            out[:, stop:].addmm_(rows[:, start:stop], block[stop - start :].T)
        start = stop
    return out


def _start_and_pull(taus: Tensor, norms: Norms) -> tuple[Tensor, Tensor]:
    """Return Στ_i and B of the gradient 2 (τ H − B), in the place of τ_1 and τ_2; the others are left as they are.

    τ_i τ_iᵀ τ_i is a product with the Gram matrix of either side; that of the shorter one is small.
    """
    rows, columns = taus.shape[1:]
    form = taus.mT if columns > max(rows, _WIDTH) else taus
    shares = [_share(tau, norm) for tau, norm in zip(form[:2], norms, strict=False)]
    for strip in form.split(_WIDTH, 1):
        total, pull = strip.sum(0), torch.zeros_like(strip[0])
        for tau, share in zip(strip, shares, strict=False):
            pull += tau @ share
        strip[0], strip[1] = total, pull
    del shares
    for index in range(2, len(taus)):
        share = _share(form[index], norms[index])
        for strip in form.split(_WIDTH, 1):
            strip[1] += strip[index] @ share
    return taus[0], taus[1]


def _share(form: Tensor, norm: Tensor | None) -> Tensor:
    """Return AᵀA / ‖A‖² [n, n] of A [m, n]; zero where A is zero."""
    share = form.new_zeros(form.shape[1], form.shape[1])
    if norm is not None:
        for rows in form.split(_WIDTH):
            share += rows.T @ (rows / norm)
    return share


def _wudi_bytes(args: WudiArgs, shape: Matrix) -> int:
    starts = range(0, shape.columns, _WIDTH)
    curvature = sum((shape.columns - start) * min(_WIDTH, shape.columns - start) for start in starts)
    side, other = (
        (shape.rows, shape.columns) if shape.columns > max(shape.rows, _WIDTH) else (shape.columns, shape.rows)
    )
    pulled = 3 * side * side + 5 * min(_WIDTH, other) * side
    formed = (shape.rows + shape.columns) * min(_WIDTH, shape.columns)
    work = max(formed, pulled, 4 * min(_ROWS, shape.rows) * shape.columns)
    return max(shape.nbytes, (curvature + work) * shape.itemsize)


@method(
    "wudi",
    WudiArgs,
    elementwise=all_but_matrices,
    workspace=matrices(_wudi_bytes),
    on_device=Copies(1.25, 2.6, square=4.2),
)
def wudi(stack: Stack, args: WudiArgs) -> Parts:
    """The task vector that interferes least with the inputs of each expert, found without data.

    τ = argmin Σ_t ‖(τ − w_t τ_t) (w_t τ_t)ᵀ‖² / ‖w_t τ_t‖² by Adam from Σ w_t τ_t;  θ = θ0 + scale · τ

    What is not treated as a matrix is averaged.

    Property:
        The objective never ends above where it began; experts with orthogonal row spaces are summed.

    Source:
        Cheng et al., Whoever started the interference should end it (ICML 2025), equation 8.
    """
    if not stack.is_matrix(args.matrices) or is_zero(stack.taus):
        return stack.base, stack.weighted.sum(0) / len(stack.taus)
    return stack.base, stack.merged(minimise_interference, args)
