"""The optimiser of a run, and its learning-rate schedule."""

import math

import torch
from torch import nn

from mergeflow.training.settings import FineTuneSettings


def learning_rate_factor(settings: FineTuneSettings, progress: float) -> float:
    """Return the learning rate at `progress` ∈ [0, 1) as a fraction of its peak.

    With warm-up share w: p/w while p < w, then (1 + cos(π (p − w)/(1 − w)))/2 for `cosine`, or 1 for `constant`.
    Full-batch gradient descent has the factor 1 throughout.

    Example:
        >>> learning_rate_factor(FineTuneSettings(warmup=0.5), 0.25)
        0.5
    """
    if settings.regime == "full_batch_gd":
        return 1.0
    if progress < settings.warmup:
        return progress / settings.warmup
    if settings.schedule == "constant":
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * (progress - settings.warmup) / (1.0 - settings.warmup)))


def make_optimiser(parameters: list[nn.Parameter], settings: FineTuneSettings) -> torch.optim.Optimizer:
    """Return the optimiser of the settings, at its peak learning rate."""
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.regime == "full_batch_gd":
        return torch.optim.SGD(parameters, lr=rate)
    if settings.optimiser == "sgd":
        return torch.optim.SGD(parameters, lr=rate, momentum=settings.momentum, weight_decay=decay)
    return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=settings.fused)
