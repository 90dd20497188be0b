"""Coefficients for a task that nobody trained, from a few labelled samples of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from mergeflow.analysis.provable.correlation import output_correlation
from mergeflow.errors import MergeflowError
from studies.theory.coefficients import unseen_coefficients

BETA, C = 0.01, 0.02
PENALTIES = tuple(10.0**power for power in range(-3, 4))
TRIALS, STEP = 60, 0.5


@dataclass(frozen=True)
class Answered:
    """What base and experts answer to a few labelled samples.

    Attributes:
        base: Logits of the base, [n, C].
        experts: Logits of each expert, [K][n, C].
        labels: int64 [n].
    """

    base: Tensor
    experts: Sequence[Tensor]
    labels: Tensor

    @property
    def truth(self) -> Tensor:
        """The labels as logits, [n, C]: 1 − 1/C for the right class, −1/C for the others."""
        return _centred(one_hot(self.labels, self.base.shape[1]).double())


def _centred(logits: Tensor) -> Tensor:
    return logits.double() - logits.double().mean(1, keepdim=True)


def similarities(answered: Answered) -> list[float]:
    """Return γ̂ of each expert: Equation 11 with the labels instead of what the unseen task's own expert answers.

    Args:
        answered: to the samples.

    Returns:
        [K], each in [−1, 1]; 0 for an expert that answers all samples alike.
    """
    found = []
    for logits in answered.experts:
        try:
            found.append(output_correlation(_centred(logits), answered.truth)[0])
        except MergeflowError:
            found.append(0.0)
    return found


def by_theory(answered: Answered) -> np.ndarray | None:
    """Return λ by the corrected Equations 75 and 76; None where the theory has none.

    Args:
        answered: to the samples.

    Returns:
        λ, [K].
    """
    try:
        return unseen_coefficients(similarities(answered), BETA, C)
    except MergeflowError:
        return None


def by_ridge(answered: Answered) -> np.ndarray:
    """Return λ by which the changes of the experts' logits, added to the base's, come nearest to the labels.

    min_λ ‖s t − f_0 − Σ λ_i (f_i − f_0)‖² + ρ ‖λ‖²,  logits less their mean over classes

    s makes the labels as long as the experts' logits; ρ is the one with the smallest error on samples left out.

    Args:
        answered: to the samples.

    Returns:
        λ, [K].
    """
    base, truth = _centred(answered.base), answered.truth
    experts = [_centred(one) for one in answered.experts]
    length = fmean(float(one.norm()) for one in experts) / float(truth.norm())
    features = torch.stack([(one - base).flatten() for one in experts], dim=1).numpy()  # [n·C, K]
    wanted = (length * truth - base).flatten().numpy()
    unit = float((features**2).sum() / features.shape[1]) or 1.0  # so that ρ means the same for all nets
    errors = {penalty: _left_out_error(features, wanted, penalty * unit, truth.shape[1]) for penalty in PENALTIES}
    return _solve(features, wanted, min(errors, key=errors.__getitem__) * unit)


def _solve(features: np.ndarray, wanted: np.ndarray, penalty: float) -> np.ndarray:
    gram = features.T @ features + penalty * np.eye(features.shape[1])
    found: np.ndarray = np.linalg.solve(gram, features.T @ wanted)
    return found


def _left_out_error(features: np.ndarray, wanted: np.ndarray, penalty: float, classes: int) -> float:
    """Return the squared error on each sample with λ from the other samples, by the block form of leave-one-out."""
    inverse = np.linalg.inv(features.T @ features + penalty * np.eye(features.shape[1]))
    residual = wanted - features @ (inverse @ (features.T @ wanted))
    error = 0.0
    for start in range(0, len(wanted), classes):
        own = features[start : start + classes]
        left_out = np.linalg.solve(np.eye(classes) - own @ inverse @ own.T, residual[start : start + classes])
        error += float((left_out**2).sum())
    return error


def by_search(count: int, loss: Callable[[Sequence[float]], float]) -> np.ndarray:
    """Return the best λ that Nelder and Mead's simplex finds from 1/K in so many merges.

    Args:
        count: K, experts.
        loss: of coefficients [K]; smaller is better.

    Returns:
        λ, [K].

    Example:
        >>> found = by_search(2, lambda scales: (scales[0] - 1) ** 2 + (scales[1] + 0.5) ** 2)
        >>> bool(np.abs(found - [1.0, -0.5]).max() < 0.05)
        True
    """
    from scipy.optimize import minimize

    middle = np.full(count, 1 / count)
    simplex = np.concatenate([middle[None], middle + STEP * np.eye(count)])
    tried = minimize(loss, middle, method="Nelder-Mead", options={"maxfev": TRIALS, "initial_simplex": simplex})
    found: np.ndarray = tried.x
    return found
