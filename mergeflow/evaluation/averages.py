"""Summaries of per-task accuracies."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats


def mean(values: Mapping[str, float]) -> float:
    """Return (1/T) Σ_t a_t."""
    return sum(values.values()) / len(values)


def normalised(merged: Mapping[str, float], individual: Mapping[str, float]) -> float:
    """Return the normalised accuracy (1/T) Σ_t merged_t / individual_t.

    Args:
        merged: the merged model's accuracy, or figure by another metric, per task, at most 1.
        individual: that of each task's own expert, at most 1. Of an expert at 0 or below there is no share: its task
            counts as 1 + merged_t − individual_t.

    Returns:
        A value ≥ 0; 1 means that merging lost nothing. Source: CART, Section 5 ("normalized accuracy").

    Example:
        >>> normalised({"a": 0.4, "b": 0.9}, {"a": 0.8, "b": 0.9})
        0.75
    """
    assert merged.keys() == individual.keys()
    ratios = [merged[t] / individual[t] if individual[t] > 0 else 1.0 + merged[t] - individual[t] for t in individual]
    return sum(ratios) / len(ratios)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return the mean of n repetitions and the half-width of its interval, t · s/√n by Student's t with n − 1 degrees.

    Args:
        values: one number per repetition (seed), at least one.
        confidence: level of the interval, in (0, 1).

    Returns:
        (mean, half-width); the half-width of a single value is infinite.

    Example:
        >>> centre, half = mean_interval([70.0, 71.0, 72.0])
        >>> centre, round(half, 2)
        (71.0, 2.48)
    """
    assert len(values) > 0
    centre = float(np.mean(values))
    if len(values) == 1:
        return centre, math.inf
    quantile = float(stats.t.ppf(0.5 + confidence / 2, len(values) - 1))
    return centre, quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))
