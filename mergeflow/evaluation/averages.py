"""Summaries of per-task accuracies, selection on validation, and subsets of tasks."""

import math
from collections.abc import Mapping, Sequence
from math import ceil, comb, sqrt
from random import Random
from typing import Any

import numpy as np

from mergeflow.documents import Candidate
from mergeflow.errors import MergeflowError


def mean(values: Mapping[str, float]) -> float:
    """Return (1/T) Σ_t a_t."""
    return sum(values.values()) / len(values)


def normalised(merged: Mapping[str, float], individual: Mapping[str, float]) -> float:
    """Return the normalised accuracy (1/T) Σ_t merged_t / individual_t; 1 means that merging lost nothing.

    Args:
        merged: the merged model's accuracy, or figure by another metric, per task, at most 1.
        individual: that of each task's own expert, at most 1. Of an expert at 0 or below there is no share: its task
            counts as 1 + merged_t − individual_t.

    Example:
        >>> normalised({"a": 0.4, "b": 0.9}, {"a": 0.8, "b": 0.9})
        0.75

    Source: CART, Section 5 ("normalized accuracy").
    """
    assert merged.keys() == individual.keys()
    ratios = [merged[t] / individual[t] if individual[t] > 0 else 1.0 + merged[t] - individual[t] for t in individual]
    return sum(ratios) / len(ratios)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of n repetitions and the half-width of its 95 % interval, t · s/√n with Student's t of n − 1.

    The half-width of a single value is infinite.

    Example:
        >>> centre, half = mean_interval([70.0, 71.0, 72.0])
        >>> centre, round(half, 2)
        (71.0, 2.48)
    """
    from scipy import stats  # a second to import, which the commands that only read params.yaml need not wait for

    assert len(values) > 0
    centre = float(np.mean(values))
    if len(values) == 1:
        return centre, math.inf
    quantile = float(stats.t.ppf(0.5 + 0.95 / 2, len(values) - 1))
    return centre, quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))


# Selection on validation: which candidate of a method, and which method.


def best_candidate(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate of a sweep with the highest `normalised` validation accuracy; the first of equals."""
    if not candidates:
        raise MergeflowError("nothing to select: the sweep has no candidates.")
    return max(candidates, key=lambda row: row["normalised"])


def at_grid_edge(args: Mapping[str, Any], grid: Mapping[str, Sequence[Any]]) -> list[str]:
    """Return the arguments whose chosen value is the smallest or largest of at least three numbers tried.

    A choice at the edge says that a better value may lie outside the grid.
    """
    edges = []
    for name, values in grid.items():
        numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(numbers) >= 3 and args[name] in (min(numbers), max(numbers)):
            edges.append(name)
    return edges


# Subsets of tasks: how many are enough for a mean over all of them, which ones, and how sure their mean is.


NORMAL_95 = 1.96  # the quantile z_0.025 as the paper rounds it


def popoviciu_bound(low: float, high: float) -> float:
    """Return the largest standard deviation that a variable between two values can have: σ ≤ (high − low) / 2.

    Source: CART, Appendix D, eq. 11. Half the values at each end reach it.
    """
    if not high >= low:
        raise MergeflowError(f"no value lies between {low} and {high}: give the lower end first.")
    return (high - low) / 2


def accuracy_range(zero_shot: Mapping[str, float], individual: Mapping[str, float], size: int) -> tuple[float, float]:
    """Return between which values the mean accuracy of a merge of N tasks is taken to lie.

    a = mean of the N lowest zero-shot accuracies, b = mean of the N highest individual ones

    That no merge is worse than the base or better than the experts is an assumption of the rule, not a theorem.

    Args:
        zero_shot: of the base per task, in [0, 1].
        individual: of each task's own expert, in [0, 1].
        size: N, from 1 to the number of tasks.

    Source: CART, Appendix D.
    """
    assert zero_shot.keys() == individual.keys()
    _check_size(size, len(individual))
    return sum(sorted(zero_shot.values())[:size]) / size, sum(sorted(individual.values())[-size:]) / size


def sample_size(deviation: float, margin: float) -> int:
    """Return how many subsets estimate the mean over all of them to ± ε at 95 %.

    m = ⌈(1.96 σ / ε)²⌉, at least 1

    Args:
        deviation: σ ≥ 0 over subsets, or an upper bound of it.
        margin: ε > 0, in the units of σ.

    Source: CART, Appendix D, eq. 10; by the central limit theorem, so for samples that are not small.
    """
    if not margin > 0:
        raise MergeflowError(f"the margin of error must be above 0, found {margin}.")
    return max(ceil((NORMAL_95 * deviation / margin) ** 2), 1)


def draw_subsets(items: Sequence[str], size: int, count: int, seed: int) -> list[tuple[str, ...]]:
    """Draw subsets without repetition, each in the order of `items` and with equal probability.

    They are all subsets where no more than `count` exist. A larger `count` with the same seed continues the same list,
    as long as there are more subsets than wanted.

    Source: CART, Section 5.3 and Appendix D.
    """
    assert len(set(items)) == len(items)
    assert count >= 1
    _check_size(size, len(items))
    total = comb(len(items), size)
    if count >= total:
        return [_subset(items, size, number) for number in range(total)]
    random, numbers = Random(f"{seed}/{size}"), dict[int, None]()
    while len(numbers) < count:
        numbers[int(random.random() * total)] = None  # random() is the one stream that Python promises to keep
    return [_subset(items, size, number) for number in numbers]


def subset_interval(values: Sequence[float], population: int) -> tuple[float, float]:
    """Return the mean over subsets drawn without repetition, and half its 95 % interval.

    t_{m−1} · s/√m · √(1 − m/M): it is 0 where all M subsets were measured, and of one out of many infinite.

    Args:
        values: one per subset, m ≥ 1.
        population: M ≥ m, how many subsets there are.

    Source: Cochran, Sampling techniques (1977), Section 2.6: the finite population correction.
    """
    assert len(values) <= population
    centre, half = mean_interval(values)
    return centre, half * sqrt(1 - len(values) / population) if len(values) < population else 0.0


def _check_size(size: int, items: int) -> None:
    if not 1 <= size <= items:
        raise MergeflowError(f"no subsets of {size} of {items} tasks: ask for 1 to {items}.")


def _subset(items: Sequence[str], size: int, number: int) -> tuple[str, ...]:
    """Return subset `number` of all in lexicographic order, 0 ≤ number < C(n, size)."""
    chosen: list[str] = []
    for index, item in enumerate(items):
        following = comb(len(items) - index - 1, size - len(chosen) - 1) if size > len(chosen) else 0
        if number < following:
            chosen.append(item)
        else:
            number -= following
    return tuple(chosen)
