"""How task vectors relate to each other: norms and cosines of whole state dicts, in float64."""

from collections.abc import Mapping, Sequence

from torch import Tensor


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """Return ⟨a, b⟩ = Σ_name Σ_i a_i b_i over all tensors, in float64."""
    return sum(float(a[name].double().flatten() @ b[name].double().flatten()) for name in a)


def norm(a: Mapping[str, Tensor]) -> float:
    """Return ‖a‖₂ over all tensors, in float64."""
    return float(dot(a, a) ** 0.5)


def cosine_matrix(vectors: Sequence[Mapping[str, Tensor]]) -> list[list[float]]:
    """Return the matrix [T][T] of cosines ⟨τ_s, τ_t⟩ / (‖τ_s‖ ‖τ_t‖), 0 where a vector is zero.

    Source: Ilharco et al. 2023, Figure 5.

    Example:
        >>> import torch
        >>> cosine_matrix([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}])
        [[1.0, 0.0], [0.0, 1.0]]
    """
    count = len(vectors)
    products = [[0.0] * count for _ in vectors]
    for name in vectors[0] if vectors else ():
        for s, vector in enumerate(vectors):  # each pair once: converting the tensors takes as long as multiplying them
            row = vector[name].double().flatten()
            for t in range(s, count):
                products[s][t] += float(row @ (row if t == s else vectors[t][name].double().flatten()))
    norms = [products[t][t] ** 0.5 for t in range(count)]

    def cosine(s: int, t: int) -> float:
        return products[min(s, t)][max(s, t)] / (norms[s] * norms[t]) if norms[s] and norms[t] else 0.0

    return [[cosine(s, t) for t in range(count)] for s in range(count)]
