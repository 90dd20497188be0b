"""Directions found by optimisation without data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from mergeflow.late import torch
from mergeflow.merging.linalg.spectra import is_zero
from mergeflow.merging.matrices import Matrices, SplitQkv
from mergeflow.merging.method import Args, Parts, Stack, all_but_matrices, method
from mergeflow.merging.workspace import Copies, Matrix, matrices

if TYPE_CHECKING:
    from torch import Tensor

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


class WudiArgs(Args):
    """Arguments of `wudi`."""

    steps: int = Field(300, ge=0, description="Adam steps per matrix, ≥ 0")
    lr: float = Field(1e-5, gt=0, description="Adam's learning rate, > 0")
    matrices: Matrices = "attn_mlp"
    split_qkv: SplitQkv = False


def minimise_interference(taus: Tensor, args: WudiArgs) -> Tensor:
    """Return the τ that Adam finds from Στ_i for Σ ‖(τ − τ_i) τ_iᵀ‖² / ‖τ_i‖².

    The gradient is 2 (τ H − B) with H = Σ τ_iᵀτ_i/‖τ_i‖² and B = Σ τ_i τ_iᵀτ_i/‖τ_i‖², both formed once, so that a step
    costs one product of matrices however many experts there are.

    Args:
        taus: τ_i, [T, m, n].
        args: Steps of Adam, of which 0 return the sum, and its learning rate.

    Returns:
        τ, [m, n].

    Source:
        Cheng et al., Whoever started the interference should end it (ICML 2025), equation 8.
    """
    if not args.steps or is_zero(taus):
        return taus.sum(0)
    curvature, pull = _gradient_of(taus)
    result = taus.sum(0)
    del taus  # all that is needed of them is in the sums
    mean, square = torch.zeros_like(result), torch.zeros_like(result)
    room = result.new_empty(result.shape)
    for step in range(1, args.steps + 1):
        gradient = torch.mm(result, curvature, out=room).sub_(pull).mul_(2)
        mean.mul_(_BETA1).add_(gradient, alpha=1 - _BETA1)
        square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        size = args.lr / (1 - _BETA1**step)
        spread = torch.div(square, 1 - _BETA2**step, out=room).sqrt_().add_(_EPSILON)
        result.addcdiv_(mean, spread, value=-size)
    return result


def _gradient_of(taus: Tensor) -> tuple[Tensor, Tensor]:
    """Return H [n, n] and B [m, n] of the gradient 2 (τ H − B)."""
    columns = taus.shape[2]
    curvature, pull = taus.new_zeros(columns, columns), torch.zeros_like(taus[0])
    for tau in taus:
        if is_zero(tau):
            continue
        share = tau.T @ (tau / tau.square().sum())
        curvature += share
        pull += tau @ share
        del share  # the next is made before this name is given to it
    return curvature, pull


def _wudi_bytes(args: WudiArgs, one: Matrix) -> int:
    inputs = one.columns * one.columns * one.itemsize  # H; then Adam's four tensors and the gradient
    return max(2 * one.nbytes + 2 * inputs, 5 * one.nbytes + inputs - one.freed)


@method(
    "wudi",
    WudiArgs,
    elementwise=all_but_matrices,
    workspace=matrices(_wudi_bytes),
    on_device=Copies(1, 3, square=2, least=6),
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
