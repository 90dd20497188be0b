"""Which coefficients the theory allows for a sum of task vectors and for a task that nobody trained."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from mergeflow.analysis.provable.conditions import NOTHING, Interval, check_numbers
from mergeflow.errors import MergeflowError

_BEYOND = 2.0  # the theory gives the smallest λ alone; the range that is tried ends at so many times that
BETA, C = 0.01, 0.02  # β and c of the paper's Figure 2
_Rows = Sequence[Sequence[float]] | np.ndarray


def predicted_outputs(alpha: float, scale: float) -> tuple[float, float]:
    """Return the predicted y·f of Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 on the tasks 1 and 2: 1 + λα and λ + α.

    Source:
        Li et al. 2025, Equations 45 to 48; attention is taken to be on the right tokens.
    """
    return 1 + scale * alpha, scale + alpha


def scales_of_theory(alphas: Sequence[Sequence[float]]) -> Interval:
    """Return the range of λ in Ψ^(0) + λ Σ ΔΨ_i in which the theory expects all tasks to be solved.

    y f_i = λ Σ_j α_ij ≥ 1 for all i, so that λ ≥ 1 / min_i Σ_j α_ij; the range ends at twice that

    Args:
        alphas: α̂ of all pairs, [T][T], with 1 on the diagonal.

    Returns:
        The range; empty if a task's α sum to 0 or less: then no λ solves all tasks.

    Example:
        >>> scales_of_theory([[1.0, 0.25], [0.25, 1.0]])
        Interval(low=0.8, high=1.6)

    Source:
        Ours, from Equations 45 to 48 of Li et al. 2025 with one λ for all tasks. The theory has no upper end.
    """
    least = min(sum(row) for row in alphas)
    return Interval(1 / least, _BEYOND / least) if least > 0 else NOTHING


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
        printed: take C as the paper prints it, with √Σγ⁴ in the numerator. The first sum is then 1 + c and the second
            (1 + c) √(Σγ⁴/Σγ²), which is less than 1 + c unless every γ_i is 0, 1 or −1.

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


def smallest_coefficients(gammas: Sequence[float], c: float) -> np.ndarray:
    """Return the coefficients that meet both sums of Equation 7 with the smallest largest absolute value.

    min max_i abs(λ_i)  subject to  Σ λ_i γ_i ≥ 1 + c,  Σ λ_i γ_i² ≥ 1 + c

    The closed form of Equations 75 and 76 is one solution of the two sums; this is the one that leaves the box
    abs(λ_i) β ≤ c last.

    Args:
        gammas: γ, [K], each in [−1, 1].

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
    bounds = np.concatenate([np.full(2, -(1.0 + c)), np.zeros(2 * count)])
    cost = np.append(np.zeros(count), 1.0)
    solution = linprog(cost, A_ub=limits, b_ub=bounds, bounds=[(None, None)] * count + [(0, None)])
    assert solution.success, solution.message
    scales: np.ndarray = solution.x[:count]
    return scales


def unseen_coefficients(gammas: Sequence[float], beta: float, c: float) -> np.ndarray:
    """Return coefficients that Theorem 3 promises to solve a task nobody trained.

    λ of the corrected closed form where abs(λ_i) β ≤ c, else the smallest that meet both sums

    Args:
        gammas: γ, [K]: how the task correlates with each expert's, in [−1, 1].

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


def responses(outputs: Mapping[str, Mapping[str, Tensor]], base: Mapping[str, Tensor]) -> list[list[float]]:
    """Return how far each expert moves the answers to each task's samples along the way of the task's own expert.

    A_ij = Σ_n ⟨Δ_j^n, Δ_i^n⟩ / Σ_n ‖Δ_i^n‖²,  Δ_j^n = y_j^n − y_0^n on task i's samples, less its mean over classes

    Eq. 11 compares answers. Experts of one pre-trained base share what the base answers, so that its cosine is large
    for tasks that have nothing in common; A compares what tuning has changed, with its length.

    Args:
        outputs: task → expert → logits on that task's samples, [n, C].
        base: task → the base's logits on them, [n, C].

    Returns:
        [T][T], rows for tasks, columns for experts; 1 on the diagonal; 0 in the row of a task whose own expert answers
        as the base does. Not symmetric, and not bounded.

    Example:
        >>> import torch
        >>> zero, own = torch.zeros(3, 2), torch.tensor([[1.0, -1.0], [-2.0, 2.0], [0.5, -0.5]])
        >>> answers = {"a": {"a": own, "b": -0.5 * own}, "b": {"a": 0 * own, "b": own}}
        >>> responses(answers, {"a": zero, "b": zero})
        [[1.0, -0.5], [0.0, 1.0]]

    Source:
        Ours; in the theory's model, whose base answers 0, A_ij is the α of Equations 45 to 48.
    """
    rows = []
    for task, answers in outputs.items():
        moved = {expert: _moved(outputs_of, base[task]) for expert, outputs_of in answers.items()}
        energy = float((moved[task] ** 2).sum())
        rows.append([float((moved[expert] * moved[task]).sum()) / energy if energy else 0.0 for expert in outputs])
    return rows


def _moved(outputs: Tensor, base: Tensor) -> Tensor:
    change = outputs.double() - base.double()
    return change - change.mean(1, keepdim=True) if change.shape[1] > 1 else change
