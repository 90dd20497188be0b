"""How many subsets, which ones, and how sure their mean is."""

from itertools import combinations
from math import comb, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeflow.errors import MergeflowError
from mergeflow.evaluation.averages import (
    NORMAL_95,
    accuracy_range,
    draw_subsets,
    popoviciu_bound,
    sample_size,
    subset_interval,
)

TASKS = [f"task {number}" for number in range(20)]
shares = st.floats(0, 1)


@given(st.lists(shares, min_size=1, max_size=30), shares, shares)
def test_no_deviation_exceeds_the_bound(values: list[float], first: float, other: float) -> None:
    low, high = min(first, other), max(first, other)
    inside = [low + (high - low) * value for value in values]
    assert float(np.std(inside)) <= popoviciu_bound(low, high) + 1e-12
    assert float(np.std([low, high])) == pytest.approx(popoviciu_bound(low, high))  # half at each end


@given(st.floats(1e-3, 0.5), st.floats(1e-2, 0.5))
def test_the_sample_is_the_smallest_that_keeps_the_promise(deviation: float, margin: float) -> None:
    count = sample_size(deviation, margin)
    margins = [NORMAL_95 * deviation / number**0.5 for number in (count, count - 1) if number]
    assert margins[0] <= margin * (1 + 1e-9)
    assert all(margin_left > margin * (1 - 1e-9) for margin_left in margins[1:])


def test_sample_size_of_the_paper_s_rule() -> None:
    assert sample_size(0.25, 0.05) == 97  # (1.96 · 5)² = 96.04
    assert sample_size(0.0, 0.05) == 1


@given(st.lists(st.tuples(shares, shares), min_size=1, max_size=20), st.data())
def test_the_range_holds_every_subset_s_ends(pairs: list[tuple[float, float]], data: st.DataObject) -> None:
    zero = {str(index): zero_shot for index, (zero_shot, _) in enumerate(pairs)}
    individual = {str(index): other for index, (_, other) in enumerate(pairs)}
    size = data.draw(st.integers(1, len(pairs)))
    low, high = accuracy_range(zero, individual, size)
    for subset in draw_subsets(list(zero), size, 5, seed=0):
        assert sum(zero[task] for task in subset) / size >= low - 1e-12
        assert sum(individual[task] for task in subset) / size <= high + 1e-12


@given(st.integers(1, 20), st.integers(1, 60), st.integers(0, 2**31))
@settings(max_examples=60)
def test_subsets_differ_are_reproducible_and_in_order(size: int, count: int, seed: int) -> None:
    drawn = draw_subsets(TASKS, size, count, seed)
    assert drawn == draw_subsets(TASKS, size, count, seed)
    assert draw_subsets(TASKS, 8, 10, seed) != draw_subsets(TASKS, 8, 10, seed + 1)
    assert len(drawn) == len(set(drawn)) == min(count, comb(20, size))
    for subset in drawn:
        assert len(subset) == size
        assert list(subset) == [task for task in TASKS if task in subset]
    if count < comb(20, size):
        assert draw_subsets(TASKS, size, max(count // 2, 1), seed) == drawn[: max(count // 2, 1)]


@given(st.integers(1, 8), st.data())
def test_all_subsets_are_those_of_itertools(items: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, items))
    assert draw_subsets(TASKS[:items], size, 100, 0) == list(combinations(TASKS[:items], size))


def test_subsets_are_drawn_evenly() -> None:
    counted = dict.fromkeys(combinations("abcde", 2), 0)
    for seed in range(3000):
        counted[draw_subsets("abcde", 2, 1, seed)[0]] += 1  # type: ignore[index]
    assert max(abs(count - 300) for count in counted.values()) < 85  # 5 standard deviations


@given(st.lists(shares, min_size=2, max_size=20), st.integers(0, 1000))
def test_the_interval_shrinks_to_nothing_as_all_are_measured(values: list[float], more: int) -> None:
    some, half = subset_interval(values, len(values) + more + 1)
    whole, none = subset_interval(values, len(values))
    assert (some, none) == (whole, 0.0)
    assert subset_interval(values[:1], 7) == (values[0], inf)
    assert half <= subset_interval(values, len(values) + more + 2)[1] + 1e-15


def test_the_interval_covers_the_mean_of_all_subsets() -> None:
    random = np.random.default_rng(0)
    worth = dict(zip(TASKS, random.uniform(0.3, 1.0, 20), strict=True))
    mean = float(np.mean(list(worth.values())))  # of all subsets, too
    inside = 0
    for seed in range(300):
        values = [float(np.mean([worth[task] for task in subset])) for subset in draw_subsets(TASKS, 4, 20, seed)]
        centre, half = subset_interval(values, comb(20, 4))
        inside += abs(centre - mean) <= half
    assert 0.91 * 300 <= inside <= 0.99 * 300


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda: popoviciu_bound(1.0, 0.5), "lower end first"),
        (lambda: sample_size(0.2, 0.0), "margin of error"),
        (lambda: draw_subsets(TASKS, 21, 1, 0), "no subsets of 21 of 20"),
        (lambda: accuracy_range({"a": 0.1}, {"a": 0.2}, 0), "no subsets of 0 of 1"),
    ],
)
def test_bad_input_is_told(bad, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(MergeflowError, match=message):
        bad()
