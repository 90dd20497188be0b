"""Coefficients for a task that nobody trained: inside the region that the theory promises, or why there are none."""

from collections.abc import Sequence

import numpy as np

from mergeflow.analysis.provable.conditions import check_numbers, closed_form, out_of_domain
from mergeflow.errors import MergeflowError


def smallest_coefficients(gammas: Sequence[float], c: float, margin: float = 1.0) -> np.ndarray:
    """Return the coefficients that meet both sums of Equation 7 with the smallest largest absolute value.

    min max_i abs(λ_i)  subject to  Σ λ_i γ_i ≥ margin + c,  Σ λ_i γ_i² ≥ margin + c

    The closed form of Equations 75 and 76 is one solution of the two sums; this is the one that leaves the box
    abs(λ_i) β ≤ c last.

    Args:
        gammas: γ, [K], each in [−1, 1].
        c: in (0, 1).
        margin: 1 in Theorem 3; the paper's Figure 2 takes 0.2.

    Returns:
        λ, [K].

    Raises:
        MergeflowError: no coefficients meet both sums, or a number is not what it can be.

    Example:
        >>> smallest_coefficients([0.8, 0.4], 0.2).round(3)
        array([1.5, 1.5])

    Source:
        Ours, for Li et al. 2025, Equation 7: a linear program.
    """
    from scipy.optimize import linprog

    closed_form(gammas, c)  # raises where there are none, with the reason
    towards = np.asarray(gammas, dtype=float)
    count = len(towards)
    sums = -np.stack([towards, towards**2])
    box = np.concatenate([np.eye(count), -np.eye(count)])
    limits = np.block([[sums, np.zeros((2, 1))], [box, -np.ones((2 * count, 1))]])
    bounds = np.concatenate([np.full(2, -(margin + c)), np.zeros(2 * count)])
    cost = np.append(np.zeros(count), 1.0)
    found = linprog(cost, A_ub=limits, b_ub=bounds, bounds=[(None, None)] * count + [(0, None)])
    assert found.success, found.message
    scales: np.ndarray = found.x[:count]
    return scales


def unseen_coefficients(gammas: Sequence[float], beta: float, c: float) -> np.ndarray:
    """Return coefficients that Theorem 3 promises to solve a task nobody trained.

    λ of the corrected closed form where abs(λ_i) β ≤ c, else the smallest that meet both sums

    Args:
        gammas: γ, [K]: how the task correlates with each expert's, in [−1, 1].
        beta: what is lost per unit of λ, ≥ 0.
        c: in (0, 1).

    Returns:
        λ, [K]; `out_of_domain` is true of it.

    Raises:
        MergeflowError: no coefficients meet both sums, or all of them leave the box; a number is not what it can be.

    Example:
        >>> unseen_coefficients([0.792, -0.637], 0.01, 0.02).round(3)
        array([ 1.682, -0.087])

    Source:
        Li et al. 2025, Theorem 3, Equations 75 and 76, corrected.
    """
    check_numbers("coefficients for an unseen task", gammas=gammas, beta=beta, c=c)
    smallest = smallest_coefficients(gammas, c)
    if float(np.abs(smallest).max()) * beta > c * (1 + 1e-9):
        raise MergeflowError(
            f"every choice of coefficients for γ = {list(gammas)} has one of at least {np.abs(smallest).max():.3g}, "
            f"and abs(λ) β ≤ c allows {c / beta:.3g} (β = {beta:g}, c = {c:g}): take experts nearer to the task."
        )
    closed = closed_form(gammas, c)
    # A hair of slack for sums that are exactly 1 + c.
    return closed if out_of_domain(closed[None], gammas, beta, c, 1 - 1e-9)[0] else smallest
