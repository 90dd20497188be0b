"""Verdicts of three values: an interval over seeds against limits that are written down before the run."""

import math
from collections.abc import Sequence

from mergeflow.evaluation.averages import mean_interval

Verdict = bool | None
WORDS: dict[Verdict, str] = {True: "holds", False: "does not hold", None: "undecided"}


def within(values: Sequence[float], low: float = -math.inf, high: float = math.inf) -> Verdict:
    """Judge whether a quantity lies between two limits.

    Args:
        values: one value per seed, at least one. For a comparison of two things they are paired differences: both
            things are measured with the same seed.
        low: the smallest value with which the claim holds.
        high: the largest.

    Returns:
        True (holds) if the whole 95 % interval of the mean lies within the limits, False (does not hold) if all of it
        lies outside, None (undecided) otherwise; one seed alone decides nothing.

    Example:
        >>> within([4.1, 3.9, 4.0], low=2.0), within([1.0, 1.1, 0.9], low=2.0), within([1.0, 3.0, 2.5], low=2.0)
        (True, False, None)
    """
    centre, half = mean_interval(values)
    if low <= centre - half and centre + half <= high:
        return True
    return False if centre + half < low or high < centre - half else None


def all_hold(verdicts: Sequence[Verdict]) -> Verdict:
    """Judge a claim of several parts: one that does not hold refutes it, one that is undecided leaves it open.

    Example:
        >>> all_hold([True, True]), all_hold([True, None]), all_hold([None, False])
        (True, None, False)
    """
    return False if False in verdicts else None if None in verdicts else True
