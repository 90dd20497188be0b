"""Which coefficients the theory allows: addition, unlearning, and a task that nobody trained.

Everything here takes numbers, so that it serves the one-layer Transformer, where α is the cosine of two patterns, and
real experts, where α̂ is the mean cosine of their centred outputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mergeflow.errors import MergeflowError

_Rows = Sequence[Sequence[float]] | np.ndarray


@dataclass(frozen=True)
class Interval:
    """A range of λ; `low` > `high` if it is empty."""

    low: float
    high: float

    @property
    def empty(self) -> bool:
        """Whether no λ lies in it."""
        return self.low > self.high


NOTHING = Interval(math.inf, -math.inf)


def check_numbers(
    what: str, alphas: Sequence[float] = (), gammas: Sequence[float] = (), beta: float = 0.0, c: float = 0.5
) -> None:
    """Refuse numbers that the theory has no statement for.

    Args:
        what: is computed from them, for the message.
        alphas: correlations of two tasks.
        gammas: correlations of a task with the experts'.
        beta: what is lost per unit of λ.
        c: the theory's constant.

    Raises:
        MergeflowError: naming all that are out of range, or NaN.
    """
    named = [*(("α", one) for one in alphas), *(("γ", one) for one in gammas)]
    faults = [f"{name} = {one}, expected −1 to 1" for name, one in named if not -1 <= one <= 1]
    faults += [] if 0 <= beta < math.inf else [f"β = {beta}, expected 0 or more"]
    faults += [] if 0 < c < 1 else [f"c = {c}, expected a number between 0 and 1"]
    if faults:
        raise MergeflowError(f"{what} cannot be computed from {'; '.join(faults)}.")


def addition(alpha: float, beta: float = 0.0) -> Interval:
    """Return the λ with which Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 solves both tasks.

    λ ≥ 1 − α + β for α ≥ 0; none for α < 0

    Args:
        alpha: the correlation of the two tasks, in [−1, 1].
        beta: what is lost per unit of λ, ≥ 0.

    Raises:
        MergeflowError: a number is not what it can be.

    Source:
        Li et al. 2025, Theorem 1, Equation 5, and Remark 1.
    """
    check_numbers("λ of addition", alphas=[alpha], beta=beta)
    return Interval(1 - alpha + beta, math.inf) if alpha >= 0 else NOTHING


def unlearning(alpha: float, c: float = 0.5) -> Interval:
    """Return the λ with which Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 keeps task 1 and has a hinge loss of order one on task 2.

    α = 0: λ ≤ 0;  α < 0: −1/α² ≤ λ ≤ 0;  0 < α < 1 − c: 0 ≤ λ ≤ c/2

    In the last case predictions on task 2 stay right: its loss is large and its accuracy is not small.

    Args:
        alpha: the correlation of the two tasks, in [−1, 1].
        c: the loss that counts as forgotten, in (0, 1).

    Raises:
        MergeflowError: a number is not what it can be.

    Source:
        Li et al. 2025, Theorem 2, Equation 6; the constants that Θ hides are 1, and poly(ηδ)·α is 0.
    """
    check_numbers("λ of unlearning", alphas=[alpha], c=c)
    if alpha == 0:
        return Interval(-math.inf, 0)
    if alpha < 0:
        return Interval(-1 / alpha**2, 0)
    return Interval(0, c / 2) if alpha < 1 - c else NOTHING


def predicted_outputs(alpha: float, scale: float) -> tuple[float, float]:
    """Return the predicted y·f of Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 on the tasks 1 and 2: 1 + λα and λ + α.

    Source:
        Li et al. 2025, Equations 45 to 48; attention is taken to be on the right tokens.
    """
    return 1 + scale * alpha, scale + alpha


def out_of_domain(scales: _Rows, gammas: Sequence[float], beta: float, c: float, margin: float = 1.0) -> np.ndarray:
    """Say for which λ the theory promises that Ψ^(0) + Σ λ_i ΔΨ_i solves μ = Σ γ_i μ_i + κ μ_⊥.

    Σ λ_i γ_i ≥ margin + c,  Σ λ_i γ_i² ≥ margin + c,  abs(λ_i) β ≤ c

    Args:
        scales: λ, [k, K].
        gammas: γ, [K].
        beta: what is lost per unit of λ, ≥ 0.
        c: in (0, 1).
        margin: 1 in Theorem 3 (the hinge's); the paper's Figure 2 takes 0.2.

    Returns:
        [k], boolean.

    Raises:
        MergeflowError: as many λ as γ are not there, or a number is not what it can be.

    Source:
        Li et al. 2025, Theorem 3, Equation 7.
    """
    check_numbers("Equation 7", gammas=gammas, beta=beta, c=c)
    by, towards = np.asarray(scales, dtype=float), np.asarray(gammas, dtype=float)
    if by.ndim != 2 or by.shape[1] != len(towards):
        raise MergeflowError(
            f"λ of shape {list(by.shape)} and {len(towards)} γ were found; expected rows with one λ for each γ."
        )
    enough = (by @ towards >= margin + c) & (by @ towards**2 >= margin + c)
    inside: np.ndarray = enough & (np.abs(by) * beta <= c).all(1)
    return inside


def closed_form(gammas: Sequence[float], c: float, printed: bool = False) -> np.ndarray:
    """Return coefficients that meet both sums of Equation 7 with margin 1.

    λ_i = C (γ_i/√Σγ² + γ_i²/√Σγ⁴),  C = (1 + c) √Σγ² / (√Σγ² √Σγ⁴ + Σγ³)

    The second sum is then exactly 1 + c, the first (1 + c) √(Σγ²/Σγ⁴) ≥ 1 + c.

    Args:
        gammas: γ, [K], each in [−1, 1], at least one not 0.
        c: in (0, 1).
        printed: take C as the paper prints it, with √Σγ⁴ in the numerator. The first sum is then 1 + c and the second
            (1 + c) √(Σγ⁴/Σγ²), which is less than 1 + c unless every γ_i is 0, 1 or −1.

    Returns:
        λ, [K].

    Raises:
        MergeflowError: no λ meets both sums: all γ are 0, or those that are not 0 have one negative value; a number is
            not what it can be.

    Example:
        >>> scales, gammas = closed_form([0.792, -0.637], 0.02), np.array([0.792, -0.637])
        >>> round(float(scales @ gammas), 3), round(float(scales @ gammas**2), 3)
        (1.388, 1.02)
        >>> scales = closed_form([0.792, -0.637], 0.02, printed=True)
        >>> round(float(scales @ gammas), 3), round(float(scales @ gammas**2), 3)
        (1.02, 0.75)

    Source:
        Li et al. 2025, Equations 75 and 76, corrected.
    """
    check_numbers("coefficients for an unseen task", gammas=gammas, c=c)
    towards = np.asarray(gammas, dtype=float)
    nonzero = towards[towards != 0]
    if not len(nonzero) or ((nonzero < 0).all() and np.ptp(nonzero) < 1e-12):
        raise MergeflowError(
            f"No coefficients reach a task with γ = {list(gammas)}: the γ that are not 0 must not all be one negative "
            "number, and one must not be 0. Take experts that have something in common with the task."
        )
    second, fourth = np.sqrt((towards**2).sum()), np.sqrt((towards**4).sum())
    factor = (1 + c) * (fourth if printed else second) / (second * fourth + (towards**3).sum())
    scales: np.ndarray = factor * (towards / second + towards**2 / fourth)
    return scales
