r"""The second-order gap between task arithmetic and joint training.

Write θ^(e) for the joint iterates θ_MT^(e) (step αη on Σ_t L_t) and r_t(θ) = α Σ_t' ∇L_t'(θ) − ∇L_t(θ). The expert's
lead over the joint model obeys θ_t^(e) − θ^(e) = η Σ_{m<e} r_t(θ^(m)) + O(η²), since one step adds η r_t to it.
Put this into the expert's own steps and expand the gradient once:

    τ_t^(k) = −η Σ_{e<k} ∇L_t(θ_t^(e)) = −η Σ_{e<k} ∇L_t(θ^(e)) − η² Σ_{1≤e<k} ∇²L_t(θ^(e)) Σ_{m<e} r_t(θ^(m)) + O(η³).

Summed over tasks and times α the first sum is exactly the joint run, so

    θ_TA^(k) − θ_MT^(k) = −α η² Σ_t Σ_{e=1}^{k−1} ∇²L_t(θ^(e)) Σ_{m<e} r_t(θ^(m)) + O(η³).        (derived)

The published Theorem 1 prints +η² Σ_t Σ_{e=0}^{k−2} ∇²L_t(θ^(e)) Σ_{m≤e} r_t(θ^(m)) =: +η² C.      (printed)

The two sums have the same terms with the Hessian one epoch apart, which is O(η): to leading order the derived term
is −α η² C. The printed sign and the missing α are errors of the statement; the last line of the paper's own proof has
−α. The factor ½ that its Taylor step gives the Hessian belongs to the expansion of the loss, not of the gradient.

Source: Zhou et al. 2025, On Task Vectors and Gradients, Theorem 1 and appendix A.1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mergeflow.analysis.equivalence.gradient_descent import Loss, descend, gradient, hessian_vector, merge, summed
from mergeflow.errors import MergeflowError


def mismatches(losses: Sequence[Loss], point: Tensor, scale: float) -> Tensor:
    """Return r_t(θ) = α Σ_t' ∇L_t'(θ) − ∇L_t(θ) for every task, [T, P]: how one joint step differs from a task's own.

    Args:
        losses: T task losses.
        point: θ, [P].
        scale: α.

    Source: Zhou et al. 2025, equation 6.
    """
    gradients = torch.stack([gradient(loss, point) for loss in losses])
    return scale * gradients.sum(dim=0) - gradients


def curvature_sum(losses: Sequence[Loss], points: Sequence[Tensor], scale: float, shift: int) -> Tensor:
    r"""Return Σ_t Σ_{e=0}^{k−2} ∇²L_t(θ^(e+shift)) Σ_{m=0}^{e} r_t(θ^(m)), [P].

    Args:
        losses: T task losses.
        points: the joint iterates θ^(0), ..., θ^(k−1).
        scale: α.
        shift: 0 is the paper's C (equation 3); 1 is the sum that the derivation gives.

    Returns:
        The sum; zero for k = 1.
    """
    total, lead = torch.zeros_like(points[0]), torch.zeros(len(losses), len(points[0]), dtype=points[0].dtype)
    for epoch in range(len(points) - 1):
        lead = lead + mismatches(losses, points[epoch], scale)
        for loss, vector in zip(losses, lead, strict=True):
            total = total + hessian_vector(loss, points[epoch + shift], vector)
    return total


@dataclass(frozen=True)
class Gap:
    """The measured gap θ_TA^(k) − θ_MT^(k) at one step size beside what is predicted of it.

    Args:
        step: η.
        epochs: k.
        gap: ‖θ_TA − θ_MT‖₂.
        after_derived: ‖gap + α η² Σ_t Σ_e ...‖₂, what the derived term leaves.
        after_printed: ‖gap − η² C‖₂, what the printed term leaves.
        after_halved: what half the derived term leaves, the ½ of the proof's Taylor step.
        coefficient: c of the least-squares fit gap = c η² C; −α is derived, +1 printed.
        aligned: cosine of gap and C; ±1 where the gap is a multiple of C.
        joint: ‖θ_MT − θ0‖₂, to compare the gap with.
    """

    step: float
    epochs: int
    gap: float
    after_derived: float
    after_printed: float
    after_halved: float
    coefficient: float
    aligned: float
    joint: float


def measure_gap(losses: Sequence[Loss], start: Tensor, scale: float, step: float, epochs: int) -> Gap:
    """Run T experts and the joint model from θ0 and compare their gap with both second-order terms.

    Args:
        losses: T task losses.
        start: θ0, float64 [P].
        scale: α of task arithmetic; the joint run has step α η.
        step: η > 0.
        epochs: k ≥ 2.

    Raises:
        MergeflowError: k < 2, where the gap is zero; or a run diverges.

    Example:
        >>> bowl = lambda centre: lambda theta: ((theta - centre) ** 2).sum() / 2
        >>> found = measure_gap([bowl(1.0), bowl(-2.0)], torch.zeros(1, dtype=torch.float64), 0.7, 1e-4, 2)
        >>> round(found.coefficient, 6)
        -0.7

    Source: Zhou et al. 2025, Theorem 1, equation 2; derived in this file.
    """
    if epochs < 2:
        raise MergeflowError(f"the gap is zero after {epochs} epoch(s) (Theorem 1, equation 1): expected epochs ≥ 2.")
    vectors = [descend(loss, start, step, epochs)[-1] for loss in losses]
    moves = descend(summed(losses), start, scale * step, epochs)
    points = [start + move for move in moves[:-1]]
    gap = merge(vectors, scale) - moves[-1]
    printed = step**2 * curvature_sum(losses, points, scale, shift=0)
    derived = -scale * step**2 * curvature_sum(losses, points, scale, shift=1)
    return Gap(
        step=step,
        epochs=epochs,
        gap=float(gap.norm()),
        after_derived=float((gap - derived).norm()),
        after_printed=float((gap - printed).norm()),
        after_halved=float((gap - derived / 2).norm()),
        coefficient=float(gap @ printed / (printed @ printed)),
        aligned=float(gap @ printed / (gap.norm() * printed.norm())),
        joint=float(moves[-1].norm()),
    )


def log_log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through (log x, log y): 2 where y ∝ x².

    Example:
        >>> round(log_log_slope([1e-3, 1e-2, 1e-1], [3e-6, 3e-4, 3e-2]), 6)
        2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])
