"""Metrics that are no mean over examples: F1, Matthews' and other correlations.

Each is a smooth function of means over the examples. So it has, as an accuracy does, one number for every example whose
mean it is: f(m̄) + ∇f(m̄)·(m_i − m̄), the figure and the example's influence on it. Whatever works with scores by example,
paired intervals above all, works with these as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mergeflow.errors import unknown_name
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

    from mergeflow.modality import Metric


@dataclass(frozen=True)
class Standardised:
    """Columns in a unit of their own.

    Attributes:
        values: With mean 0 and variance 1; 0 in a column that counts as constant. [n, D].
        mean: Of the columns as they were, in spreads; 0 where one counts as constant. [D].
        spread: Of the columns as they were; 0 where one counts as constant. [D].
    """

    values: np.ndarray
    mean: np.ndarray
    spread: np.ndarray


def standardised(columns: np.ndarray, rounding: float, smallest: float = 0.0) -> Standardised:
    """Return columns [n, D] in float64 in a unit of their own.

    Args:
        rounding: A column counts as constant whose spread is no larger share of its largest value.
        smallest: Or whose spread is no larger than this.
    """
    # A power of two changes no bit, and squares of 1e200 or 1e-200 are numbers in this unit.
    unit = np.ldexp(1.0, np.maximum(np.frexp(np.abs(columns).max(axis=0))[1], -1021) - 1)
    scaled = columns / unit
    mean, spread = scaled.mean(axis=0), scaled.std(axis=0)
    changes = (spread > rounding * np.abs(scaled).max(axis=0)) & (spread * unit > smallest)
    divisor = np.where(changes, spread, 1.0)
    values = np.where(changes, (scaled - mean) / divisor, 0.0)
    return Standardised(values, np.where(changes, mean / divisor, 0.0), np.where(changes, spread * unit, 0.0))


@dataclass(frozen=True)
class SmoothMetric:
    r"""A figure f((1/N) Σ_i m_i) of N examples, each known by what is right and what was answered.

    Attributes:
        name: As `?metric=` of a source has it.
        moments: What is right and what was answered, float64 [N, 2], to m, [N, K].
        figure: The mean of the moments, [K], to f, [].
        numbers: Whether answers are numbers; else they are classes.
    """

    name: str
    moments: Callable[[np.ndarray], np.ndarray]
    figure: Callable[[Tensor], Tensor]
    numbers: bool

    def shares(self, outcomes: np.ndarray) -> np.ndarray:
        """Return one number for each example, float64 [N], whose mean is the figure.

        Of a figure that is not defined, as a correlation with a constant, all are 0.

        Source: Davison and Hinkley 1997, "Bootstrap methods and their application", section 2.7.2 (the empirical
        influence values of the nonparametric delta method).
        """
        moments = self.moments(outcomes)
        with torch.inference_mode(False), torch.enable_grad():
            mean = torch.tensor(moments.mean(axis=0), requires_grad=True)
            figure = self.figure(mean)
            (slope,) = torch.autograd.grad(figure, mean)
        if not (figure.isfinite() and slope.isfinite().all()):
            return np.zeros(len(outcomes))
        shares: np.ndarray = figure.item() + (moments - moments.mean(axis=0)) @ slope.numpy()
        return shares


def _classes(outcomes: np.ndarray) -> np.ndarray:
    """Return [right = c, answered = c, both = c] for each class c: [N, 3 C]."""
    labels = np.arange(outcomes.max() + 1)
    right, answered = (outcomes[:, column, None] == labels for column in (0, 1))
    return np.concatenate([right, answered, right & answered], axis=1).astype(np.float64)


def _matthews(mean: Tensor) -> Tensor:
    right, answered, both = mean.reshape(3, -1)
    return (both.sum() - right @ answered) / ((1 - right @ right) * (1 - answered @ answered)).sqrt()


def _f1(mean: Tensor) -> Tensor:
    right, answered, both = mean.reshape(3, -1)
    return 2 * both[1] / (right[1] + answered[1]) if len(both) > 1 else both.sum() * torch.nan


def _macro_f1(mean: Tensor) -> Tensor:
    right, answered, both = mean.reshape(3, -1)
    seen = right + answered > 0
    return (2 * both[seen] / (right + answered)[seen]).mean()


def _products(outcomes: np.ndarray) -> np.ndarray:
    """Return [x, y, x², y², xy] of columns with mean 0 and variance 1, which no correlation depends on: [N, 5]."""
    x, y = standardised(outcomes, rounding=1e-13).values.T
    return np.stack([x, y, x * x, y * y, x * y], axis=1)


def _ranks(outcomes: np.ndarray) -> np.ndarray:
    from scipy.stats import rankdata

    return _products(rankdata(outcomes, axis=0))


def _correlation(mean: Tensor) -> Tensor:
    x, y, xx, yy, xy = mean
    return (xy - x * y) / ((xx - x * x) * (yy - y * y)).sqrt()


_METRICS = (
    SmoothMetric("matthews", _classes, _matthews, numbers=False),
    SmoothMetric("f1", _classes, _f1, numbers=False),
    SmoothMetric("macro_f1", _classes, _macro_f1, numbers=False),
    SmoothMetric("pearson", _products, _correlation, numbers=True),
    SmoothMetric("spearman", _ranks, _correlation, numbers=True),
)
METRICS = {metric.name: metric for metric in _METRICS}
ACCURACY = "accuracy"


def find_metric(name: str) -> Metric | None:
    """Return a figure by name; None for the accuracy, which is a mean as it is."""
    if name == ACCURACY:
        return None
    if name not in METRICS:
        raise unknown_name("metric", name, [ACCURACY, *METRICS])
    return METRICS[name]


def metric_of(manifest: Mapping[str, Any]) -> str:
    """Return the name of the figure that a prepared task is judged by: the last that its source names."""
    named = [text.removeprefix("metric=") for text in manifest["transforms"] if text.startswith("metric=")]
    return str(named[-1]) if named else (ACCURACY if manifest["class_names"] else "pearson")


def best_guess(manifest: Mapping[str, Any], split: str) -> float:
    """Return the figure of the best answer that is the same for all examples of a split.

    Example:
        >>> found = {"transforms": [], "class_names": ["no", "yes"], "splits": {"test": {"per_class": [3, 1]}}}
        >>> best_guess(found, "test"), best_guess({**found, "transforms": ["metric=matthews"]}, "test")
        (0.75, 0.0)
    """
    counts, metric = manifest["splits"][split]["per_class"], find_metric(metric_of(manifest))
    if not counts:
        return 0.0  # a constant number is correlated with nothing
    if metric is None:
        return float(max(counts) / sum(counts))
    right = np.repeat(np.arange(len(counts)), counts)
    guesses = (np.stack([right, np.full_like(right, guess)], axis=1) for guess in range(len(counts)))
    return max(float(metric.shares(guess).mean()) for guess in guesses)
