"""Criteria of addition and unlearning, correlations of experts' answers, coefficients for a task nobody trained."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mergeflow.analysis.provable.conditions import addition, unlearning
from mergeflow.analysis.provable.correlation import correlations, output_correlation
from mergeflow.analysis.provable.criteria import addition_criteria, all_met, unlearning_criteria
from mergeflow.errors import MergeflowError
from studies.theory.coefficients import (
    closed_form,
    out_of_domain,
    responses,
    smallest_coefficients,
    unseen_coefficients,
)
from studies.theory.reduced import low_rank


def logits(seed: int, samples: int = 40, classes: int = 3) -> torch.Tensor:
    return torch.randn(samples, classes, generator=torch.Generator().manual_seed(seed))


# Criteria

UNKNOWN: Any = "acc"
DRAWN = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def test_losses_and_accuracies_are_held_to_opposite_sides() -> None:
    losses, accuracy = {"a": 0.05, "b": 0.5}, {"a": 0.9, "b": 0.5}
    assert all_met(unlearning_criteria(losses, {"a": 0.05}, {"b": 0.5}))
    assert all_met(unlearning_criteria(accuracy, {"a": 0.9}, {"b": 0.5}, "accuracy"))
    assert not all_met(unlearning_criteria({"a": 0.06, "b": 0.5}, {"a": 0.05}, {"b": 0.5}))
    assert not all_met(unlearning_criteria({"a": 0.9, "b": 0.51}, {"a": 0.9}, {"b": 0.5}, "accuracy"))
    assert [criterion.holds for criterion in addition_criteria(losses, {"a": 0.1, "b": 0.1})] == [True, False]
    assert [criterion.holds for criterion in addition_criteria(accuracy, {"a": 0.95, "b": 0.4}, "accuracy")] == [
        False,
        True,
    ]


def test_a_loss_can_be_forgotten_where_every_answer_is_right() -> None:
    # Theorem 2 (C): y f = λ + α > 0 on every sample, hinge 1 − λ − α.
    output = 0.1 + 0.3
    assert all_met(unlearning_criteria({"b": 1 - output}, {}, {"b": 0.5}))
    assert not all_met(unlearning_criteria({"b": float(output > 0)}, {}, {"b": 0.5}, "accuracy"))


def test_criteria_refuse_what_they_cannot_judge() -> None:
    with pytest.raises(MergeflowError, match="name it once"):
        unlearning_criteria({"a": 0.1}, {"a": 0.1}, {"a": 0.1})
    with pytest.raises(MergeflowError, match=r"'b' has no figure \(NaN\)"):
        addition_criteria({"b": math.nan}, {"b": 0.1})
    with pytest.raises(MergeflowError, match="digits"):
        addition_criteria({"digits": 0.1}, {"digit": 0.1})


# Correlation


def by_definition(first: torch.Tensor, second: torch.Tensor) -> float:
    """Equation 11, sample by sample."""
    total = 0.0
    for left, other in zip(first, second, strict=True):
        a, b = (left - first.mean(0)).tolist(), (other - second.mean(0)).tolist()
        total += sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
    return total / len(first)


def test_correlation_is_equation_eleven() -> None:
    first, second = logits(1).double(), logits(2).double()
    assert output_correlation(first, second)[0] == pytest.approx(by_definition(first, second), abs=1e-12)
    assert output_correlation(first, first)[0] == pytest.approx(1)
    assert output_correlation(first, 3 - 2 * first)[0] == pytest.approx(-1)


def test_samples_without_a_direction_are_left_out_and_counted() -> None:
    first, second = logits(1), logits(2)
    first[0] = first[1:].mean(0)  # then it is the mean of all
    value, left_out = output_correlation(first, second)
    assert left_out == 1
    assert value == pytest.approx(
        output_correlation(first[1:], second[1:] - second.mean(0) + second[1:].mean(0))[0], abs=0.02
    )
    with pytest.raises(MergeflowError, match="all samples alike"):
        output_correlation(torch.ones(5, 2), second[:5, :2])
    with pytest.raises(MergeflowError, match="at least one sample"):
        output_correlation(torch.ones(0, 2), torch.ones(0, 2))


def test_the_matrix_is_symmetric_and_takes_the_samples_of_both_tasks() -> None:
    outputs = {
        task: {name: logits(10 * i + j, classes=2 + i) for j, name in enumerate("abc")} for i, task in enumerate("abc")
    }
    matrix = correlations(outputs)
    assert np.array(matrix.values) == pytest.approx(np.array(matrix.values).T)
    halves = [output_correlation(outputs[task]["a"], outputs[task]["c"])[0] for task in "ac"]
    assert matrix.of("c", "a") == pytest.approx(sum(halves) / 2)
    assert matrix.of("b", "b") == 1


@given(st.floats(-2, 2), st.floats(-5, 5))
def test_a_response_is_the_share_of_the_own_change_whatever_is_added_to_all_classes(share: float, shift: float) -> None:
    base, tuned = logits(1), logits(2)
    other = base + share * (tuned - base) + shift
    rows = responses({"a": {"a": tuned, "b": other}, "b": {"a": base, "b": tuned}}, {"a": base, "b": base})
    assert rows[0] == pytest.approx([1, share], abs=1e-4)
    assert rows[1] == pytest.approx([0, 1])


def test_an_expert_that_changed_nothing_responds_to_nothing() -> None:
    base = logits(1)
    assert responses({"a": {"a": base, "b": logits(2)}, "b": {"a": base, "b": logits(2)}}, dict.fromkeys("ab", base))[
        0
    ] == [0, 0]


# A task nobody trained


@given(st.lists(st.floats(-1, 1).map(lambda x: round(x, 2)), min_size=1, max_size=4), st.floats(0.05, 0.5))
def test_the_smallest_coefficients_meet_both_sums_and_are_no_larger_than_the_closed_form(
    gammas: list[float], c: float
) -> None:
    nonzero = {gamma for gamma in gammas if gamma}
    assume(len(nonzero) > 1 or any(gamma > 0 for gamma in nonzero))
    # Between γ that nearly are one negative number the solutions are beyond 1e6, where the program's slack shows.
    assume(any(gamma > 0 for gamma in nonzero) or max(nonzero) - min(nonzero) > 0.1)
    scales, towards = smallest_coefficients(gammas, c), np.array(gammas)
    slack = 1e-6 * (1 + np.abs(scales).max())
    assert scales @ towards >= 1 + c - slack
    assert scales @ towards**2 >= 1 + c - slack
    assert np.abs(scales).max() <= np.abs(closed_form(gammas, c)).max() * (1 + 1e-6)


def test_the_closed_form_is_taken_inside_the_box_the_smallest_at_its_edge_and_none_beyond() -> None:
    gammas, c = [0.8, 0.2], 0.2
    closed, smallest = closed_form(gammas, c), smallest_coefficients(gammas, c)
    assert np.abs(smallest).max() < np.abs(closed).max()
    roomy = c / (1.01 * np.abs(closed).max())
    assert unseen_coefficients(gammas, roomy, c) == pytest.approx(closed)
    tight = c / (0.5 * (np.abs(closed).max() + np.abs(smallest).max()))
    coefficients = unseen_coefficients(gammas, tight, c)
    assert coefficients == pytest.approx(smallest)
    assert out_of_domain(coefficients[None], gammas, tight, c, margin=1 - 1e-6)[0]
    with pytest.raises(MergeflowError, match="allows"):
        unseen_coefficients(gammas, c / (0.9 * np.abs(smallest).max()), c)
    with pytest.raises(MergeflowError, match="one negative"):
        unseen_coefficients([-0.4, 0.0, -0.4], 0.01, c)


def test_the_pages_python_runs() -> None:
    page = (Path(__file__).parents[3] / "docs/sweep.md").read_text()
    (*_, block) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    exec(compile(block, "docs/sweep.md", "exec"), {})


def test_a_point_on_the_border_is_inside_and_the_box_is_told() -> None:
    assert out_of_domain([[1.5]], [1.0], 0.1, 0.5)[0], "1.5 ≥ 1 + c"
    assert out_of_domain([[2.0]], [1.0], 0.25, 0.5)[0], "2 β ≤ c"
    with pytest.raises(MergeflowError, match=r"at least 1\.5, and abs\(λ\) β ≤ c allows 0\.25 \(β = 2, c = 0\.5\)"):
        unseen_coefficients([1.0], beta=2.0, c=0.5)
    with pytest.raises(MergeflowError, match=r"γ = 2\.0, .*c = 3"):
        out_of_domain([[1.5]], [2.0], 0.1, 3.0)


def test_numbers_that_cannot_be_are_all_named_at_once() -> None:
    with pytest.raises(MergeflowError) as raised:
        unseen_coefficients([0.5, float("nan"), 1.5], beta=-1, c=2)
    assert str(raised.value) == (
        "coefficients for an unseen task cannot be computed from γ = nan, expected −1 to 1; γ = 1.5, expected −1 to 1; "
        "β = -1, expected 0 or more; c = 2, expected a number between 0 and 1."
    )
    with pytest.raises(MergeflowError, match="c = 0"):
        smallest_coefficients([0.5], 0)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: addition(math.nan), "λ of addition cannot be computed from α = nan"),
        (lambda: addition(1.5, -1.0), r"α = 1.5, expected −1 to 1; β = -1.0"),
        (lambda: unlearning(0.2, 2.0), "c = 2.0, expected a number between 0 and 1"),
        (lambda: closed_form([math.nan, 0.2], 0.2), "γ = nan"),
        (lambda: out_of_domain([[1, 2, 3]], [0.5, 0.2], 0.1, 0.2), r"λ of shape \[1, 3\] and 2 γ"),
        (lambda: out_of_domain([[1, 2]], [0.5, 0.2], -0.1, 0.2), "β = -0.1"),
        (
            lambda: addition_criteria({"a": 92.0}, {"a": 0.9}, "accuracy"),
            "'a' is 92; expected 1 at most; accuracies are shares of 1",
        ),
        (lambda: addition_criteria({"a": 0.9}, {"a": math.nan}), "the limit of the loss of the task 'a' is nan"),
        (lambda: addition_criteria({"a": 0.9}, {"a": 0.9}, UNKNOWN), "form of a criterion 'acc'"),
        (
            lambda: correlations({"a": {"a": DRAWN}, "b": {"a": DRAWN, "b": DRAWN}}),
            "'b' on the samples of 'a' are missing",
        ),
        (lambda: output_correlation(DRAWN * math.nan, DRAWN), "a NaN or an infinity"),
        (lambda: low_rank({"w": DRAWN}, 0), "rank is 0; expected at least 1"),
    ],
)
def test_what_has_no_answer_is_one_message(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(MergeflowError, match=message):
        ask()
