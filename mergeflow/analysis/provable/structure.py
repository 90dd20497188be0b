"""What task vectors of the one-layer Transformer look like, and what can be left out of them."""

import torch
from torch import Tensor

from mergeflow.analysis.provable.transformer import Weights


def truncated(vector: Weights, rank: int) -> Weights:
    """Return the best approximations of ΔW and ΔV of a given rank, in the Frobenius norm.

    Source:
        Li et al. 2025, Corollary 1.
    """
    return Weights(_truncate(vector.attention, rank), _truncate(vector.value, rank))


def _truncate(matrix: Tensor, rank: int) -> Tensor:
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return left[:, :rank] * values[:rank] @ right[:rank]


def row_pruned(vector: Weights, keep: float, smallest: bool = False) -> Weights:
    """Return the task vector with a share of the rows of ΔV, the largest in 2-norm; the others are 0.

    Args:
        vector: ΔΨ.
        keep: share of the rows kept, in [0, 1].
        smallest: keep the smallest rows instead, as a control.

    Source:
        Li et al. 2025, Corollary 2.
    """
    norms = vector.value.norm(dim=1)
    order = norms.argsort(descending=not smallest, stable=True)
    kept = torch.zeros_like(norms)
    kept[order[: round(keep * len(norms))]] = 1
    return Weights(vector.attention, vector.value * kept[:, None])


def frobenius_left(matrix: Tensor, rank: int) -> float:
    """Return ‖M − M_r‖_F / ‖M‖_F of the best approximation M_r of rank r; M is [m, d]."""
    values = torch.linalg.svdvals(matrix)
    return float(values[rank:].norm() / values.norm())


def leading_cosine(matrix: Tensor, pattern: Tensor) -> float:
    """Return abs(cos) of the leading right singular vector of a matrix [., d] and a pattern [d]."""
    return float((torch.linalg.svd(matrix, full_matrices=False)[2][0] @ pattern).abs())


def large_rows(vector: Weights, below: float = 0.5) -> float:
    """Return the share of rows of ΔV with a 2-norm of at least `below` times the largest."""
    norms = vector.value.norm(dim=1)
    return float((norms >= below * norms.max()).double().mean())


def attention_mass(model: Weights, inputs: Tensor, pattern: Tensor) -> float:
    """Return p: the mean mass that queries with the pattern μ put on keys with μ.

    Args:
        model: Ψ.
        inputs: X of the label 1, [n, P, d], without noise.
        pattern: μ, [d].

    Source:
        Li et al. 2025, Definition 3, as a mean over samples and queries.
    """
    mass = torch.softmax(inputs @ model.attention @ inputs.mT, dim=-2)  # [n, s, l]
    relevant = (inputs @ pattern > 0.5).to(mass)
    on_relevant = (mass * relevant[:, :, None]).sum(1)  # [n, l]
    return float(((on_relevant * relevant).sum(1) / relevant.sum(1)).mean())


def irrelevant_energy(vector: Weights, pattern: Tensor, irrelevant: Tensor) -> float:
    """Return the median over rows of Σ_k (ΔV_i·v_k)² / (ΔV_i·μ)² · M: about 1 or less by Equation 30.

    Args:
        vector: ΔΨ.
        pattern: μ, [d].
        irrelevant: v_1 … v_M, [M, d].
    """
    across = (vector.value @ irrelevant.T).square().sum(1)
    return float((across / (vector.value @ pattern).square()).median() * len(irrelevant))
