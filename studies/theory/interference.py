"""Row-space interference I(k) and reconstruction error R(k) of one weight over all tasks, for all ranks at once.

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
read as that of the k kept ones in the main text (`truncated`). I(k) rises with k by construction for `whole` only.

Source:
    Choi et al., Revisiting weight averaging for model merging (CART), equations 5 and 7, Figures 2, 3 and 8.

The bound of CART's Theorem 2 on its one-layer linear model: as printed, and what can be derived.

W = θ0 + Σ_t τ_t, inputs x = V_t a + ε of task t with ‖a‖ ≤ c s_max and ‖ε‖ ≤ η, non-zero singular values in
[α, s_max], ranks at most r. The interference of the other tasks is

    L = Σ_t Σ_i ‖Σ_{s≠t} τ_s x_ti‖² ≤ n (k₃ I + T(T−1) k₄ η)²,    k₃ = c r s_max⁴ / α²,    k₄ = s_max  (printed).

*What must be read otherwise.* (1) V_t is the compact d × r_t factor and a ∈ ℝ^{r_t}. Printed is a ∈ ℝ^d: then every x
is "in the row space", ‖V_sᵀ V_t‖ = 1 whatever the tasks are, and the step from I to ‖V_tᵀ V_s‖ divides by the zeros on
the diagonal of Σ_t; tasks with orthogonal row spaces have I = 0 and L > 0. (2) I is Σ ‖Σ̃_t V_tᵀ V_s Σ̃_s‖_F. Printed is
‖V_tᵀ Σ̃_t Σ̃_s V_s‖_F = ‖Σ̃_t Σ̃_s‖_F, in which no direction enters (`studies.theory.interference`): the inequality
then holds, since ‖V_tᵀ V_s‖ ≤ 1, but its right side is the same for equal and for orthogonal tasks. (3) L ≤ O(I²) needs
η = 0: with I = 0 and η > 0 L is not 0; the statement is L ≤ O((I + η)²). (4) ‖τ_t‖ ‖τ_s‖ ≤ √(r_t r_s) s_max², not
r_t s_max²; with r the largest rank nothing changes. T > 2 is not needed. Squaring the sum over t is right, as its terms
are not negative, but costs up to a factor T.

*What can be derived.* Σ_s V_sᵀ V_t a = (Σ_s V_sᵀ V_t Σ_t)(Σ_t⁻¹ a) needs the smallest singular value once, not twice:

    ‖τ_s V_t a‖ ≤ ‖τ_s‖_F ‖τ_t‖_F I_st · c s_max / α,    hence k₃ = c r s_max³ / α  (`derived`),

smaller by s_max / α, and without the last steps, with I_st the terms of I,

    L ≤ n Σ_t ((c s_max / α) Σ_{s≠t} ‖τ_s‖_F ‖τ_t‖_F I_st + (T−1) s_max η)²  (`pairwise`).

Source:
    Choi et al., Revisiting weight averaging for model merging (CART), Theorems 1 and 2, appendix A; `derived` and
    `pairwise` are derived in this file.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mergeflow.errors import MergeflowError
from mergeflow.merging.linalg.spectra import svd

State = Mapping[str, Tensor]
# What a name ends with → the kind of matrix it is, as open_clip, torchvision and transformers' BERT name them.
KINDS = {
    "attn.in_proj_weight": "attention in",
    "attn.out_proj.weight": "attention out",
    "mlp.c_fc.weight": "MLP in",
    "mlp.c_proj.weight": "MLP out",
    "conv1.weight": "patch embedding",
    "positional_embedding": "positions",
    "visual.proj": "projection",
    "attention.self.query.weight": "attention in",
    "attention.self.key.weight": "attention in",
    "attention.self.value.weight": "attention in",
    "attention.output.dense.weight": "attention out",
    "intermediate.dense.weight": "MLP in",
    "output.dense.weight": "MLP out",
    "position_embeddings.weight": "positions",
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
        truncated: singular values divided by the norm of the k kept ones; at most T(T − 1).
        spectral: equation 5 as printed, normalised as `whole`; no singular vector enters.
    """

    whole: np.ndarray
    truncated: np.ndarray
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
    whole, retained, spectral = (np.zeros(rank + 1) for _ in range(3))
    for i in range(len(rows)):
        for j in range(i):
            cross = _corners((rows[i] @ rows[j].T).square_().numpy(), rank)
            same = np.concatenate([[0.0], (squares[i] * squares[j]).cumsum()])
            norms = held[i] * held[j]
            whole += 2 * _share(cross, norms[-1])
            retained[1:] += 2 * _share(cross[1:], norms[1:])
            spectral += 2 * _share(same, norms[-1])
    return Interference(whole, retained, spectral)


def _share(squares: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """Return the roots of squares by norms; 0 where a norm is, as of a matrix that an expert has not changed."""
    shares: np.ndarray = np.sqrt(np.divide(squares, norms, out=np.zeros_like(squares), where=norms > 0))
    return shares


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
    images = [(left[:, :rank] * sigma[:rank], right[:, :rank]) for left, sigma, right in factors.triples]
    signal = sum(float(image.square().sum()) for image, _ in images)
    if signal == 0:
        return 0.0
    total = torch.zeros(factors.shape, dtype=torch.float64)
    for image, right in images:
        total.addmm_(image, right.T)
    noise = sum(float((total @ right - image).square().sum()) for image, right in images)
    return noise / signal


def kind_of(name: str) -> str | None:
    """Return the kind of a tensor by its name, one of `KINDS`, or None.

    Example:
        >>> kind_of("visual.transformer.resblocks.0.mlp.c_fc.weight"), kind_of("visual.ln_pre.weight")
        ('MLP in', None)
        >>> kind_of("encoder.layer.0.attention.output.dense.weight"), kind_of("encoder.layer.0.output.dense.weight")
        ('attention out', 'MLP out')
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
        experts: θ_t by task, in memory or lazy; one tensor of each is held at a time.
        centred: whether task vectors start at the experts' mean.
    """
    for name in base:
        if kind_of(name) is not None:
            weights = [as_matrix(name, expert[name]).double() for expert in experts.values()]
            origin = sum(weights[1:], weights[0]) / len(weights) if centred else as_matrix(name, base[name]).double()
            yield name, [weight - origin for weight in weights]


@dataclass(frozen=True)
class Setting:
    """One family of random tasks on the linear model.

    Attributes:
        tasks: T ≥ 2.
        width: d; (T + 1) · rank ≤ d.
        rank: r of every task vector.
        overlap: cos² of the angle between a task's input directions and those common to all tasks, in [0, 1].
        shared: how many of a task's r directions have that overlap; the rest are the task's own.
        weakest: whether the shared directions are those of the smallest singular values, not of the largest.
        condition: s_max / α ≥ 1; singular values are spaced evenly in the logarithm, s_max = 1.
        noise: η ≥ 0, the length of ε.
        samples: n inputs per task, of length ‖a‖ = c s_max.
        reach: c > 0.
    """

    tasks: int = 4
    width: int = 64
    rank: int = 4
    overlap: float = 0.25
    shared: int = 4
    weakest: bool = False
    condition: float = 3.0
    noise: float = 0.0
    samples: int = 16
    reach: float = 1.0


@dataclass(frozen=True)
class LinearTasks:
    """Tasks τ_t = U_t Σ Vᵀ and their inputs, float64.

    Attributes:
        left: U_t, [T, d, r].
        values: σ, [r], falling, the same for all tasks.
        right: V_t, [T, d, r].
        inputs: x_ti, [T, n, d].
        setting: what they were drawn from.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    inputs: Tensor
    setting: Setting

    @property
    def vectors(self) -> Tensor:
        """τ_t, [T, d, d]."""
        return (self.left * self.values) @ self.right.mT


def draw_tasks(setting: Setting, seed: int, full: bool = False) -> LinearTasks:
    """Draw random tasks whose row spaces overlap by a known amount: V_sᵀ V_t = o Q_sᵀ Q_t on the shared directions.

    V_t = √o C Q_t + √(1−o) D_t on the shared directions, D_t elsewhere; C, D_t with orthonormal columns, Q_t random

    Args:
        full: draw a in ℝ^d over a whole orthonormal basis, as printed, and not over the row space.

    Raises:
        MergeflowError: the width has no room for so many directions.

    Example:
        >>> drawn = draw_tasks(Setting(overlap=0.25), seed=0)
        >>> [round(float(torch.linalg.matrix_norm(drawn.right[0].T @ drawn.right[t], ord=2)), 6) for t in (0, 1)]
        [1.0, 0.25]
    """
    tasks, width, rank = setting.tasks, setting.width, setting.rank
    if (tasks + 1) * rank > width:
        raise MergeflowError(
            f"{tasks} tasks of rank {rank} with common directions need a width of {(tasks + 1) * rank}, found {width}: "
            "make the layer wider, or the rank or the number of tasks smaller."
        )
    generator = torch.Generator().manual_seed(seed)
    frame = _orthonormal(generator, width, (tasks + 1) * rank).split(rank, dim=1)
    place = slice(rank - setting.shared, rank) if setting.weakest else slice(0, setting.shared)
    right = torch.stack(frame[1:])
    for space in right:
        turned = frame[0][:, place] @ _orthonormal(generator, setting.shared, setting.shared)
        space[:, place] = setting.overlap**0.5 * turned + (1 - setting.overlap) ** 0.5 * space[:, place]
    left = torch.stack([_orthonormal(generator, width, rank) for _ in range(tasks)])
    values = torch.logspace(0, -1, rank, base=setting.condition, dtype=torch.float64)
    spans = [_orthonormal(generator, width, width) if full else each for each in right]
    inputs = torch.stack([_inputs(generator, span, setting) for span in spans])
    return LinearTasks(left, values, right, inputs, setting)


def _orthonormal(generator: torch.Generator, rows: int, columns: int) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))[0]


def _inputs(generator: torch.Generator, span: Tensor, setting: Setting) -> Tensor:
    """Return x = V a + ε, [n, d], with ‖a‖ = c s_max and ‖ε‖ = η."""
    inner, outer = (torch.randn(setting.samples, n, generator=generator, dtype=torch.float64) for n in span.shape[::-1])
    inner *= setting.reach / inner.norm(dim=1, keepdim=True)
    outer *= setting.noise / outer.norm(dim=1, keepdim=True)
    return inner @ span.T + outer


def measured_interference(drawn: LinearTasks) -> float:
    """Return L = Σ_t Σ_i ‖(θ0 + Σ_s τ_s) x_ti − (θ0 + τ_t) x_ti‖²; θ0 cancels."""
    vectors = drawn.vectors
    rest = vectors.sum(dim=0) - vectors
    return float((drawn.inputs @ rest.mT).square().sum())


@dataclass(frozen=True)
class Bounds:
    """I, and bounds on L.

    Attributes:
        interference: I = Σ_{t≠s} ‖Σ̃_t V_tᵀ V_s Σ̃_s‖_F.
        spectral: Σ_{t≠s} ‖Σ̃_t Σ̃_s‖_F, what equation 5 says as printed.
        printed: n (k₃ I + T(T−1) k₄ η)² with k₃ = c r s_max⁴ / α².
        printed_spectral: the same with `spectral` for I.
        derived: the same with k₃ = c r s_max³ / α.
        pairwise: n Σ_t ((c s_max / α) Σ_{s≠t} ‖τ_s‖ ‖τ_t‖ I_st + (T−1) s_max η)².
    """

    interference: float
    spectral: float
    printed: float
    printed_spectral: float
    derived: float
    pairwise: float


def bounds(drawn: LinearTasks) -> Bounds:
    """Return I and the bounds of the module's docstring on L for drawn tasks.

    Example:
        >>> drawn = draw_tasks(Setting(overlap=0.5, condition=2.0, noise=0.01), seed=1)
        >>> found, loss = bounds(drawn), measured_interference(drawn)
        >>> loss <= found.pairwise <= found.derived <= found.printed
        True
    """
    setting, values = drawn.setting, drawn.values
    count, largest, smallest = setting.tasks, float(values[0]), float(values[-1])
    scaled = drawn.right * (values / values.norm())
    terms = torch.linalg.matrix_norm(torch.einsum("sda,tdb->stab", scaled, scaled))
    terms.fill_diagonal_(0)
    interference = float(terms.sum())
    spectral = count * (count - 1) * float((values / values.norm()).square().norm())
    noise = largest * setting.noise

    def whole(constant: float, total: float) -> float:
        return setting.samples * (constant * total + count * (count - 1) * noise) ** 2

    once = setting.reach * setting.rank * largest**3 / smallest
    pairs = setting.reach * largest / smallest * float(values.square().sum()) * terms.sum(dim=1) + (count - 1) * noise
    return Bounds(
        interference,
        spectral,
        whole(once * largest / smallest, interference),
        whole(once * largest / smallest, spectral),
        whole(once, interference),
        setting.samples * float(pairs.square().sum()),
    )
