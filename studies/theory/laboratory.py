"""Binary tasks on tokens that are exact patterns: one that decides the label, and others that do not matter.

The one-layer nonlinear Transformer, its hinge loss and its training by mini-batch SGD.

What task vectors of the one-layer Transformer look like, and what can be left out of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from mergeflow.errors import MergeflowError


@dataclass(frozen=True)
class PatternTask:
    """One task T of Definition 2: a sequence of P tokens whose majority of μ over −μ is the label.

    A sequence with the label y = ±1 holds `relevant` tokens y·μ, `confusing` tokens −y·μ, and P − relevant − confusing
    tokens that are each drawn from the irrelevant patterns v_1 … v_M with equal probability.

    Attributes:
        pattern: μ_T, [d], of length 1.
        irrelevant: v_1 … v_M, [M, d], orthonormal and orthogonal to μ_T.
        tokens: P ≥ 1.
        relevant: δ_* · P, more than `confusing`.
        confusing: δ_# · P.

    Source:
        Li et al. 2025, Definition 2.
    """

    pattern: Tensor
    irrelevant: Tensor
    tokens: int = 20
    relevant: int = 8
    confusing: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.confusing < self.relevant or self.relevant + self.confusing > self.tokens:
            raise MergeflowError(
                f"A sequence of {self.tokens} tokens with {self.relevant} relevant and {self.confusing} confusing ones "
                "cannot be drawn: the relevant ones must be more, and both together at most all. Change the counts."
            )

    def draw(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw sequences and labels.

        Returns:
            X, [n, P, d], and y, [n], −1 or 1; the order of a sequence's tokens does not matter to the model.
        """
        labels = torch.randint(2, (samples,), generator=generator, dtype=torch.int64) * 2 - 1
        kinds = self._kinds(samples, generator)
        patterns = torch.cat([self.pattern[None], -self.pattern[None], self.irrelevant])
        flipped = torch.where((labels[:, None] < 0) & (kinds < 2), 1 - kinds, kinds)
        return patterns[flipped], labels.to(self.pattern.dtype)

    def _kinds(self, samples: int, generator: torch.Generator) -> Tensor:
        """Return the pattern of each token for the label 1: 0 for μ, 1 for −μ, 1 + j for v_j; [n, P]."""
        others = self.tokens - self.relevant - self.confusing
        fixed = torch.tensor([0] * self.relevant + [1] * self.confusing).expand(samples, -1)
        drawn = torch.randint(2, 2 + len(self.irrelevant), (samples, others), generator=generator)
        return torch.cat([fixed, drawn], 1)


def related_patterns(alpha: float, dimensions: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return two discriminative patterns with μ_1ᵀμ_2 = α, and the irrelevant ones that span the rest.

    Args:
        alpha: in [−1, 1].
        dimensions: d ≥ 3.

    Returns:
        μ_1 and μ_2, [d], and v_1 … v_M, [M, d], with M = d − 2.

    Raises:
        MergeflowError: α lies outside −1 … 1.

    Example:
        >>> first, second, rest = related_patterns(0.6, 8)
        >>> round(float(first @ second), 12), rest.shape
        (0.6, torch.Size([6, 8]))
    """
    if not -1 <= alpha <= 1:
        raise MergeflowError(f"The cosine of two patterns is {alpha}; it must lie in −1 … 1.")
    axes = torch.eye(dimensions, dtype=torch.float64)
    return axes[0], alpha * axes[0] + (1 - alpha**2) ** 0.5 * axes[1], axes[2:]


_IN_CACHE = 32  # sequences at a time: their hidden layer [32, P, m] stays in the processor's cache


@dataclass(frozen=True)
class Weights:
    """Ψ = {V, W} with the frozen output weights a, one or a stack of them.

    Attributes:
        attention: W = W_Kᵀ W_Q, [..., d, d].
        value: V = W_O W_V, [..., m, d].
    """

    attention: Tensor
    value: Tensor

    def plus(self, other: "Weights", scale: float | Tensor = 1.0) -> "Weights":
        """Return Ψ + scale · Ψ′, entry by entry; a scale [k] gives a stack of k."""
        factor = torch.as_tensor(scale, dtype=self.value.dtype)[..., None, None]
        return Weights(self.attention + factor * other.attention, self.value + factor * other.value)

    def minus(self, other: "Weights") -> "Weights":
        """Return Ψ − Ψ′: with Ψ′ = Ψ^(0), the task vector."""
        return self.plus(other, -1.0)


def initial(dimensions: int, width: int, seed: int, spread: float = 0.5) -> tuple[Weights, Tensor]:
    """Draw Ψ^(0), and a, [m], which all positions share, as the proofs have it (Definition 4).

    W, V ~ N(0, ξ²), ξ = spread/√m;  a_i ∈ {1/√m, −1/√m}

    Args:
        spread: ξ√m, at most 1 in the paper.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(rows, dimensions, generator=generator, dtype=torch.float64) for rows in (dimensions, width)]
    signs = torch.randint(2, (width,), generator=generator).double() * 2 - 1
    attention, value = (spread / width**0.5 * matrix for matrix in drawn)
    return Weights(attention, value), signs / width**0.5


def outputs(attention: Tensor, value: Tensor, output: Tensor, inputs: Tensor) -> Tensor:
    """Return f(X; Ψ), [n].

    f(X; Ψ) = (1/P) Σ_l aᵀ ReLU(V Σ_s x_s softmax_s(x_sᵀ W x_l))

    Args:
        attention: W, [d, d].
        value: V, [m, d].
        output: a, [m].
        inputs: X, [n, P, d].

    Source:
        Li et al. 2025, Equation 4, with W = W_Kᵀ W_Q and V = W_O W_V.
    """
    return torch.cat([_scores(attention, value, output, part) for part in inputs.split(_IN_CACHE)])


def _scores(attention: Tensor, value: Tensor, output: Tensor, inputs: Tensor) -> Tensor:
    mass = torch.softmax(inputs @ attention @ inputs.mT, dim=-2)  # [n, s, l], a distribution over s
    hidden = torch.relu(mass.mT @ inputs @ value.mT)  # [n, l, m]
    return (hidden @ output).mean(-1)


def hinge(attention: Tensor, value: Tensor, output: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean of max(1 − y f(X; Ψ), 0), with y, [n], −1 or 1, and the others as of `outputs`."""
    return torch.relu(1 - labels * outputs(attention, value, output, inputs)).mean()


_GRADIENTS = grad(hinge, argnums=(0, 1))


@dataclass(frozen=True)
class Training:
    """Mini-batch SGD: step η, batch B, T steps, seed of the batches."""

    step: float
    batch: int
    steps: int
    seed: int = 0


def fine_tune(
    start: Weights,
    output: Tensor,
    task: PatternTask,
    training: Training,
    watch: Callable[[int, Weights], bool] | None = None,
) -> Weights:
    """Return Ψ*_T: V and W after T steps of SGD on the hinge loss with fresh batches; a stays as it is.

    Args:
        start: Ψ^(0).
        output: a, [m].
        watch: called with the number of steps taken and the weights, before the first step and after each; True ends
            the training.
    """
    generator = torch.Generator().manual_seed(training.seed)
    attention, value = start.attention, start.value
    for done in range(training.steps):
        if watch and watch(done, Weights(attention, value)):
            break
        inputs, labels = task.draw(training.batch, generator)
        by_attention, by_value = _GRADIENTS(attention, value, output, inputs, labels)
        attention, value = attention - training.step * by_attention, value - training.step * by_value
    return Weights(attention, value)


@dataclass(frozen=True)
class Judged:
    """How a stack of models does on a test set: mean hinge loss, share of y f > 0, mean of y f."""

    hinge: Tensor
    accuracy: Tensor
    margin: Tensor


def judge(models: Weights, output: Tensor, inputs: Tensor, labels: Tensor) -> Judged:
    """Judge a stack of models, W [k, d, d] and V [k, m, d], on test data X, [n, P, d], and y, [n]."""
    along = vmap(lambda attention, value: labels * outputs(attention, value, output, inputs), chunk_size=1)
    margins = along(models.attention, models.value)
    return Judged(torch.relu(1 - margins).mean(1), (margins > 0).double().mean(1), margins.mean(1))


def combined(start: Weights, vectors: Sequence[Weights], scales: Tensor) -> Weights:
    """Return the stack Ψ^(0) + Σ_i λ_i ΔΨ_i.

    Args:
        scales: λ, [k, K].
    """
    attention = start.attention + torch.einsum(
        "kt,tij->kij", scales, torch.stack([vector.attention for vector in vectors])
    )
    value = start.value + torch.einsum("kt,tij->kij", scales, torch.stack([vector.value for vector in vectors]))
    return Weights(attention, value)


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
        keep: share of the rows kept, in [0, 1].
        smallest: keep the smallest rows instead, as a control.

    Source:
        Li et al. 2025, Corollary 2.
    """
    norms = vector.value.norm(dim=1)
    order = norms.argsort(descending=not smallest, stable=True)
    mask = torch.zeros_like(norms)
    mask[order[: round(keep * len(norms))]] = 1
    return Weights(vector.attention, vector.value * mask[:, None])


def frobenius_left(matrix: Tensor, rank: int) -> float:
    """Return ‖M − M_r‖_F / ‖M‖_F of the best approximation M_r of rank r; M is [m, d]."""
    values = torch.linalg.svdvals(matrix)
    return float(values[rank:].norm() / values.norm())


def leading_cosine(matrix: Tensor, pattern: Tensor) -> float:
    """Return abs(cos) of the leading right singular vector of a matrix [., d] and a pattern [d]."""
    return float((torch.linalg.svd(matrix, full_matrices=False)[2][0] @ pattern).abs())


def large_rows(vector: Weights) -> float:
    """Return the share of rows of ΔV with a 2-norm of at least half of the largest."""
    norms = vector.value.norm(dim=1)
    return float((norms >= 0.5 * norms.max()).double().mean())


def attention_mass(model: Weights, inputs: Tensor, pattern: Tensor) -> float:
    """Return p: the mean mass that queries with the pattern μ put on keys with μ.

    Args:
        model: Ψ.
        inputs: X of the label 1, [n, P, d].
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
        pattern: μ, [d].
        irrelevant: v_1 … v_M, [M, d].
    """
    across = (vector.value @ irrelevant.T).square().sum(1)
    return float((across / (vector.value @ pattern).square()).median() * len(irrelevant))
