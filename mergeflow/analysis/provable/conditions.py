"""Which coefficients the theory allows for addition and unlearning.

Everything here takes numbers, so that it serves the one-layer Transformer, where α is the cosine of two patterns, and
real experts, where α̂ is the mean cosine of their centred outputs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mergeflow.errors import MergeflowError


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
    """Refuse numbers that the theory has no statement for, of which `what` is computed.

    Args:
        gammas: correlations of a task with the experts'.
        beta: what is lost per unit of λ.
    """
    named = [*(("α", value) for value in alphas), *(("γ", value) for value in gammas)]
    faults = [f"{name} = {value}, expected −1 to 1" for name, value in named if not -1 <= value <= 1]
    faults += [] if 0 <= beta < math.inf else [f"β = {beta}, expected 0 or more"]
    faults += [] if 0 < c < 1 else [f"c = {c}, expected a number between 0 and 1"]
    if faults:
        raise MergeflowError(f"{what} cannot be computed from {'; '.join(faults)}.")


def addition(alpha: float, beta: float = 0.0) -> Interval:
    """Return the λ with which Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 solves both tasks, of correlation α in [−1, 1].

    λ ≥ 1 − α + β for α ≥ 0, where β ≥ 0 is lost per unit of λ; none for α < 0

    Source: Li et al. 2025, Theorem 1, Equation 5, and Remark 1.
    """
    check_numbers("λ of addition", alphas=[alpha], beta=beta)
    return Interval(1 - alpha + beta, math.inf) if alpha >= 0 else NOTHING


def unlearning(alpha: float, c: float = 0.5) -> Interval:
    """Return the λ with which Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 keeps task 1 and has a hinge loss of order one on task 2.

    α = 0: λ ≤ 0;  α < 0: −1/α² ≤ λ ≤ 0;  0 < α < 1 − c: 0 ≤ λ ≤ c/2

    In the last case predictions on task 2 stay right: its loss is large and its accuracy is not small. α in [−1, 1] is
    the correlation of the two tasks, c in (0, 1) the loss that counts as forgotten.

    Source: Li et al. 2025, Theorem 2, Equation 6; the constants that Θ hides are 1, and poly(ηδ)·α is 0.
    """
    check_numbers("λ of unlearning", alphas=[alpha], c=c)
    if alpha == 0:
        return Interval(-math.inf, 0)
    if alpha < 0:
        return Interval(-1 / alpha**2, 0)
    return Interval(0, c / 2) if alpha < 1 - c else NOTHING
