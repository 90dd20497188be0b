r"""The bound of CART's Theorem 2 on its one-layer linear model: as printed, and what can be derived.

W = θ0 + Σ_t τ_t, inputs x = V_t a + ε of task t with ‖a‖ ≤ c s_max and ‖ε‖ ≤ η, non-zero singular values in
[α, s_max], ranks at most r. The interference of the other tasks is

    L = Σ_t Σ_i ‖Σ_{s≠t} τ_s x_ti‖² ≤ n (k₃ I + T(T−1) k₄ η)²,    k₃ = c r s_max⁴ / α²,    k₄ = s_max  (printed).

*What must be read otherwise.* (1) V_t is the compact d × r_t factor and a ∈ ℝ^{r_t}. Printed is a ∈ ℝ^d: then every x
is "in the row space", ‖V_sᵀ V_t‖ = 1 whatever the tasks are, and the step from I to ‖V_tᵀ V_s‖ divides by the zeros on
the diagonal of Σ_t; tasks with orthogonal row spaces have I = 0 and L > 0. (2) I is Σ ‖Σ̃_t V_tᵀ V_s Σ̃_s‖_F. Printed is
‖V_tᵀ Σ̃_t Σ̃_s V_s‖_F = ‖Σ̃_t Σ̃_s‖_F, in which no direction enters (`mergeflow.analysis.interference`): the inequality
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

from dataclasses import dataclass

import torch
from torch import Tensor

from mergeflow.errors import MergeflowError


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
        setting: sizes, overlap and spectrum.
        seed: of everything random.
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
    for own in right:
        turned = frame[0][:, place] @ _orthonormal(generator, setting.shared, setting.shared)
        own[:, place] = setting.overlap**0.5 * turned + (1 - setting.overlap) ** 0.5 * own[:, place]
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
