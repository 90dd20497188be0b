"""What to expect of two experts: how their tasks are related, and which λ adds or unlearns one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from mergeflow.analysis.provable.conditions import Interval, addition, unlearning
from mergeflow.analysis.provable.correlation import Correlations

RELATED = 1 / 3
"""From this α̂ on two tasks are aligned, and from its negative contradictory; the paper prints no threshold."""

Verdict = Literal["aligned", "irrelevant", "contradictory"]


def verdict(alpha: float) -> Verdict:
    """Return the kind of a pair of tasks by its α̂.

    Args:
        alpha: in [−1, 1].

    Example:
        >>> [verdict(one) for one in (0.891, 0.164, -0.849)]
        ['aligned', 'irrelevant', 'contradictory']

    Source:
        Li et al. 2025, Section 3.3; the three values are those of its Table 1.
    """
    return "irrelevant" if abs(alpha) < RELATED else "aligned" if alpha > 0 else "contradictory"


@dataclass(frozen=True)
class PairAdvice:
    """What to expect of two experts.

    Attributes:
        alpha: α̂ of their answers (Equation 11).
        changes: α̂ of what tuning changed of the base's answers.
        cosine: Of their task vectors.
        relation: The verdict by `changes`.
        addition: λ with which the first's vector plus λ times the second's is expected to solve both.
        unlearning: λ with which the same is expected to keep the first and to forget the second.
    """

    first: str
    second: str
    alpha: float
    changes: float
    cosine: float
    relation: Verdict
    addition: Interval
    unlearning: Interval

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON, a range as [low, high] with None for no end, and None for an empty one."""
        numbers = {key: value for key, value in vars(self).items() if not isinstance(value, Interval)}
        return numbers | {"addition": range_json(self.addition), "unlearning": range_json(self.unlearning)}


def advise_pairs(
    alphas: Correlations, changes: Correlations, cosines: Sequence[Sequence[float]], c: float = 0.5
) -> list[PairAdvice]:
    """Return the advice for each pair.

    Args:
        cosines: of their task vectors, [T][T], in the same order.
        c: the loss that counts as forgotten, in (0, 1).
    """
    pairs = []
    for i, j in combinations(range(len(alphas.names)), 2):
        change = changes.values[i][j]
        relation = verdict(change)
        # Within the threshold the tasks count as irrelevant, and the theory's α as 0.
        near = 0.0 if relation == "irrelevant" else change
        pairs.append(
            PairAdvice(
                alphas.names[i],
                alphas.names[j],
                alphas.values[i][j],
                change,
                cosines[i][j],
                relation,
                addition(near),
                unlearning(near, c),
            )
        )
    return pairs


def range_json(interval: Interval) -> list[float | None] | None:
    """Return a range as [low, high], an open end as None, an empty range as None.

    Example:
        >>> range_json(Interval(-math.inf, 0)), range_json(Interval(1, 0))
        ([None, 0], None)
    """
    if interval.empty:
        return None
    return [None if math.isinf(end) else end for end in (interval.low, interval.high)]
