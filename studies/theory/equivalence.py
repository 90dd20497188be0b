"""The second-order gap between task arithmetic and joint training.

Write θ^(e) for the joint iterates θ_MT^(e) (step αη on Σ_t L_t) and r_t(θ) = α Σ_t' ∇L_t'(θ) − ∇L_t(θ). The expert's
lead over the joint model obeys θ_t^(e) − θ^(e) = η Σ_{m<e} r_t(θ^(m)) + O(η²), since one step adds η r_t to it.
Put this into the expert's own steps and expand the gradient once:

    τ_t^(k) = −η Σ_{e<k} ∇L_t(θ_t^(e)) = −η Σ_{e<k} ∇L_t(θ^(e)) − η² Σ_{1≤e<k} ∇²L_t(θ^(e)) Σ_{m<e} r_t(θ^(m)) + O(η³).

Summed over tasks and times α the first sum is exactly the joint run, so

    θ_TA^(k) − θ_MT^(k) = −α η² Σ_t Σ_{e=1}^{k−1} ∇²L_t(θ^(e)) Σ_{m<e} r_t(θ^(m)) + O(η³).        (derived)

The published Theorem 1 prints +η² Σ_t Σ_{e=0}^{k−2} ∇²L_t(θ^(e)) Σ_{m≤e} r_t(θ^(m)) =: +η² C.      (printed)

The two sums have the same terms with the Hessian one epoch apart, which is O(η): to leading order the derived term
is −α η² C. The printed sign and the missing α are errors of the statement; the last line of the paper's own proof has
−α. The factor ½ that its Taylor step gives the Hessian belongs to the expansion of the loss, not of the gradient.

Source: Zhou et al. 2025, On Task Vectors and Gradients, Theorem 1 and appendix A.1.

Bounds on ‖C‖₂ for feed-forward nets: as printed, and as the derivation allows.

‖C‖₂ ≤ T · (h+1)(h+2)/2 · a · H · G with h = k − 2, where H bounds ‖∇²L_t‖₂ and G bounds ‖∇L_t‖₂ along the joint run,
and the task factor a bounds the mean over tasks of ‖r_t‖₂ / G.

*Task factor.* With S = Σ_t g_t, Σ_t ‖r_t‖² = Σ_t ‖αS − g_t‖² = α(αT − 2) ‖S‖² + Σ_t ‖g_t‖². The first term is at most
0 where 0 ≤ αT ≤ 2, and else largest at ‖S‖ = TG. By Cauchy and Schwarz (Σ_t ‖r_t‖)² ≤ T Σ_t ‖r_t‖², hence

    a = max(1, |αT − 1|),

reached by gradients that cancel (1) or are equal (|αT − 1|). The theorem prints |αT − 1|: right for αT ≥ 2 only; for
the average, α = 1/T, it says C = 0. The proof's last line prints |α(T+1) − 1|: too large for α ≥ 2/(T+1), too small
below, and 0 at α = 1/(T+1). The number of pairs is the same in both, C(h+2, 2) = (h+1)(h+2)/2.

*Network constants.* Move the weights along V_1, ..., V_L with v_l = ‖V_l‖_F and Σ_l v_l² = 1, and differentiate the
forward pass h_l = W_l a_{l−1}, a_l = φ(h_l) twice along the line. With ‖a_0‖ ≤ M, φ(0) = 0:

    ‖a_l‖  ≤ A_l = M β^l Π_{i≤l} s_i
    ‖h_l'‖ ≤ b_l·v     with b_l = A_{l−1} e_l + s_l β b_{l−1}
    ‖h_l''‖ ≤ vᵀ Q_l v with Q_l = β (e_l b_{l−1}ᵀ + b_{l−1} e_lᵀ) + s_l (γ b_{l−1} b_{l−1}ᵀ + β Q_{l−1})

Since ‖p − e_y‖ ≤ √2 and ‖diag(p) − ppᵀ‖ ≤ ½, this gives

    G ≤ √2 ‖b_L‖ = √2 M β^{L−1} Π √(Σ_l s_l^{−2}),        H ≤ λ_max(½ b_L b_Lᵀ + √2 Q_L).

The theorem prints G ≤ √2 M Π β^{L−1}, which lacks the sum over layers and can fail where Σ_l s_l^{−2} > 1: at zero
weights and depth 1 it calls a gradient of size M/√2 zero. It prints H ≤ 2γ M² Π² β^{2L−2}, which is 0 for γ = 0
although softmax regression has curvature; and for ReLU H ≤ ½ M² Π² β^{2L−2}, on the ground that a net linear in x is
linear in its weights, which drops the products of two layers' weights (Q_L).

Source: Zhou et al. 2025, On Task Vectors and Gradients, Theorem 2 and appendix A.2; derived in this file.

Theorem 1 measured: one epoch is exact, more epochs leave a second-order gap. Theorem 2 measured: ‖C‖₂ beside its
printed and its derived bounds. Each function returns table rows. In all of them `scale` is α of task arithmetic, the
joint run has the step αη, `step` is η > 0 and `epochs` is k ≥ 2.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergeflow.errors import MergeflowError
from studies.theory.gradient_descent import (
    Loss,
    Problem,
    descend,
    gradient,
    hessian,
    hessian_vector,
    merge,
    spectral_norm,
    summed,
)


def mismatches(losses: Sequence[Loss], point: Tensor, scale: float) -> Tensor:
    """Return r_t(θ) = α Σ_t' ∇L_t'(θ) − ∇L_t(θ) for every task, [T, P]: how one joint step differs from a task's own.

    Args:
        point: θ, [P].

    Source: Zhou et al. 2025, equation 6.
    """
    gradients = torch.stack([gradient(loss, point) for loss in losses])
    return scale * gradients.sum(dim=0) - gradients


def curvature_sum(losses: Sequence[Loss], points: Sequence[Tensor], scale: float, shift: int) -> Tensor:
    r"""Return Σ_t Σ_{e=0}^{k−2} ∇²L_t(θ^(e+shift)) Σ_{m=0}^{e} r_t(θ^(m)), [P].

    Args:
        points: the joint iterates θ^(0), ..., θ^(k−1).
        shift: 0 is the paper's C (equation 3); 1 is the sum that the derivation gives.

    Returns:
        The sum; zero for k = 1.
    """
    total, lead = torch.zeros_like(points[0]), torch.zeros(len(losses), len(points[0]), dtype=points[0].dtype)
    for epoch in range(len(points) - 1):
        lead = lead + mismatches(losses, points[epoch], scale)
        for loss, vector in zip(losses, lead, strict=True):
            total = total + hessian_vector(loss, points[epoch + shift], vector)
    return total


@dataclass(frozen=True)
class Gap:
    """The measured gap θ_TA^(k) − θ_MT^(k) at one step size beside what is predicted of it.

    Args:
        step: η.
        epochs: k.
        gap: ‖θ_TA − θ_MT‖₂.
        after_derived: ‖gap + α η² Σ_t Σ_e ...‖₂, what the derived term leaves.
        after_printed: ‖gap − η² C‖₂, what the printed term leaves.
        after_halved: what half the derived term leaves, the ½ of the proof's Taylor step.
        coefficient: c of the least-squares fit gap = c η² C; −α is derived, +1 printed.
        aligned: cosine of gap and C; ±1 where the gap is a multiple of C.
        joint: ‖θ_MT − θ0‖₂, to compare the gap with.
    """

    step: float
    epochs: int
    gap: float
    after_derived: float
    after_printed: float
    after_halved: float
    coefficient: float
    aligned: float
    joint: float


def measure_gap(losses: Sequence[Loss], start: Tensor, scale: float, step: float, epochs: int) -> Gap:
    """Run T experts and the joint model from θ0 and compare their gap with both second-order terms.

    Args:
        start: θ0, float64 [P].
        scale: α of task arithmetic; the joint run has step α η.

    Raises:
        MergeflowError: k < 2, where the gap is zero; or a run diverges.

    Example:
        >>> bowl = lambda centre: lambda theta: ((theta - centre) ** 2).sum() / 2
        >>> found = measure_gap([bowl(1.0), bowl(-2.0)], torch.zeros(1, dtype=torch.float64), 0.7, 1e-4, 2)
        >>> round(found.coefficient, 6)
        -0.7

    Source: Zhou et al. 2025, Theorem 1, equation 2; derived in this file.
    """
    if epochs < 2:
        raise MergeflowError(f"the gap is zero after {epochs} epoch(s) (Theorem 1, equation 1): expected epochs ≥ 2.")
    vectors = [descend(loss, start, step, epochs)[-1] for loss in losses]
    moves = descend(summed(losses), start, scale * step, epochs)
    points = [start + move for move in moves[:-1]]
    gap = merge(vectors, scale) - moves[-1]
    printed = step**2 * curvature_sum(losses, points, scale, shift=0)
    derived = -scale * step**2 * curvature_sum(losses, points, scale, shift=1)
    return Gap(
        step=step,
        epochs=epochs,
        gap=float(gap.norm()),
        after_derived=float((gap - derived).norm()),
        after_printed=float((gap - printed).norm()),
        after_halved=float((gap - derived / 2).norm()),
        coefficient=float(gap @ printed / (printed @ printed)),
        aligned=float(gap @ printed / (gap.norm() * printed.norm())),
        joint=float(moves[-1].norm()),
    )


def log_log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Return the slope of the least-squares line through (log x, log y): 2 where y ∝ x².

    Example:
        >>> round(log_log_slope([1e-3, 1e-2, 1e-1], [3e-6, 3e-4, 3e-2]), 6)
        2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def pairs_factor(epochs: int) -> int:
    """Return (h+1)(h+2)/2 with h = k − 2: the number of (Hessian, mismatch) pairs per task in C after k epochs.

    Example:
        >>> [pairs_factor(k) for k in (1, 2, 3, 4)]
        [0, 1, 3, 6]
    """
    return epochs * (epochs - 1) // 2


def task_factors(tasks: int, scale: float) -> dict[str, float]:
    """Return the three factors a with which Σ_t ‖r_t‖₂ ≤ T · a · max_t ‖∇L_t‖₂ is claimed.

    Returns:
        `statement` |αT − 1|, `proof` |α(T+1) − 1| (equation 24), `derived` max(1, |αT − 1|); the last holds always.

    Example:
        >>> {name: round(value, 6) for name, value in task_factors(3, 0.5).items()}
        {'statement': 0.5, 'proof': 1.0, 'derived': 1.0}
    """
    return {
        "statement": abs(scale * tasks - 1),
        "proof": abs(scale * (tasks + 1) - 1),
        "derived": max(1.0, abs(scale * tasks - 1)),
    }


@dataclass(frozen=True)
class NetworkBounds:
    """Uniform bounds along a run: ‖∇L_t‖₂ ≤ gradient, ‖∇²L_t‖₂ ≤ hessian; `product` is what enters the bound on C."""

    gradient: float
    hessian: float
    product: float


def derived_network_bounds(norms: Sequence[float], radius: float, beta: float, gamma: float) -> NetworkBounds:
    """Return G and H of this module's derivation.

    Args:
        norms: s_1, ..., s_L ≥ ‖W_l‖₂.
        radius: M ≥ ‖x‖₂.
        beta: β ≥ |φ'|, for an activation with φ(0) = 0.
        gamma: γ ≥ |φ''|, almost everywhere.

    Example: softmax regression, where the Jacobian is x itself and the curvature at most ‖x‖² / 2:
        >>> found = derived_network_bounds([0.0], radius=1.0, beta=1.0, gamma=1.0)
        >>> round(found.gradient, 6), round(found.hessian, 6)
        (1.414214, 0.5)
    """
    depth = len(norms)
    size, first, second = radius, np.zeros(depth), np.zeros((depth, depth))
    for layer, norm in enumerate(norms):
        unit = np.eye(depth)[layer]
        crossed = np.outer(unit, first)
        second = beta * (crossed + crossed.T) + norm * (gamma * np.outer(first, first) + beta * second)
        first = size * unit + norm * beta * first
        size = size * norm * beta
    steepest = float(2**0.5 * np.linalg.norm(first))
    curvature = float(np.linalg.eigvalsh(0.5 * np.outer(first, first) + 2**0.5 * second)[-1])
    return NetworkBounds(steepest, curvature, steepest * curvature)


def printed_network_bounds(
    norms: Sequence[float], radius: float, beta: float, gamma: float
) -> dict[str, NetworkBounds]:
    """Return G, H and their product as the paper prints them.

    Args:
        norms: s_1, ..., s_L ≥ ‖W_l‖₂.
        radius: M ≥ ‖x‖₂.
        beta: β ≥ |φ'|.
        gamma: γ ≥ |φ''|; 0 selects the two ReLU versions.

    Returns:
        `statement` (main text) and `appendix`. They differ for ReLU only: the appendix multiplies ½ M²Π²β^{2L−2} by
        √2 MΠβ^{L−1}; the main text takes that product for H, multiplies by G again and halves.
    """
    reach = radius * float(np.prod(norms)) * beta ** (len(norms) - 1)  # M Π β^{L−1}
    steepest = 2**0.5 * reach
    if gamma > 0:
        curvature = 2 * gamma * reach**2
        both = NetworkBounds(steepest, curvature, curvature * steepest)
        return {"statement": both, "appendix": both}
    main = 0.5 * 2**0.5 * reach**3
    return {
        "statement": NetworkBounds(steepest, main, main * steepest / 2),
        "appendix": NetworkBounds(steepest, 0.5 * reach**2, 0.5 * reach**2 * steepest),
    }


Row = dict[str, Any]
LEFT = ("gap", "after_derived", "after_printed", "after_halved")


def one_epoch_rows(problem: Problem, step: float) -> Iterator[Row]:
    """Yield per task how far τ_t^(1), a difference of trained weights, is from −η ∇L_t(θ0) (Remark 1)."""
    for number, (task, loss) in enumerate(zip(problem.tasks, problem.losses, strict=True)):
        vector = problem.expert(number, step, 1) - problem.start
        error = (vector + step * gradient(loss, problem.start)).abs().max()
        yield {
            "model": problem.name,
            "task": task,
            "step": step,
            "norm": float(vector.norm()),
            "largest": float(vector.abs().max()),
            "error": float(error),
        }


def joint_rows(problem: Problem, step: float, scales: Sequence[float], epochs: int) -> Iterator[Row]:
    """Yield per scale how far merged experts are from the joint run of step αη, after one epoch and after `epochs`."""
    for count in (1, epochs):
        experts = [problem.expert(number, step, count) for number in range(len(problem.tasks))]
        for scale in scales:
            merged = problem.start + merge([expert - problem.start for expert in experts], scale)
            joint = problem.joint(scale * step, count)
            yield {
                "model": problem.name,
                "epochs": count,
                "scale": scale,
                "step": step,
                "moved": float((joint - problem.start).abs().max()),
                "error": float((merged - joint).abs().max()),
            }


def gap_rows(problem: Problem, scale: float, steps: Sequence[float], epochs: int) -> Iterator[Row]:
    """Yield the gap at every step size, and what the derived, the printed and the halved term leave of it."""
    for step in steps:
        gap = measure_gap(problem.losses, problem.start, scale, step, epochs)
        switched = problem.switched_units(scale, step, epochs)
        yield {"model": problem.name, "scale": scale, **asdict(gap), "switched": switched}


def slope_row(rows: Sequence[Row]) -> Row:
    """Return the log–log slopes over η of rows of one model that have the same k and α.

    Steps at which a ReLU switches side are left out: the gradient jumps there.
    """
    regular = [row for row in rows if not row["switched"]]
    steps = [row["step"] for row in regular]
    first = regular[0]
    slopes = {name: log_log_slope(steps, [row[name] for row in regular]) for name in LEFT}
    same = {key: first[key] for key in ("model", "epochs", "scale")}
    return {**same, "from": steps[0], "to": steps[-1], "steps": len(steps), **slopes}


def coefficient_rows(problem: Problem, scales: Sequence[float], step: float, epochs: int) -> Iterator[Row]:
    """Yield per scale the coefficient c of gap = c η² C as measured, beside the three that are claimed."""
    for scale in scales:
        gap = measure_gap(problem.losses, problem.start, scale, step, epochs)
        yield {
            "model": problem.name,
            "epochs": epochs,
            "step": step,
            "scale": scale,
            "measured": gap.coefficient,
            "aligned": gap.aligned,
            "derived": -scale,
            "halved": -scale / 2,
            "printed": 1.0,
        }


def epoch_rows(problem: Problem, scale: float, step: float, epochs: Sequence[int]) -> Iterator[Row]:
    """Yield how the gap grows with k: k(k−1)/2 times that of k = 2, since each term of the sum is the same to O(η)."""
    first = measure_gap(problem.losses, problem.start, scale, step, 2).gap
    for count in epochs:
        gap = measure_gap(problem.losses, problem.start, scale, step, count).gap
        yield {
            "model": problem.name,
            "epochs": count,
            "step": step,
            "gap": gap,
            "ratio": gap / first,
            "derived": count * (count - 1) / 2,
        }


POWER_STEPS = 6


def factor_rows(problem: Problem, scales: Sequence[float], step: float, epochs: int) -> Iterator[Row]:
    """Yield per scale ‖C‖₂ / (T · pairs · H · G) with measured H and G, and the three task factors that bound it.

    H is exact for nets and estimated from below by power iteration for others, which makes their ratio too large.
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
    """
    assert problem.net is not None
    points = problem.joint_points(scale, step, epochs)
    steepest, curvature = _largest(problem, points)
    norms = problem.net.spectral_norms(points)
    radius = max(float(task_examples.inputs[:].norm(dim=1).max()) for task_examples in problem.examples)
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
