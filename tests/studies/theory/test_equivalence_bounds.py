"""Bounds of Theorem 2: the derived ones hold and are reached; the printed ones have counterexamples."""

from math import comb, cos, pi, sin

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergeflow.modalities.classification import Classification
from studies.theory.equivalence import (
    curvature_sum,
    derived_network_bounds,
    pairs_factor,
    printed_network_bounds,
    task_factors,
)
from studies.theory.gradient_descent import Loss, Net, descend, flat_loss, gradient, hessian, random_tasks, summed

ROOT2 = 2**0.5


@pytest.mark.slow
@given(
    activation=st.sampled_from(["tanh", "relu", "linear"]),
    gain=st.floats(0.01, 4),
    widths=st.sampled_from([(3, 3), (3, 4, 3), (2, 5, 4, 3), (3, 3, 3, 3, 2)]),
    scale=st.floats(0.05, 2),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_the_derived_bounds_hold_on_every_net(
    activation: str, gain: float, widths: tuple[int, ...], scale: float, seed: int
) -> None:
    net, count, epochs = Net(widths, activation, seed), 3, 3
    losses = [flat_loss(net.module, task) for task in random_tasks(count, widths[0], widths[-1], 4, seed)]
    start = gain * net.start
    points = [start + move for move in descend(summed(losses), start, 0.01 * scale, epochs - 1)]
    bound = derived_network_bounds(net.spectral_norms(points), 1.0, *net.slopes)
    steepest = max(float(gradient(loss, point).norm()) for loss in losses for point in points)
    curvature = max(
        float(torch.linalg.eigvalsh(hessian(loss, point)).abs().max()) for loss in losses for point in points
    )
    total = float(curvature_sum(losses, points, scale, 0).norm())
    factor = count * pairs_factor(epochs) * task_factors(count, scale)["derived"]
    slack = 1 + 1e-9
    assert steepest <= bound.gradient * slack
    assert curvature <= bound.hessian * slack
    assert total <= factor * steepest * curvature * slack
    assert total <= factor * bound.product * slack


def quadratic(matrix: torch.Tensor, slope: torch.Tensor) -> Loss:
    return lambda theta: theta @ matrix @ theta / 2 + slope @ theta


def test_the_derived_task_factor_is_reached_and_the_printed_ones_fail_at_their_zeros() -> None:
    """Gradients that cancel, each Hessian a reflection that turns r_t = −g_t to one direction: H = G = 1."""
    angles = [2 * pi * task / 3 for task in range(3)]
    slopes = [torch.tensor([cos(a), sin(a)]).double() for a in angles]
    mirrors = [torch.tensor([[cos(a), sin(a)], [sin(a), -cos(a)]]).double() for a in angles]
    losses = [quadratic(mirror, slope) for mirror, slope in zip(mirrors, slopes, strict=True)]
    origin = torch.zeros(2, dtype=torch.float64)
    for scale, wrong in ((1 / 3, "statement"), (1 / 4, "proof")):
        total = float(curvature_sum(losses, [origin, origin], scale, 0).norm())
        factors = task_factors(3, scale)
        assert total == pytest.approx(3 * factors["derived"])
        assert factors[wrong] == pytest.approx(0)


@given(count=st.integers(1, 9), scale=st.floats(0.01, 3))
def test_the_statement_is_right_from_two_over_t_on_and_the_proof_from_two_over_t_plus_one(
    count: int, scale: float
) -> None:
    factors = task_factors(count, scale)
    for name, terms in (("statement", count), ("proof", count + 1)):
        if abs(scale * terms - 2) > 1e-9:
            assert (factors[name] >= factors["derived"]) == (scale * terms > 2)


def test_both_printed_pair_counts_are_the_same_number() -> None:
    for epochs in range(2, 20):
        h = epochs - 2
        assert pairs_factor(epochs) == comb(h + 2, 2) == (h + 1) * (h + 2) // 2


def test_softmax_regression_reaches_the_curvature_bound_that_the_paper_calls_zero() -> None:
    net = Net((2, 2), "relu")
    loss = flat_loss(net.module, Classification("one", torch.tensor([[1.0, 0.0]]).double(), torch.tensor([0])))
    origin = torch.zeros(4, dtype=torch.float64)
    curvature = float(torch.linalg.eigvalsh(hessian(loss, origin)).max())
    steepest = float(gradient(loss, origin).norm())
    derived = derived_network_bounds([0.0], 1.0, *net.slopes)
    assert curvature == pytest.approx(0.5) == pytest.approx(derived.hessian)
    assert steepest == pytest.approx(1 / ROOT2)
    assert steepest < derived.gradient == pytest.approx(ROOT2)
    for printed in printed_network_bounds([0.0], 1.0, *net.slopes).values():
        assert printed.gradient == 0 < steepest
        assert printed.hessian == 0 < curvature


def test_a_relu_net_has_curvature_across_layers_that_the_paper_drops() -> None:
    """A confident wrong answer of a two-layer net: softmax is flat there, the product of the layers is not."""
    net = Net((1, 1, 2), "relu")
    point = torch.tensor([1.0, -20.0, 20.0]).double()
    loss = flat_loss(net.module, Classification("one", torch.tensor([[1.0]]).double(), torch.tensor([0])))
    curvature = float(torch.linalg.eigvalsh(hessian(loss, point)).abs().max())
    weak = torch.tensor([0.1, -0.1, 0.1]).double()
    shallow = float(torch.linalg.eigvalsh(hessian(loss, weak)).abs().max())
    printed = printed_network_bounds(net.spectral_norms([weak]), 1.0, *net.slopes)["appendix"].hessian
    derived = derived_network_bounds(net.spectral_norms([weak]), 1.0, *net.slopes).hessian
    assert curvature == pytest.approx(ROOT2, rel=1e-3)
    assert printed < shallow < derived


def test_the_printed_theorem_fails_on_a_net_with_small_weights() -> None:
    for activation in ("tanh", "relu"):
        net = Net((8, 12, 12, 4), activation)
        losses = [flat_loss(net.module, task) for task in random_tasks(3, 8, 4, 16, 0)]
        start = 0.1 * net.start
        points = [start + move for move in descend(summed(losses), start, 0.007, 1)]
        total = float(curvature_sum(losses, points, 0.7, 0).norm())
        norms, factors = net.spectral_norms(points), task_factors(3, 0.7)
        printed = printed_network_bounds(norms, 1.0, *net.slopes)
        for version, factor in (("statement", "statement"), ("appendix", "proof")):
            assert total > 3 * factors[factor] * printed[version].product
        assert total <= 3 * factors["derived"] * derived_network_bounds(norms, 1.0, *net.slopes).product
