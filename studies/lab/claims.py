"""Claims as data: what a paper says, what is measured of it, and the limits within which it holds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import pandas as pd

from mergeflow.evaluation.averages import mean_interval

Values: TypeAlias = Sequence[float] | pd.Series
Samples: TypeAlias = Mapping[str, Values]
"""By the quantity in words, one value for each seed; of a comparison the paired differences."""
Verdict: TypeAlias = bool | None
WORDS: dict[Verdict, str] = {True: "holds", False: "does not hold", None: "undecided"}


@dataclass(frozen=True)
class Finding:
    """A claim held against rows.

    Attributes:
        system: the row of the papers' systems that it belongs to, such as `M2`.
        claim: what should be seen, one sentence, as the paper puts it.
        measured: what was seen, with numbers.
        holds: True, False, or None where the intervals leave it undecided.
        rule: the rule of the verdict, written before the run.
        paper: what the paper itself prints.
        ours: whether the claim is an addition of this project, not the paper's.
    """

    system: str
    claim: str
    measured: str
    holds: Verdict
    rule: str = ""
    paper: str = ""
    ours: bool = False

    @property
    def verdict(self) -> str:
        """`holds`, `does not hold` or `undecided`."""
        return WORDS[self.holds]


@dataclass(frozen=True)
class Claim:
    """What a paper says, and the limits within which it holds. The sentence of the rule is made of the limits.

    Attributes:
        system: the row of the papers' systems, such as `M2`.
        says: the claim, one sentence, as the paper puts it; a function of the rows where it names what was measured.
        measure: from tidy rows to the measured quantities. Every one must lie within the limits; where there is none,
            the claim is undecided.
        low, high: the limits.
        of: what the limits are of, in words, such as "paired difference from each N to the next". The rule begins so.
        unit: printed after each value.
        digits: printed of each value.
        paper: what the paper itself prints.
        ours: whether the claim is an addition of this project.
        also: from tidy rows to what is said after the measured quantities.
        decide: for the few claims that no interval decides: from tidy rows to the verdict and what was measured. `of`
            is the whole rule then.
    """

    system: str
    says: str | Callable[[pd.DataFrame], str]
    measure: Callable[[pd.DataFrame], Samples] = lambda rows: {}
    low: float = -math.inf
    high: float = math.inf
    of: str = "every quantity"
    unit: str = "points"
    digits: int = 1
    paper: str = ""
    ours: bool = False
    also: Callable[[pd.DataFrame], str] | None = None
    decide: Callable[[pd.DataFrame], tuple[Verdict, str]] | None = None

    @property
    def rule(self) -> str:
        """The rule in words.

        Example:
            >>> Claim("M4", "The gap shrinks.", low=-2, high=2, of="gap at N ≥ 16").rule
            'gap at N ≥ 16 within -2 … 2 points'
        """
        if self.decide:
            return self.of
        unit = f" {self.unit}".rstrip()
        if self.low > -math.inf and self.high < math.inf:
            return f"{self.of} within {self.low:g} … {self.high:g}{unit}"
        return f"{self.of} ≥ {self.low:g}{unit}" if self.low > -math.inf else f"{self.of} ≤ {self.high:g}{unit}"

    def of_part(self, part: Callable[[pd.DataFrame], pd.DataFrame]) -> "Claim":
        """Return the same claim about a part of the rows, such as those of one training run."""
        says, decide, also = self.says, self.decide, self.also
        return replace(
            self,
            says=(lambda rows: says(part(rows))) if callable(says) else says,
            measure=lambda rows: self.measure(part(rows)),
            decide=decide and (lambda rows: decide(part(rows))),
            also=also and (lambda rows: also(part(rows))),
        )

    def judge(self, rows: pd.DataFrame) -> Finding:
        """Hold the claim against tidy rows.

        Example:
            >>> claim = Claim("M2", "It rises.", lambda rows: {"N = 1 → 8": rows.gain}, low=1)
            >>> found = claim.judge(pd.DataFrame({"gain": [5.0, 6.0, 5.5]}))
            >>> found.verdict, found.measured
            ('holds', 'N = 1 → 8: 5.5 ± 1.2 points')
        """
        if self.decide:
            holds, measured = self.decide(rows)
        else:
            samples = {name: list(values) for name, values in self.measure(rows).items()}
            unit = f" {self.unit}".rstrip()
            texts = [f"{name}: {with_interval(values, self.digits)}{unit}" for name, values in samples.items()]
            measured = "; ".join(texts) or "not measured with these choices"
            holds = all_hold([within(values, self.low, self.high) for values in samples.values()]) if samples else None
        more = self.also(rows) if self.also else ""
        says = self.says if isinstance(self.says, str) else self.says(rows)
        return Finding(self.system, says, measured + more, holds, self.rule, self.paper, self.ours)


def within(values: Values, low: float = -math.inf, high: float = math.inf) -> Verdict:
    """Judge whether a quantity lies between two limits.

    Args:
        values: one for each seed, at least one.
        low, high: the smallest and the largest value with which the claim holds.

    Returns:
        True (holds) if the whole 95 % interval of the mean lies within the limits, False (does not hold) if all of it
        lies outside, None (undecided) otherwise; one seed alone decides nothing.

    Example:
        >>> within([4.1, 3.9, 4.0], low=2.0), within([1.0, 1.1, 0.9], low=2.0), within([1.0, 3.0, 2.5], low=2.0)
        (True, False, None)
    """
    centre, half = mean_interval(list(values))
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


def with_interval(values: Values, digits: int = 1) -> str:
    """Return mean ± half the 95 % interval over seeds.

    Example:
        >>> with_interval([70.0, 71.0, 72.0])
        '71.0 ± 2.5'
    """
    centre, half = mean_interval(list(values))
    return f"{centre:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{centre:.{digits}f}"
