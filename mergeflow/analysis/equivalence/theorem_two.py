"""Theorem 2 measured: ‖C‖₂ beside its printed and its derived bounds. Each function returns table rows."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mergeflow.analysis.equivalence.bounds import (
    derived_network_bounds,
    pairs_factor,
    printed_network_bounds,
    task_factors,
)
from mergeflow.analysis.equivalence.gradient_descent import gradient, hessian, spectral_norm
from mergeflow.analysis.equivalence.problems import Problem
from mergeflow.analysis.equivalence.second_order import curvature_sum

Row = dict[str, Any]
POWER_STEPS = 6


def factor_rows(problem: Problem, scales: Sequence[float], step: float, epochs: int) -> Iterator[Row]:
    """Yield per scale ‖C‖₂ / (T · pairs · H · G) with measured H and G, and the three task factors that bound it.

    H is exact for nets and estimated from below by power iteration for others, which makes their ratio too large.

    Args:
        problem: the tasks and their common start.
        scales: α.
        step: η > 0.
        epochs: k ≥ 2.
    """
    count = len(problem.losses)
    for scale in scales:
        points = problem.joint_points(scale, step, epochs)
        steepest, curvature = _largest(problem, points)
        size = float(curvature_sum(problem.losses, points, scale, 0).norm())
        yield {
            "model": problem.name,
            "epochs": epochs,
            "scale": scale,
            "norm": size,
            "gradient": steepest,
            "hessian": curvature,
            "measured": size / (count * pairs_factor(epochs) * steepest * curvature),
            **task_factors(count, scale),
        }


def network_row(problem: Problem, gain: float, scale: float, step: float, epochs: int) -> Row:
    """Return ‖C‖₂, G and H of a feed-forward net beside the bounds in its weights' spectral norms.

    Each version of the theorem is taken whole: the statement with |αT − 1|, the appendix with the proof's |α(T+1) − 1|.

    Args:
        problem: of a feed-forward net.
        gain: factor on the initial weights, for the row.
        scale: α of task arithmetic.
        step: η > 0.
        epochs: k ≥ 2.
    """
    assert problem.net is not None
    points = problem.joint_points(scale, step, epochs)
    steepest, curvature = _largest(problem, points)
    norms = problem.net.spectral_norms(points)
    radius = max(float(one.inputs[:].norm(dim=1).max()) for one in problem.examples)
    constants = norms, radius, *problem.net.slopes
    derived, printed = derived_network_bounds(*constants), printed_network_bounds(*constants)
    factors, count = task_factors(len(problem.losses), scale), len(problem.losses) * pairs_factor(epochs)
    return {
        "model": problem.name,
        "gain": gain,
        "scale": scale,
        "epochs": epochs,
        "spectral_norms": norms,
        "gradient": steepest,
        "gradient_printed": printed["appendix"].gradient,
        "gradient_derived": derived.gradient,
        "hessian": curvature,
        "hessian_printed": printed["appendix"].hessian,
        "hessian_derived": derived.hessian,
        "norm": float(curvature_sum(problem.losses, points, scale, 0).norm()),
        "statement": count * factors["statement"] * printed["statement"].product,
        "appendix": count * factors["proof"] * printed["appendix"].product,
        "derived": count * factors["derived"] * derived.product,
    }


def _largest(problem: Problem, points: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Return max ‖∇L_t‖₂ and max ‖∇²L_t‖₂ over tasks and those points that C uses, all but the last."""
    used = [(loss, point) for loss in problem.losses for point in points[:-1]]
    steepest = max(float(gradient(loss, point).norm()) for loss, point in used)
    if problem.net is None:
        return steepest, max(spectral_norm(loss, point, POWER_STEPS) for loss, point in used)
    matrices = torch.stack([hessian(loss, point) for loss, point in used])
    return steepest, float(torch.linalg.eigvalsh(matrices).abs().max())
