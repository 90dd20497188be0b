"""Which λ to try for a sum of task vectors, before any merge is scored."""

import math
from collections.abc import Sequence

from mergeflow.analysis.provable.conditions import NOTHING, Interval

POINTS = 4
_LENGTH = (0.8, 1.6)  # the range of λ in units of the λ that keeps the experts' length
_BEYOND = 2.0  # the theory gives the smallest λ alone; its range ends at so many times that


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


def scales_of_lengths(norms: Sequence[float], cosines: Sequence[Sequence[float]]) -> Interval:
    """Return the range of λ around the one with which the merge is as far from the base as an expert.

    λ° = mean_i ‖τ_i‖ / ‖Σ τ_i‖;  the range is 0.8 λ° to 1.6 λ°

    Args:
        norms: ‖τ_i‖, [T].
        cosines: of all pairs of task vectors, [T][T].

    Returns:
        The range; empty if the task vectors cancel each other.

    Example:
        >>> found = scales_of_lengths([1.0] * 4, [[float(i == j) for j in range(4)] for i in range(4)])
        >>> round(found.low, 2), round(found.high, 2)
        (0.4, 0.8)

    Source:
        Ours.
    """
    square = sum(
        a * b * cosine for a, row in zip(norms, cosines, strict=True) for b, cosine in zip(norms, row, strict=True)
    )
    mean = sum(norms) / len(norms)
    if square <= 1e-12 * mean**2:
        return NOTHING
    centre = mean / math.sqrt(square)
    return Interval(_LENGTH[0] * centre, _LENGTH[1] * centre)


def suggested(scales: Interval) -> list[float]:
    """Return four λ from one end of a range to the other, each the same factor above the one before.

    Args:
        scales: the range, positive and not empty.

    Example:
        >>> suggested(Interval(0.4, 0.8))
        [0.4, 0.504, 0.635, 0.8]
    """
    factor = (scales.high / scales.low) ** (1 / (POINTS - 1))
    return [float(f"{scales.low * factor**step:.3g}") for step in range(POINTS)]
