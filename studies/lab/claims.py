"""Claims as data: what a paper says, what is measured of it, the limits within which it holds, and what it needs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats

from mergeflow.evaluation.averages import mean_interval

Values: TypeAlias = Sequence[float] | pd.Series
Samples: TypeAlias = Mapping[str, Values]
"""By the quantity in words, one value for each seed; of a comparison the paired differences."""
Parts: TypeAlias = Mapping[str, tuple[Any, ...]]
"""By the quantity in words, its values, the smallest and the largest mean with which the claim holds, and the standard
error over test examples where the rows have scores."""
Verdict: TypeAlias = bool | None
WORDS: dict[Verdict, str] = {True: "holds", False: "does not hold", None: "undecided"}
UNTESTED = "not testable here"
UNMEASURED = "not measured with these choices"
VERDICTS = (*WORDS.values(), UNTESTED)
RESAMPLES = 50  # of the test examples: their standard error is known to 10 %
LEVEL = 0.025  # of a claim, one-sided: what a 95 % interval leaves out on one side
SHOWN = 8  # parts of a claim that are printed: those nearest to the limits or farthest beyond


@dataclass(frozen=True)
class Finding:
    """A claim held against rows.

    Attributes:
        system, rule, paper, ours, setting, caveat: as of `Claim`.
        claim: what should be seen, one sentence, as the paper puts it.
        measured: what was seen, with numbers.
        holds: True, False, or None where the intervals leave it undecided, or it cannot be tested here.
        needs: what the claim needs to be testable, in words; nothing: it is testable anywhere.
        has: what was measured of that.
        testable: whether it is enough.
    """

    system: str
    claim: str
    measured: str
    holds: Verdict
    rule: str = ""
    paper: str = ""
    ours: bool = False
    setting: str = ""
    needs: str = ""
    has: str = ""
    testable: bool = True
    caveat: str = ""

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        return WORDS[self.holds] if self.testable else UNTESTED


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
        decide: for the few claims that no one pair of limits decides: from tidy rows to the verdict and what was
            measured. `of` is the whole rule then.
        setting: where it is tested.
        needs: the precondition, of `needs`: where it does not hold, the claim is not testable here.
        caveat: what this test leaves open, one sentence.
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
    setting: str = ""
    needs: "Claim | None" = None
    caveat: str = ""

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

    def of_part(self, part: Callable[[pd.DataFrame], pd.DataFrame], setting: str = "") -> "Claim":
        """Return the same claim about a part of the rows, such as those of one training run, which is its setting."""
        says, decide, also = self.says, self.decide, self.also
        return replace(
            self,
            says=(lambda rows: says(part(rows))) if callable(says) else says,
            measure=lambda rows: self.measure(part(rows)),
            decide=decide and (lambda rows: decide(part(rows))),
            also=also and (lambda rows: also(part(rows))),
            needs=self.needs and self.needs.of_part(part),
            setting=setting or self.setting,
        )

    def judge(self, rows: pd.DataFrame, judged: "dict[Claim, Finding] | None" = None) -> Finding:
        """Hold the claim against tidy rows.

        Args:
            judged: what claims on the same rows needed so far; several often need the same.

        Example:
            >>> claim = Claim("M2", "It rises.", lambda rows: {"N = 1 → 8": rows.gain}, low=1)
            >>> finding = claim.judge(pd.DataFrame({"gain": [5.0, 6.0, 5.5]}))
            >>> finding.verdict, finding.measured
            ('holds', 'N = 1 → 8: 5.5 ± 1.2 points')
        """
        judged = {} if judged is None else judged
        if self.needs and self.needs not in judged:
            judged[self.needs] = self.needs.judge(rows)
        need = judged[self.needs] if self.needs else None
        holds, measured = self.decide(rows) if self.decide else self._measured(rows)
        testable = measured != UNMEASURED and (need is None or need.holds is True)
        return Finding(
            self.system,
            self.says if isinstance(self.says, str) else self.says(rows),
            measured + (self.also(rows) if self.also else ""),
            holds if testable else None,
            self.rule,
            self.paper,
            self.ours,
            self.setting,
            need.rule if need else "",
            need.measured if need else "",
            testable,
            self.caveat,
        )

    def _measured(self, rows: pd.DataFrame) -> tuple[Verdict, str]:
        errors = example_errors(self.measure, rows)
        measured = self.measure(rows).items()
        parts: Parts = {name: (values, self.low, self.high, errors.get(name, 0.0)) for name, values in measured}
        if not parts:
            return None, UNMEASURED
        shown = list(parts) if len(parts) <= SHOWN else sorted(parts, key=lambda name: p_outside(*parts[name]))[:SHOWN]
        unit = f" {self.unit}".rstrip()
        texts = [f"{name}: {with_interval(parts[name][0], self.digits, parts[name][3])}{unit}" for name in shown]
        over = ", ± over seeds and test examples" if any(errors.values()) else ""
        return all_within(parts), "; ".join(texts) + over + family(parts)


def needs(measure: Callable[[pd.DataFrame], Samples], of: str, unit: str = "points", **limits: float) -> Claim:
    """Return a precondition: what a setting must have so that a claim can be tested in it."""
    return Claim("", of, measure, of=of, unit=unit, **limits)  # type: ignore[arg-type]


def example_errors(measure: Callable[[pd.DataFrame], Samples], rows: pd.DataFrame) -> dict[str, float]:
    """Return the standard error of each measured mean over the test examples; nothing where rows lack scores.

    The examples of a task are drawn with replacement, the same for every model and seed, so that comparisons stay
    paired; `measure` is asked of each of the `RESAMPLES` drawings. Seeds stay as they are: their spread counts beside.
    """
    if "scores" not in rows:
        return {}
    random, judged = np.random.default_rng(0), rows[rows.scores.notna()]
    drawn = pd.DataFrame(index=range(RESAMPLES), columns=judged.index, dtype=float)
    for _, of_task in judged.groupby(["task", judged.scores.map(len)]):
        scores = np.stack(list(of_task.scores))
        count = scores.shape[1]
        drawn[of_task.index] = 100 * random.multinomial(count, [1 / count] * count, RESAMPLES) @ scores.T / count
    plain = rows.drop(columns="scores")
    accuracies = (drawing.combine_first(plain.accuracy) for _, drawing in drawn.iterrows())
    means = [_means(measure, plain.assign(accuracy=accuracy)) for accuracy in accuracies]
    drawings = pd.DataFrame(means)
    unbounded = np.isinf(drawings).any()  # a share of a headroom that vanishes in some drawing
    return {name: math.inf if unbounded[name] else float(drawings[name].std()) for name in drawings}


def _means(measure: Callable[[pd.DataFrame], Samples], rows: pd.DataFrame) -> dict[str, float]:
    with np.errstate(invalid="ignore", divide="ignore"):
        means = {name: float(np.mean(list(values))) for name, values in measure(rows).items()}
    return {name: math.inf if math.isnan(mean) else mean for name, mean in means.items()}


def spread(values: Values, error: float = 0.0) -> tuple[float, float, float]:
    """Return a mean, its standard error over seeds and test examples, and the degrees of freedom of Student's t.

    se² = s²/n + error², df = (n − 1) · (se² / (s²/n))² by Welch and Satterthwaite: the error is known well.

    Args:
        values: One for each of n seeds, at least two.
        error: Standard error over the test examples, which all seeds share.

    Example:
        >>> [round(number, 2) for number in spread([70.0, 71.0, 72.0], error=1.0)]
        [71.0, 1.15, 32.0]
    """
    numbers = np.asarray(list(values), float)
    of_seeds, degrees = float(numbers.std(ddof=1)) / math.sqrt(len(numbers)), len(numbers) - 1
    if not error:
        return float(numbers.mean()), of_seeds, degrees
    whole = math.hypot(of_seeds, error)
    return float(numbers.mean()), whole, degrees * (whole / of_seeds) ** 4 if of_seeds else math.inf


def interval(values: Values, error: float = 0.0) -> tuple[float, float]:
    """Return a mean and half its 95 % interval, as `spread` has it; that of one seed is infinite."""
    if len(values) == 1 or not error:
        return mean_interval(list(values))
    centre, whole, degrees = spread(values, error)
    return centre, float(stats.t.ppf(1 - LEVEL, degrees)) * whole


def within(values: Values, low: float = -math.inf, high: float = math.inf, error: float = 0.0) -> Verdict:
    """Judge whether a mean lies between two limits: True if its whole 95 % interval does, False if none of it, or None.

    One seed alone decides nothing.

    Example:
        >>> within([4.1, 3.9, 4.0], low=2.0), within([1.0, 1.1, 0.9], low=2.0), within([1.0, 3.0, 2.5], low=2.0)
        (True, False, None)
    """
    centre, half = interval(values, error)
    if low <= centre - half and centre + half <= high:
        return True
    return False if centre + half < low or high < centre - half else None


def all_within(parts: Parts) -> Verdict:
    """Judge a claim of several parts: it holds where each lies within, and does not where by Holm one lies outside.

    Example:
        >>> all_within({"a": ([1.7, 1.8, 1.9], 2, 9), "b": ([5.1, 4.9, 5.0], 2, 9)}) is None  # p = .037 is not enough
        True
    """
    if all(within(*part) for part in parts.values()):
        return True
    return False if holm({name: p_outside(*part) for name, part in parts.items()}) else None


def p_outside(values: Values, low: float = -math.inf, high: float = math.inf, error: float = 0.0) -> float:
    """Return the one-sided p of Student's t, as `spread` has it, of a mean that lies within the limits; one seed: 1.

    Example:
        >>> round(p_outside([1.0, 1.1, 0.9], low=2.0), 4)
        0.0017
    """
    if len(values) == 1:
        return 1.0
    centre, whole, degrees = spread(values, error)
    beyond = max(low - centre, centre - high)
    return float(stats.t.sf(beyond / whole, degrees)) if whole > 0 else float(not beyond > 0)


def holm(ps: Mapping[str, float]) -> list[str]:
    """Return the hypotheses that Holm's step-down rejects: the smallest p at `LEVEL`/n, the next at `LEVEL`/(n − 1), ….

    Example:
        >>> holm({"a": 0.011, "b": 0.003, "c": 0.4}), holm({"a": 0.011, "c": 0.4, "d": 0.5})
        (['b', 'a'], [])

    Source:
        Holm, A simple sequentially rejective multiple test procedure (1979).
    """
    rejected: list[str] = []
    for name in sorted(ps, key=ps.__getitem__):
        if not ps[name] < LEVEL / (len(ps) - len(rejected)):
            break
        rejected.append(name)
    return rejected


def family(parts: Parts) -> str:
    """Return how many parts a claim has, and where it does not hold which of them lie outside by Holm."""
    if len(parts) == 1:
        return ""
    if all_within(parts):
        return f" ({len(parts)} parts)"
    ps = {name: p_outside(*part) for name, part in parts.items()}
    rejected = ", ".join(f"{name} (p {ps[name]:.1g})" for name in holm(ps)[:SHOWN])
    outside = f"outside by Holm: {rejected}" if rejected else f"none outside by Holm, smallest p {min(ps.values()):.2g}"
    return f" ({len(parts)} parts; {outside})"


def overall(findings: Iterable[Finding]) -> str:
    """Return one verdict of a claim that was judged in several settings.

    It holds where it holds in every setting that can test it, does not hold where it does not in some and holds in
    none, and is undecided otherwise.
    """
    tested = {finding.holds for finding in findings if finding.testable}
    if not tested:
        return UNTESTED
    return WORDS[True if tested == {True} else False if False in tested and True not in tested else None]


def with_interval(values: Values, digits: int = 1, error: float = 0.0) -> str:
    """Return mean ± half the 95 % interval, over seeds and, where an error over test examples is given, over these.

    Example:
        >>> with_interval([70.0, 71.0, 72.0])
        '71.0 ± 2.5'
    """
    centre, half = interval(values, error)
    return f"{centre:.{digits}f} ± {half:.{digits}f}" if len(values) > 1 else f"{centre:.{digits}f}"
