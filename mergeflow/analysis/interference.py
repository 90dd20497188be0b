r"""Row-space interference I(k) and reconstruction error R(k) of one weight over all tasks, for all ranks at once.

For task vectors τ_t = U_t Σ_t V_tᵀ the cross term of two tasks is G_ij = τ_i τ_jᵀ = U_i (Σ_i V_iᵀ V_j Σ_j) U_jᵀ, so

    ‖Σ_i V_iᵀ V_j Σ_j‖²_F up to rank k = Σ_{a,b ≤ k} σ_ia² σ_jb² (v_ia · v_jb)²,

a sum over the leading k × k corner of one matrix of squares: one SVD per task and matrix gives all k by cumulative
sums.

*How equation 5 is read.* The paper prints ‖(Σ̃_i Ṽ_i)ᵀ (Σ̃_j Ṽ_j)‖_F and, in appendix A, ‖V_tᵀ Σ̃_t Σ̃_s V_s‖_F, with Σ̃
k × k and Ṽ "the top-k right singular vectors". The product Σ̃ Ṽ needs k rows, so Ṽ is V_kᵀ, and the cross term is
V_i Σ̃_i Σ̃_j V_jᵀ. Orthonormal rows do not change a Frobenius norm: this is ‖Σ̃_i Σ̃_j‖_F = (Σ_a σ̃_ia² σ̃_ja²)^½, which
the directions of the two tasks do not enter at all (`spectral` below): it is the same for tasks that are orthogonal and
for tasks that are equal. What is meant, and what the proof uses (‖V_tᵀ V_s‖), is the product the other way round,

    I(k) = Σ_{i ≠ j} ‖Σ̃_i V_iᵀ V_j Σ̃_j‖_F,    (Ṽ_i Σ̃_i)ᵀ (Ṽ_j Σ̃_j) with the singular vectors as columns,

which is 0 exactly if the row spaces are orthogonal, and at full rank is Σ ‖τ_i τ_jᵀ‖_F / (‖τ_i‖_F ‖τ_j‖_F).

*The norm.* "Normalised by their ℓ2 norm" is that of all singular values, ‖τ_t‖_F, in appendix A (`whole`), and can be
read as that of the k kept ones in the main text (`kept`). I(k) rises with k by construction for `whole` only.

Source:
    Choi et al., Revisiting weight averaging for model merging (CART), equations 5 and 7, Figures 2, 3 and 8.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mergeflow.errors import MergeflowError
from mergeflow.merging.linalg.spectra import svd

State = Mapping[str, Tensor]
# What a name ends with → the kind of matrix it is, as open_clip and torchvision name them.
KINDS = {
    "attn.in_proj_weight": "attention in",
    "attn.out_proj.weight": "attention out",
    "mlp.c_fc.weight": "MLP in",
    "mlp.c_proj.weight": "MLP out",
    "conv1.weight": "patch embedding",
    "positional_embedding": "positions",
    "visual.proj": "projection",
}
# Stored so that it multiplies from the right: its input directions are its left singular vectors.
_FROM_THE_RIGHT = "visual.proj"


@dataclass(frozen=True)
class TaskFactors:
    """The singular value decompositions τ_t = U_t Σ_t V_tᵀ of one weight matrix's task vectors, float64.

    Attributes:
        shape: m, n of the matrix.
        triples: (U_t [m, r_t], σ_t [r_t] falling, V_t [n, r_t]) of each task vector that is not zero.
    """

    shape: tuple[int, int]
    triples: tuple[tuple[Tensor, Tensor, Tensor], ...]

    @property
    def rank(self) -> int:
        """The smaller side r; ranks go from 0 to r."""
        return min(self.shape)

    def squares(self) -> np.ndarray:
        """Return σ_ta², [T, r], padded by zeros."""
        squares = np.zeros((len(self.triples), self.rank))
        for row, (_, sigma, _) in zip(squares, self.triples, strict=True):
            row[: len(sigma)] = sigma.square().numpy()
        return squares

    def held(self) -> np.ndarray:
        """Return ‖SVD_k(τ_t)‖²_F, [T, r + 1], for k = 0 … r."""
        squares = self.squares()
        return np.concatenate([np.zeros((len(squares), 1)), squares.cumsum(axis=1)], axis=1)


def factor_tasks(vectors: Sequence[Tensor]) -> TaskFactors:
    """Return the SVD of every task vector of one weight matrix.

    Args:
        vectors: τ_t, T tensors [m, n], with the inputs on their right side (as in y = W x).

    Raises:
        MergeflowError: there is no task vector, or one is not a matrix of the first one's shape.
    """
    if not vectors:
        raise MergeflowError("no task vector to measure interference of: give at least one matrix.")
    shape = tuple(vectors[0].shape)
    for number, vector in enumerate(vectors):
        if vector.ndim != 2 or tuple(vector.shape) != shape:
            raise MergeflowError(
                f"task vector {number} has the shape {tuple(vector.shape)}, but a matrix of the first one's shape "
                f"{shape} is needed: give one weight matrix of all tasks; `as_matrix` flattens a convolution."
            )
    triples = tuple(svd(vector.double()) for vector in vectors if bool(vector.any()))
    return TaskFactors((shape[0], shape[1]), triples)


@dataclass(frozen=True)
class Interference:
    """I(k) of one matrix for k = 0 … r, each float64 [r + 1].

    Attributes:
        whole: singular values divided by ‖τ_t‖_F; rises from 0, at most T(T − 1).
        kept: singular values divided by the norm of the k kept ones; at most T(T − 1).
        spectral: equation 5 as printed, normalised as `whole`; no singular vector enters.
    """

    whole: np.ndarray
    kept: np.ndarray
    spectral: np.ndarray


def row_space_interference(factors: TaskFactors) -> Interference:
    """Return I(k) for every rank.

    I(k) = Σ_{i≠j} ‖Σ̃_i V_iᵀ V_j Σ̃_j‖_F with the k leading singular values and vectors of each task

    Example:
        Two tasks that share one of two equally strong input directions:

        >>> a, b = torch.diag(torch.tensor([1.0, 1.0, 0.0])), torch.diag(torch.tensor([1.0, 0.0, 1.0]))
        >>> found = row_space_interference(factor_tasks([a, b]))
        >>> found.whole.round(3).tolist()[-1], found.spectral.round(3).tolist()[-1]
        (1.0, 1.414)

    Source:
        Choi et al. (CART), equation 5; the module's docstring says how it is read.
    """
    rank, squares, held = factors.rank, factors.squares(), factors.held()
    rows = [sigma[:, None] * right.T for _, sigma, right in factors.triples]  # Σ_t V_tᵀ, [r_t, n]
    whole, kept, spectral = (np.zeros(rank + 1) for _ in range(3))
    for i in range(len(rows)):
        for j in range(i):
            cross = _corners((rows[i] @ rows[j].T).square_().numpy(), rank)
            same = np.concatenate([[0.0], (squares[i] * squares[j]).cumsum()])
            norms = held[i] * held[j]
            whole += 2 * np.sqrt(cross / norms[-1])
            kept[1:] += 2 * np.sqrt(cross[1:] / norms[1:])
            spectral += 2 * np.sqrt(same / norms[-1])
    return Interference(whole, kept, spectral)


def _corners(squares: np.ndarray, rank: int) -> np.ndarray:
    """Return the sums over the leading k × k corners, k = 0 … rank."""
    padded = np.zeros((rank, rank))
    padded[: squares.shape[0], : squares.shape[1]] = squares
    added = np.triu(padded).sum(axis=0) + np.tril(padded, -1).sum(axis=1)
    return np.concatenate([[0.0], added.cumsum()])


def reconstruction_error(factors: TaskFactors) -> np.ndarray:
    """Return R(k) = Σ_t ‖τ_t − SVD_k(τ_t)‖²_F = Σ_t Σ_{a>k} σ_ta² for k = 0 … r, float64 [r + 1], falling to 0.

    Example:
        >>> reconstruction_error(factor_tasks([torch.diag(torch.tensor([1.0, 3.0]))])).round(6).tolist()
        [10.0, 1.0, 0.0]

    Source:
        Choi et al. (CART), equation 7.
    """
    squares = factors.squares()
    tails = np.concatenate([squares[:, ::-1].cumsum(axis=1)[:, ::-1], np.zeros((len(squares), 1))], axis=1)
    total: np.ndarray = tails.sum(axis=0)
    return total


def task_interference(factors: TaskFactors, rank: int) -> float:
    """Return how much the other tasks' kept parts add to a task's own inputs, relative to its own part.

    L_k = Σ_t ‖Σ_{s≠t} SVD_k(τ_s) V_t‖²_F / Σ_t ‖SVD_k(τ_t)‖²_F

    the L of Theorem 1 where inputs are isotropic in the span of V_t, the k leading right singular vectors of τ_t.
    Unlike I(k) it sees signs: centred task vectors at full rank add up to −τ_t, which gives 1 if inputs excite all.

    Args:
        factors: of one weight matrix.
        rank: k, 0 … r.

    Returns:
        0 where nothing is kept.

    Example:
        >>> up = torch.diag(torch.tensor([1.0, 2.0]))
        >>> task_interference(factor_tasks([up, -up]), 2), task_interference(factor_tasks([up, up]), 0)
        (1.0, 0.0)

    Source:
        Choi et al. (CART), Theorem 1.
    """
    kept = [(left[:, :rank] * sigma[:rank], right[:, :rank]) for left, sigma, right in factors.triples]
    signal = sum(float(image.square().sum()) for image, _ in kept)
    if signal == 0:
        return 0.0
    total = torch.zeros(factors.shape, dtype=torch.float64)
    for image, right in kept:
        total.addmm_(image, right.T)
    noise = sum(float((total @ right - image).square().sum()) for image, right in kept)
    return noise / signal


def kind_of(name: str) -> str | None:
    """Return what a tensor's name says it is, one of `KINDS`, or None.

    Example:
        >>> kind_of("visual.transformer.resblocks.0.mlp.c_fc.weight"), kind_of("visual.ln_pre.weight")
        ('MLP in', None)
    """
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), None)


def as_matrix(name: str, tensor: Tensor) -> Tensor:
    """Return a weight as the matrix that multiplies its inputs from the left: filters flat, `visual.proj` transposed.

    Example:
        >>> as_matrix("visual.conv1.weight", torch.zeros(8, 3, 4, 4)).shape
        torch.Size([8, 48])
    """
    flat = tensor.flatten(1)
    return flat.T if name.endswith(_FROM_THE_RIGHT) else flat


def task_matrices(base: State, experts: Mapping[str, State], centred: bool) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield for every weight of a known kind its name and τ_t = θ_t − θ0, or θ_t − mean θ, of all tasks, in float64.

    Args:
        base: θ0.
        experts: θ_t by task, in memory or lazy; one tensor of each is held at a time.
        centred: whether task vectors start at the experts' mean.
    """
    for name in base:
        if kind_of(name) is not None:
            weights = [as_matrix(name, expert[name]).double() for expert in experts.values()]
            origin = sum(weights[1:], weights[0]) / len(weights) if centred else as_matrix(name, base[name]).double()
            yield name, [weight - origin for weight in weights]
