"""Task vectors as gradients: explicit gradients and Hessians of a tiny net, Theorem 1, and its second-order term."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergeflow.errors import MergeflowError
from studies.theory.equivalence import curvature_sum, log_log_slope, measure_gap, mismatches
from studies.theory.gradient_descent import (
    Loss,
    Net,
    descend,
    flat_loss,
    gradient,
    hessian,
    hessian_vector,
    merge,
    random_tasks,
    summed,
    trained,
)

STEPS = (1e-4, 3e-4, 1e-3)


def problem(activation: str, seed: int = 0) -> tuple[Tensor, list[Loss]]:
    net = Net((5, 7, 6, 3), activation, seed)
    return net.start, [flat_loss(net.module, task) for task in random_tasks(3, 5, 3, 20, seed)]


def test_gradient_and_hessian_match_the_formulas_of_softmax_regression() -> None:
    net, task = Net((4, 3), "tanh"), random_tasks(1, 4, 3, 6, 0)[0]
    inputs, labels, point = task.inputs[:], task.labels, net.start
    loss = flat_loss(net.module, task)
    chance = torch.softmax(inputs @ point.view(3, 4).T, dim=1)
    error = chance - torch.nn.functional.one_hot(labels, 3)
    torch.testing.assert_close(gradient(loss, point), (error.T @ inputs / 6).flatten(), rtol=1e-12, atol=1e-14)
    expected = sum(
        torch.kron(torch.diag(p) - torch.outer(p, p), torch.outer(x, x)) / 6
        for p, x in zip(chance, inputs, strict=True)
    )
    torch.testing.assert_close(hessian(loss, point), expected, rtol=1e-12, atol=1e-14)


def test_hessian_vector_products_are_the_explicit_hessian_times_the_vector() -> None:
    point, losses = problem("tanh")
    vector = torch.randn(len(point), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix = hessian(losses[0], point)
    torch.testing.assert_close(matrix, matrix.T, rtol=0, atol=1e-14)
    torch.testing.assert_close(hessian_vector(losses[0], point, vector), matrix @ vector, rtol=1e-12, atol=1e-13)
    nearby = [gradient(losses[0], point + sign * 1e-5 * vector) for sign in (1, -1)]
    torch.testing.assert_close(matrix @ vector, (nearby[0] - nearby[1]) / 2e-5, rtol=0, atol=1e-8)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
def test_after_one_epoch_the_task_vector_is_the_negative_gradient(activation: str) -> None:
    net = Net((5, 7, 6, 3), activation)
    for task in random_tasks(3, 5, 3, 20, 0):
        vector = trained(net.module, [task], 0.1, 1) - net.start
        assert (vector + 0.1 * gradient(flat_loss(net.module, task), net.start)).abs().max() < 1e-12


@pytest.mark.parametrize("scale", [0.3, 0.7, 1.5])
def test_task_arithmetic_of_one_epoch_is_one_joint_step_and_of_more_is_not(scale: float) -> None:
    net, tasks = Net((5, 7, 6, 3), "tanh"), random_tasks(3, 5, 3, 20, 0)
    merged, joint = {}, {}
    for epochs in (1, 3):
        vectors = [trained(net.module, [task], 0.1, epochs) - net.start for task in tasks]
        merged[epochs] = net.start + merge(vectors, scale)
        joint[epochs] = trained(net.module, tasks, scale * 0.1, epochs)
    assert (merged[1] - joint[1]).abs().max() < 1e-12
    assert (merged[3] - joint[3]).abs().max() > 1e-6


def test_descent_is_what_a_training_run_does_and_deterministic() -> None:
    start, losses = problem("tanh")
    moves = descend(losses[0], start, 0.1, 5)
    run = trained(Net((5, 7, 6, 3), "tanh").module, random_tasks(3, 5, 3, 20, 0)[:1], 0.1, 5)
    torch.testing.assert_close(start + moves[-1], run, rtol=0, atol=1e-14)
    again = descend(losses[0], start, 0.1, 5)
    assert all(torch.equal(move, other) for move, other in zip(moves, again, strict=True))
    values = [float(losses[0](start + move)) for move in moves]
    assert all(later < earlier for earlier, later in pairwise(values))


def test_the_curvature_sum_is_the_double_sum_with_explicit_hessians() -> None:
    start, losses = problem("tanh")
    points = [start + move for move in descend(summed(losses), start, 0.01, 3)]
    for shift in (0, 1):
        expected = torch.zeros_like(start)
        for loss in losses:
            for epoch in range(3):
                for earlier in range(epoch + 1):
                    pull = 0.7 * sum(gradient(other, points[earlier]) for other in losses)
                    pull = pull - gradient(loss, points[earlier])
                    expected += hessian(loss, points[epoch + shift]) @ pull
        torch.testing.assert_close(curvature_sum(losses, points, 0.7, shift), expected, rtol=1e-10, atol=1e-12)
    assert curvature_sum(losses, points[:1], 0.7, 0).abs().max() == 0


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("epochs", [2, 4])
def test_the_gap_is_second_order_and_only_the_derived_term_takes_it_away(activation: str, epochs: int) -> None:
    start, losses = problem(activation)
    gaps = [measure_gap(losses, start, 0.7, step, epochs) for step in STEPS]
    assert log_log_slope(STEPS, [gap.gap for gap in gaps]) == pytest.approx(2, abs=0.02)
    assert log_log_slope(STEPS, [gap.after_derived for gap in gaps]) == pytest.approx(3, abs=0.02)
    assert log_log_slope(STEPS, [gap.after_printed for gap in gaps]) == pytest.approx(2, abs=0.02)
    assert log_log_slope(STEPS, [gap.after_halved for gap in gaps]) == pytest.approx(2, abs=0.02)


@given(scale=st.floats(0.1, 2), count=st.integers(2, 4), seed=st.integers(0, 99))
@settings(max_examples=10)
def test_the_coefficient_along_c_is_minus_the_scale(scale: float, count: int, seed: int) -> None:
    net = Net((3, 4, 3), "tanh", seed)
    losses = [flat_loss(net.module, task) for task in random_tasks(count, 3, 3, 8, seed)]
    gap = measure_gap(losses, net.start, scale, 1e-5, 3)
    assert gap.coefficient == pytest.approx(-scale, abs=2e-3 * max(scale, 1))
    assert gap.aligned == pytest.approx(-1, abs=1e-3)


def test_the_gap_of_quadratic_losses_is_exact_after_two_epochs() -> None:
    matrices = [torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double(), torch.tensor([[1.0, -0.3], [-0.3, 3.0]]).double()]
    centres = [torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, -1.0]).double()]
    losses: list[Loss] = [
        lambda theta, a=a, c=c: (theta - c) @ a @ (theta - c) / 2  # type: ignore[misc]
        for a, c in zip(matrices, centres, strict=True)
    ]
    gap = measure_gap(losses, torch.zeros(2, dtype=torch.float64), 0.7, 0.1, 2)
    assert gap.gap > 1e-3
    assert gap.after_derived < 1e-16


def test_mismatches_sum_to_what_the_paper_says() -> None:
    point, losses = problem("tanh")
    gradients = [gradient(loss, point) for loss in losses]
    first = 0.7 * (gradients[1] + gradients[2]) + (0.7 - 1) * gradients[0]
    torch.testing.assert_close(mismatches(losses, point, 0.7)[0], first, rtol=1e-12, atol=1e-14)


def test_errors_say_what_to_do() -> None:
    start, losses = problem("tanh")
    with pytest.raises(MergeflowError, match="expected epochs ≥ 2"):
        measure_gap(losses, start, 0.7, 0.1, 1)
    with pytest.raises(MergeflowError, match=r"diverged in epoch .* smaller step"):
        descend(lambda theta: (theta**4).sum(), start, 1e3, 20)
    with pytest.raises(MergeflowError, match="did you mean 'tanh'"):
        Net((2, 2), "tahn")
