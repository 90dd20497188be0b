"""The one-layer Transformer of the theory of task vectors: data, gradients, training, conditions, structure."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from mergeflow.analysis.provable.conditions import addition, unlearning
from mergeflow.errors import MergeflowError
from studies.theory.coefficients import closed_form, out_of_domain, predicted_outputs
from studies.theory.laboratory import (
    PatternTask,
    Training,
    Weights,
    attention_mass,
    combined,
    fine_tune,
    frobenius_left,
    hinge,
    initial,
    irrelevant_energy,
    judge,
    large_rows,
    leading_cosine,
    outputs,
    related_patterns,
    row_pruned,
    truncated,
)

D, M = 8, 48


def task(alpha: float = 0.0, second: bool = False, **changes: object) -> PatternTask:
    first, other, rest = related_patterns(alpha, D)
    return PatternTask(other if second else first, rest, **changes)  # type: ignore[arg-type]


def drawn(tokens: PatternTask, samples: int = 64, seed: int = 5) -> tuple[Tensor, Tensor]:
    return tokens.draw(samples, torch.Generator().manual_seed(seed))


# Data


def test_exact_counts_are_those_of_the_definition() -> None:
    tokens = task(tokens=20, relevant=8, confusing=2)
    inputs, labels = drawn(tokens)
    along = inputs @ tokens.pattern * labels[:, None]
    assert ((along > 0.5).sum(1) == 8).all()
    assert ((along < -0.5).sum(1) == 2).all()
    assert ((inputs @ tokens.irrelevant.T).sum((1, 2)) == 10).all()
    torch.testing.assert_close(inputs.norm(dim=2), torch.ones(64, 20, dtype=torch.float64))


@pytest.mark.parametrize(("relevant", "confusing"), [(2, 2), (0, 0), (15, 6), (4, -1)])
def test_counts_that_cannot_be_drawn_are_refused(relevant: int, confusing: int) -> None:
    with pytest.raises(MergeflowError, match="cannot be drawn"):
        task(tokens=20, relevant=relevant, confusing=confusing)


@given(st.floats(-1, 1))
def test_related_patterns_have_the_cosine_and_are_orthogonal_to_the_rest(alpha: float) -> None:
    first, second, rest = related_patterns(alpha, D)
    assert float(first @ second) == pytest.approx(alpha, abs=1e-12)
    assert float(second.norm()) == pytest.approx(1)
    assert float((rest @ torch.stack([first, second]).T).abs().max()) == 0


def test_a_cosine_beyond_one_is_refused() -> None:
    with pytest.raises(MergeflowError, match=r"1\.5"):
        related_patterns(1.5, D)


# Model and gradients


def by_definition(model: Weights, output: Tensor, sequence: Tensor) -> float:
    """Equation 4, position by position and neuron by neuron."""
    total = 0.0
    for at in range(len(sequence)):
        weights = [math.exp(float(token @ model.attention @ sequence[at])) for token in sequence]
        context = sum((w / sum(weights) * token for w, token in zip(weights, sequence, strict=True)), torch.zeros(D))
        for neuron, sign in zip(model.value, output, strict=True):
            total += float(sign) * max(0.0, float(neuron @ context))
    return total / len(sequence)


def test_the_model_is_equation_four() -> None:
    model, output = initial(D, 6, seed=1, spread=2.0)
    inputs, _ = drawn(task(), 3)
    expected = [by_definition(model, output, sequence) for sequence in inputs]
    torch.testing.assert_close(
        outputs(model.attention, model.value, output, inputs), torch.tensor(expected, dtype=torch.float64)
    )


def printed_gradients(model: Weights, output: Tensor, inputs: Tensor, labels: Tensor, masked: bool) -> Weights:
    """Equations 90 and 132, with the mask 1[y f < 1] of the hinge, which the paper omits, or without it."""
    active = (labels * outputs(model.attention, model.value, output, inputs) < 1) | (not masked)
    by_attention, by_value = torch.zeros_like(model.attention), torch.zeros_like(model.value)
    for sequence, label, counts in zip(inputs, labels, active, strict=True):
        if not counts:
            continue
        mass = torch.softmax(sequence @ model.attention @ sequence.T, 0)
        for at in range(len(sequence)):
            context = mass[:, at] @ sequence
            fires = (model.value @ context >= 0).double() * output
            by_value -= label / len(sequence) * fires[:, None] * context
            spread = (mass[:, at, None] * (sequence - context)).T @ (sequence @ model.value.T @ fires)
            by_attention -= label / len(sequence) * spread[:, None] * sequence[at]
    return Weights(by_attention / len(inputs), by_value / len(inputs))


def test_gradients_are_the_printed_ones_with_the_mask_of_the_hinge_and_not_without() -> None:
    begin, output = initial(D, M, seed=2)
    half = fine_tune(begin, output, task(), Training(0.5, 32, 55))
    inputs, labels = drawn(task())
    margins = labels * outputs(half.attention, half.value, output, inputs)
    assert 0 < (margins < 1).sum() < len(labels)  # some samples are beyond the margin, some are not
    gradients = torch.func.grad(hinge, argnums=(0, 1))(half.attention, half.value, output, inputs, labels)
    masked, unmasked = (printed_gradients(half, output, inputs, labels, with_hinge) for with_hinge in (True, False))
    for exact, with_mask, without in zip(
        gradients, (masked.attention, masked.value), (unmasked.attention, unmasked.value), strict=True
    ):
        torch.testing.assert_close(exact, with_mask, atol=1e-10, rtol=0)
        assert (exact - without).abs().max() > 1e-3


@pytest.fixture(scope="module")
def vectors() -> tuple[Weights, Tensor, list[Weights]]:
    begin, output = initial(D, M, seed=0)
    ones = [task(), task(second=True)]
    return (
        begin,
        output,
        [fine_tune(begin, output, pattern_task, Training(0.5, 64, 80)).minus(begin) for pattern_task in ones],
    )


def test_training_solves_its_task_and_not_an_orthogonal_one(vectors: tuple[Weights, Tensor, list[Weights]]) -> None:
    begin, output, (first, _) = vectors
    model = Weights(*(weights[None] for weights in vars(begin.plus(first)).values()))
    judged, other = (judge(model, output, *drawn(pattern_task)) for pattern_task in (task(), task(second=True)))
    assert judged.accuracy == 1
    assert judged.hinge < 0.02
    assert other.hinge > 0.8


def test_a_watch_ends_the_training() -> None:
    begin, output = initial(D, M, seed=0)
    seen: list[int] = []

    def watch(done: int, model: Weights) -> bool:
        seen.append(done)
        return done == 3

    ended = fine_tune(begin, output, task(), Training(0.5, 64, 80), watch)
    three = fine_tune(begin, output, task(), Training(0.5, 64, 3))
    assert seen == [0, 1, 2, 3]
    assert torch.equal(ended.value, three.value)


def test_a_stack_of_sums_is_each_sum(vectors: tuple[Weights, Tensor, list[Weights]]) -> None:
    begin, _, (first, second) = vectors
    stack = combined(begin, [first, second], torch.tensor([[1.0, -0.5], [0.0, 0.0]], dtype=torch.float64))
    torch.testing.assert_close(stack.value[0], begin.plus(first).plus(second, -0.5).value)
    assert torch.equal(stack.attention[1], begin.attention)


# Conditions


@given(st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=1, max_size=5), st.floats(0.01, 0.5))
def test_the_derived_closed_form_meets_both_sums_wherever_any_coefficients_do(gammas: list[float], c: float) -> None:
    nonzero = {gamma for gamma in gammas if gamma}
    assume(nonzero)
    if len(nonzero) == 1 and max(nonzero) < 0:
        with pytest.raises(MergeflowError, match="negative"):
            closed_form(gammas, c)
        return
    scales, towards = closed_form(gammas, c), np.array(gammas)
    assert scales @ towards >= (1 + c) * (1 - 1e-6)
    assert scales @ towards**2 == pytest.approx(1 + c, rel=1e-6)


def test_the_papers_figure_is_the_region_with_its_margin_and_not_with_the_theorems() -> None:
    steps = np.round(np.arange(-2, 3.01, 0.2), 10)
    grid = np.array([(first, two) for first in steps for two in steps])
    gammas = [0.792, -0.637]
    as_drawn = out_of_domain(grid, gammas, 0.01, 0.02, margin=0.2)
    as_proved = out_of_domain(grid, gammas, 0.01, 0.02)
    best = int(np.flatnonzero((grid == [1.2, -0.6]).all(1))[0])
    assert (as_drawn.sum(), as_proved.sum()) == (108, 13)
    assert as_drawn[best]
    assert not as_proved[best]


def test_the_ranges_of_the_three_cases() -> None:
    assert addition(0.0, 0.1).low == pytest.approx(1.1)
    assert addition(0.8).low == pytest.approx(0.2)
    assert addition(-0.1).empty
    assert (unlearning(0.0).low, unlearning(0.0).high) == (-math.inf, 0)
    assert (unlearning(-0.5).low, unlearning(-0.5).high) == (-4, 0)
    assert (unlearning(0.2, c=0.5).low, unlearning(0.2, c=0.5).high) == (0, 0.25)
    assert unlearning(0.9, c=0.5).empty
    assert predicted_outputs(0.5, 2.0) == (2.0, 2.5)


# Structure


def test_a_task_vector_points_along_its_pattern(vectors: tuple[Weights, Tensor, list[Weights]]) -> None:
    begin, _, (first, _) = vectors
    pattern = task().pattern
    assert leading_cosine(first.value, pattern) > 0.95
    assert leading_cosine(first.value, task(second=True).pattern) < 0.3
    inputs, labels = drawn(task())
    untrained, trained = (
        attention_mass(weights, inputs[labels > 0], pattern) for weights in (begin, begin.plus(first))
    )
    assert untrained == pytest.approx(0.4, abs=0.05)  # δ_*: attention is uniform before training
    assert trained > untrained + 0.2


def test_truncation_is_the_best_approximation_and_pruning_keeps_the_rows_it_says(
    vectors: tuple[Weights, Tensor, list[Weights]],
) -> None:
    _, _, (first, _) = vectors
    cut = truncated(first, 1)
    assert torch.linalg.matrix_rank(cut.value) == 1
    left = float((first.value - cut.value).norm() / first.value.norm())
    assert frobenius_left(first.value, 1) == pytest.approx(left)
    assert torch.allclose(truncated(first, D).value, first.value)
    largest, smallest = row_pruned(first, 0.25), row_pruned(first, 0.75, smallest=True)
    torch.testing.assert_close(largest.value + smallest.value, first.value)
    assert (largest.value.norm(dim=1) > 0).sum() == M // 4
    assert largest.value.norm() > row_pruned(first, 0.25, smallest=True).value.norm()
    assert large_rows(row_pruned(first, 0.25)) <= 0.25


def test_energy_and_large_rows_of_three_rows() -> None:
    rows = torch.tensor([[2.0, 1.0, 0.0], [1.0, 0.0, 1.0], [4.0, 0.0, 0.0]])
    vector, axes = Weights(torch.zeros(3, 3), rows), torch.eye(3)
    assert irrelevant_energy(vector, axes[0], axes[1:]) == pytest.approx(2 * 1 / 4), "M times the median of ¼, 1, 0"
    assert large_rows(vector) == pytest.approx(2 / 3), "√5 and 4, not √2"
