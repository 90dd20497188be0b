r"""Bounds on ‖C‖₂ for feed-forward nets: as printed, and as the derivation allows.

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
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def pairs_factor(epochs: int) -> int:
    """Return (h+1)(h+2)/2 with h = k − 2: the number of (Hessian, mismatch) pairs per task in C after k epochs.

    Example:
        >>> [pairs_factor(k) for k in (1, 2, 3, 4)]
        [0, 1, 3, 6]
    """
    return epochs * (epochs - 1) // 2


def task_factors(tasks: int, scale: float) -> dict[str, float]:
    """Return the three factors a with which Σ_t ‖r_t‖₂ ≤ T · a · max_t ‖∇L_t‖₂ is claimed.

    Args:
        tasks: T ≥ 1.
        scale: α.

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
