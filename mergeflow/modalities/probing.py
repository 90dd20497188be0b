"""Heads that are fitted on the features of the base before anything is tuned: linear probes."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize

from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification, Regression
from mergeflow.modalities.heads import Head
from mergeflow.modalities.metrics import standardised
from mergeflow.modality import Examples, Model, device_of

Fold = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Weights [R, D] and bias [R] on standardised features to those on the features themselves."""

MOST = 10_000  # examples: more move a linear head on some hundred features by less than its training does
_BATCH = 256
_ROUNDING = 1e-6  # of a feature's largest value, or of the middle spread: what float32 leaves of a constant
_SMALLEST = 1e-19  # its square is nothing in float32, in which heads are trained


def warm(section: Any, model: Model, examples: Examples) -> None:
    """Fit a task's head on the features of the base, where params.yaml says `head: probed`."""
    if section.head == "probed":
        plain = examples.numbered if isinstance(examples, Regression) else examples
        assert isinstance(plain, Classification)
        probe(model, plain, plain.labels.cpu().numpy())


@torch.no_grad()
def probe(model: Model, examples: Classification, targets: np.ndarray) -> None:
    """Fit a trained head in place, to the features that a model gives.

    Args:
        examples: of training; their head is fitted.
        targets: classes, int [N], or numbers, floating-point [N].
    """
    head = examples.head
    assert isinstance(head, Head)
    rows = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))[:MOST].sort().values
    model.module.eval()
    embeddings = [examples.embeddings(model, part).double().cpu() for part in rows.split(_BATCH)]
    features, wanted = torch.cat(embeddings).numpy(), targets[rows.numpy()]
    if not np.isfinite(features).all():
        raise MergeflowError(
            f"task '{examples.task}': the base gives features that are NaN or infinite: no head can be fitted. "
            "Check its weights, and whether it needs a wider type than the one it is stored in."
        )
    weight, bias = (ridge if wanted.dtype.kind == "f" else logistic)(features, wanted, len(head.weight))
    device = device_of(model)
    head.weight.copy_(torch.from_numpy(weight).to(device))
    assert head.bias is not None
    head.bias.copy_(torch.from_numpy(bias).to(device))


def logistic(features: np.ndarray, labels: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray]:
    r"""Return the weights [C, D] and biases [C] of a multinomial logistic regression.

    argmin −(1/n) Σ_i log softmax(W z_i + b)_{y_i} + ‖W‖²/(2n) on features z with mean 0 and variance 1

    Args:
        features: [n, D].
        labels: int [n], each below C.
        classes: C.

    Example:
        >>> weight, bias = logistic(np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([0, 0, 1, 1]), 2)
        >>> (np.array([[0.5], [2.5]]) @ weight.T + bias).argmax(axis=1).tolist()
        [0, 1]
    """
    scaled, fold = _standardised(features)
    count, width = scaled.shape
    right = np.eye(classes)[labels]

    def loss(values: np.ndarray) -> tuple[float, np.ndarray]:
        weight, bias = values[: classes * width].reshape(classes, width), values[classes * width :]
        logits = scaled @ weight.T + bias
        logits -= logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        off = (np.exp(log_p) - right) / count
        slope = np.concatenate([(off.T @ scaled + weight / count).ravel(), off.sum(axis=0)])
        return float((weight**2).sum() / 2 - (log_p * right).sum()) / count, slope

    start = np.zeros(classes * (width + 1))
    values = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 300}).x
    return fold(values[: classes * width].reshape(classes, width), values[classes * width :])


def ridge(features: np.ndarray, numbers: np.ndarray, outputs: int = 1) -> tuple[np.ndarray, np.ndarray]:
    r"""Return the weights [1, D] and the bias [1] of a ridge regression.

    argmin Σ_i (w·z_i + b − y_i)² + ‖w‖² on features z with mean 0 and variance 1

    Args:
        features: [n, D].
        numbers: y, [n].
        outputs: 1, what a head of numbers has.

    Example:
        >>> weight, bias = ridge(np.array([[0.0], [1.0], [2.0]]), np.array([1.0, 3.0, 5.0]))
        >>> (np.array([[1.0]]) @ weight.T + bias).round(6).tolist()
        [[3.0]]
    """
    assert outputs == 1
    scaled, fold = _standardised(features)
    centre = numbers.mean()
    slope = np.linalg.solve(scaled.T @ scaled + np.eye(scaled.shape[1]), scaled.T @ (numbers - centre))
    return fold(slope[None, :], np.array([centre]))


def _standardised(features: np.ndarray) -> tuple[np.ndarray, Fold]:
    """Return features with mean 0 and variance 1, and what turns weights on these into weights on the features.

    A feature that hardly changes counts as constant: its weight would be so large that the gradient which reaches the
    encoder through it is all that the encoder learns from, or infinite. all-MiniLM-L6-v2 has one with a spread of
    1e-32 and one of 2e-9 among others of 0.3.
    """
    spread = standardised(features, _ROUNDING, _SMALLEST).spread
    usual = float(np.median(spread[spread > 0])) if spread.any() else 0.0
    scaled = standardised(features, _ROUNDING, max(_SMALLEST, _ROUNDING * usual))

    def fold(weight: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        there = scaled.spread > 0
        return np.where(there, weight / np.where(there, scaled.spread, 1.0), 0.0), bias - weight @ scaled.mean

    return scaled.values, fold
