"""Matrices of low rank as two factors: exact sums, the best approximation of a smaller rank, and its loss."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING

from mergeflow.late import torch
from mergeflow.merging.linalg.spectra import svd

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """A matrix s · B A.

    Attributes:
        down: A, [r, n].
        up: B, [m, r].
        factor: s.
    """

    down: Tensor
    up: Tensor
    factor: float = 1.0

    @property
    def rank(self) -> int:
        """The number r of columns of B: the matrix has this rank at most."""
        return len(self.down)

    def product(self) -> Tensor:
        """Return the matrix [m, n], in float64."""
        return self.up.double() @ self.down.double() * self.factor

    def norm(self) -> float:
        """Return the Frobenius norm without forming the matrix, ‖R_B R_Aᵀ‖ of B = Q_B R_B and Aᵀ = Q_A R_A."""
        up, down = (torch.linalg.qr(side.double(), mode="r").R for side in (self.up, self.down.T))
        return float((up @ down.T).norm()) * abs(self.factor)

    def to(self, dtype: torch.dtype) -> Factors:
        """Return the factors in another type."""
        return Factors(self.down.to(dtype), self.up.to(dtype), self.factor)

    def padded(self, rank: int) -> Factors:
        """Return the same matrix with zeros in its factors up to a rank."""
        more = rank - self.rank
        if more <= 0:
            return self
        down, up = (
            torch.nn.functional.pad(side, pad) for side, pad in ((self.down, (0, 0, 0, more)), (self.up, (0, more)))
        )
        return Factors(down, up, self.factor)


def summed(terms: Sequence[tuple[float, Factors]]) -> Factors:
    """Return Σ c_t · s_t B_t A_t without loss: the factors side by side, c_t s_t in those of B, of rank Σ r_t.

    A single term with c = 1 is returned as it is, so that an adapter alone stays what it was to the bit.

    Example:
        >>> a = Factors(torch.ones(1, 3), torch.ones(2, 1), 0.5)
        >>> summed([(1.0, a), (-2.0, a)]).product().tolist()
        [[-0.5, -0.5, -0.5], [-0.5, -0.5, -0.5]]
    """
    if len(terms) == 1 and terms[0][0] == 1:
        return terms[0][1]
    ups = [factors.up.double() * (coefficient * factors.factor) for coefficient, factors in terms]
    return Factors(torch.cat([factors.down.double() for _, factors in terms]), torch.cat(ups, 1))


def compressed(factors: Factors, rank: int, error: float = 0.0) -> Factors:
    """Return the best approximation of a smaller rank, computed in the factors' space.

    B = Q_B R_B, Aᵀ = Q_A R_A, s R_B R_Aᵀ = U Σ Vᵀ:  B' = Q_B U_k Σ_k^½, A' = Σ_k^½ V_kᵀ Q_Aᵀ

    Args:
        factors: The matrix, of rank R; the cost is that of two QR and one SVD of R columns.
        rank: k at most.
        error: The smallest rank whose error ‖Δ − B'A'‖ / ‖Δ‖ is at most this one is taken; 0 for k itself.
    """
    left, up = torch.linalg.qr(factors.up.double())
    right, down = torch.linalg.qr(factors.down.double().T)
    small = torch.linalg.svd(up @ down.T * factors.factor)
    rank_kept = _fitting(small.S, float(small.S.square().sum()), rank, error)
    root = small.S[:rank_kept].sqrt()
    return Factors((right @ (small.Vh[:rank_kept].T * root)).T.contiguous(), left @ (small.U[:, :rank_kept] * root))


def approximated(matrix: Tensor, rank: int, error: float = 0.0) -> Factors:
    """Return the best approximation of rank k of a matrix, SVD_k(Δ) = (U Σ^½)(Σ^½ Vᵀ), in float64.

    Args:
        matrix: Δ, [m, n], not zero.
        rank: k at most.
        error: As of `compressed`.
    """
    left, sigma, right = svd(matrix, min(rank, *matrix.shape))
    rank_kept = _fitting(sigma, float(matrix.double().square().sum()), rank, error)
    root = sigma[:rank_kept].sqrt()
    return Factors((right[:, :rank_kept] * root).T.contiguous(), left[:, :rank_kept] * root)


def _fitting(sigma: Tensor, total: float, rank: int, error: float) -> int:
    """Return the smallest number of leading singular values, 1 … rank, that leaves at most the error."""
    if not error:
        return min(rank, len(sigma))
    left = (total - sigma[:rank].square().cumsum(0)).clamp_(min=0).sqrt()
    enough = (left <= error * sqrt(total)).nonzero()
    return int(enough[0]) + 1 if len(enough) else min(rank, len(sigma))


_LAYER = re.compile(r"^(.*?\.\d+)\.")


@dataclass(frozen=True)
class Loss:
    """The loss of the factors of one tensor.

    Attributes:
        norm: ‖Δ‖, Frobenius.
        lost: ‖Δ − s · B A‖, as the factors are stored.
    """

    name: str
    rank: int
    norm: float
    lost: float

    @property
    def error(self) -> float:
        """‖Δ − s · B A‖ / ‖Δ‖."""
        return self.lost / self.norm


def total_error(losses: Iterable[Loss]) -> float:
    """Return the error over several tensors, √(Σ lost²) / √(Σ norm²); 0 for none."""
    every = list(losses)
    norm = sqrt(sum(loss.norm**2 for loss in every))
    return sqrt(sum(loss.lost**2 for loss in every)) / norm if norm else 0.0


def lines(losses: Iterable[Loss]) -> list[str]:
    """Return the error as lines for people: of all, then of each layer with the tensor that loses most."""
    layers: dict[str, list[Loss]] = {}
    for loss in losses:
        numbered = _LAYER.match(loss.name)
        layers.setdefault(numbered.group(1) if numbered else loss.name, []).append(loss)
    every = [loss for of_layer in layers.values() for loss in of_layer]
    if not every:
        return []
    width = max(map(len, layers))
    text = [
        f"error {total_error(every):.2e} of the change of {len(every)} matrices (relative Frobenius norm), by layer:"
    ]
    for layer, of_layer in sorted(layers.items(), key=lambda pair: _natural(pair[0])):
        worst = max(of_layer, key=lambda loss: loss.error)
        where = f"   most {worst.error:.2e} in {worst.name.removeprefix(layer + '.')}" if len(of_layer) > 1 else ""
        ranks = sorted({loss.rank for loss in of_layer})
        shown = f"rank {ranks[0]}" + (f" to {ranks[-1]}" if len(ranks) > 1 else "")
        text.append(f"  {layer:{width}}  {total_error(of_layer):.2e}  {shown}{where}")
    return text


def _natural(name: str) -> list[tuple[int, str]]:
    """Order numbers by value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
