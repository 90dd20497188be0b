"""Claims held against measured values: one value for each seed, one rule for each claim."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from studies.old.results import Finding, with_interval
from studies.old.verdicts import all_hold, within


def judge(
    system: str,
    claim: str,
    measured: Mapping[str, Sequence[float]],
    rule: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    unit: str = " points",
    digits: int = 1,
    ours: bool = False,
    beside: str = "",
) -> Finding:
    """Return the finding of a claim that holds where every quantity lies within the limits.

    Args:
        system: the row of the papers' systems.
        claim: as the paper puts it.
        measured: what is measured, in words → one value for each seed; of a comparison the paired differences. Where
            it is empty the claim is undecided.
        rule: the limits in words, and where the margin comes from.
        low, high: the limits, of every quantity.
        unit: printed after each value.
        digits: printed of each value.
        ours: whether the claim is an addition of this project.
        beside: said after the measured values.

    Example:
        >>> found = judge("M2", "It rises.", {"N = 8 less N = 1": [5.0, 6.0, 5.5]}, "by ≥ 1 point", low=1)
        >>> found.verdict, found.measured
        ('holds', 'N = 8 less N = 1: 5.5 ± 1.2 points')
    """
    told = "; ".join(f"{name}: {with_interval(values, digits)}{unit}" for name, values in measured.items())
    verdict = all_hold([within(values, low, high) for values in measured.values()]) if measured else None
    told = told or "not measured with these choices"
    return Finding(system, claim, f"{told}{beside}", verdict, rule, ours)


def paired(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return first − second, seed by seed.

    Example:
        >>> paired([3.0, 4.0], [1.0, 1.5])
        [2.0, 2.5]
    """
    return [one - other for one, other in zip(first, second, strict=True)]


def steps_between(over: Mapping[int, Sequence[float]], sign: int = 1) -> dict[str, list[float]]:
    """Return the paired differences from each N to the next, in words; with sign −1 those of a fall.

    Example:
        >>> steps_between({1: [70.0], 4: [85.5]})
        {'N = 1 → 4': [15.5]}
    """
    numbers = sorted(over)
    return {
        f"N = {before} → {after}": [sign * gain for gain in paired(over[after], over[before])]
        for before, after in pairwise(numbers)
    }
