"""Binary tasks on tokens that are exact patterns: one that decides the label, and others that do not matter."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
        exact: whether every sequence has exactly these counts; otherwise they are means: each token is drawn by itself,
            and a sequence without a majority for its label is drawn again.
        noise: standard deviation of Gaussian noise on every entry of every token; 0 in the paper.

    Source:
        Li et al. 2025, Definition 2.
    """

    pattern: Tensor
    irrelevant: Tensor
    tokens: int = 20
    relevant: int = 8
    confusing: int = 2
    exact: bool = True
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.confusing < self.relevant or self.relevant + self.confusing > self.tokens:
            raise MergeflowError(
                f"A sequence of {self.tokens} tokens with {self.relevant} relevant and {self.confusing} confusing ones "
                "cannot be drawn: the relevant ones must be more, and both together at most all. Change the counts."
            )

    def draw(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw sequences and labels.

        Args:
            samples: n ≥ 1.
            generator: the source of chance.

        Returns:
            X, [n, P, d], and y, [n], −1 or 1; the order of a sequence's tokens does not matter to the model.
        """
        dtype = self.pattern.dtype
        labels = torch.randint(2, (samples,), generator=generator, dtype=torch.int64) * 2 - 1
        kinds = self._exact_kinds(samples, generator) if self.exact else self._random_kinds(samples, generator)
        patterns = torch.cat([self.pattern[None], -self.pattern[None], self.irrelevant])
        flipped = torch.where((labels[:, None] < 0) & (kinds < 2), 1 - kinds, kinds)
        inputs = patterns[flipped]
        if self.noise:
            inputs = inputs + self.noise * torch.randn(inputs.shape, generator=generator, dtype=dtype)
        return inputs, labels.to(dtype)

    def _exact_kinds(self, samples: int, generator: torch.Generator) -> Tensor:
        """Return the pattern of each token for the label 1: 0 for μ, 1 for −μ, 1 + j for v_j; [n, P]."""
        others = self.tokens - self.relevant - self.confusing
        fixed = torch.tensor([0] * self.relevant + [1] * self.confusing).expand(samples, -1)
        drawn = torch.randint(2, 2 + len(self.irrelevant), (samples, others), generator=generator)
        return torch.cat([fixed, drawn], 1)

    def _random_kinds(self, samples: int, generator: torch.Generator) -> Tensor:
        rest = 1 - (self.relevant + self.confusing) / self.tokens
        shares = [self.relevant / self.tokens, self.confusing / self.tokens]
        shares += [rest / len(self.irrelevant)] * len(self.irrelevant)
        weights = torch.tensor(shares, dtype=torch.float64)
        kinds = torch.multinomial(weights.expand(samples, -1), self.tokens, replacement=True, generator=generator)
        while len(left := ((kinds == 0).sum(1) <= (kinds == 1).sum(1)).nonzero().flatten()):
            kinds[left] = torch.multinomial(weights.expand(len(left), -1), self.tokens, True, generator=generator)
        return kinds


def related_patterns(
    alpha: float, dimensions: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Return two discriminative patterns with μ_1ᵀμ_2 = α, and the irrelevant ones that span the rest.

    Args:
        alpha: in [−1, 1].
        dimensions: d ≥ 3.
        dtype: of the patterns.

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
    axes = torch.eye(dimensions, dtype=dtype)
    return axes[0], alpha * axes[0] + (1 - alpha**2) ** 0.5 * axes[1], axes[2:]
