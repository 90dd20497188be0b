"""The rank of what fine-tuning changes, in the weights and in the class means of the features."""

from collections.abc import Mapping
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from mergeflow.merging.matrices import is_matrix, rank_of
from studies.old.papers.bases.tuned import Bench, State, class_means

SHOWN = 0.08  # CART's rank ratio
MOST = 0.9  # of a squared norm


def ranks_of(bench: Bench, tuned: Mapping[str, State]) -> dict[str, dict[str, float]]:
    """Return by task `kept`, the share of ‖τ‖² in the leading 8 % of the rank, and two shares of rank.

    Args:
        bench: the base and the tasks.
        tuned: θ_t by task.
    """
    return {
        task: {**_weights(bench.base, state), "features": _features(bench, state, task)}
        for task, state in tuned.items()
    }


def _weights(base: State, tuned: State) -> dict[str, float]:
    """Return the means over the matrices, each weighted by its share of ‖τ‖²."""
    kept, shares, sizes = [], [], []
    for name, start in base.items():
        if is_matrix(name, start.shape, "attn_mlp"):
            squares = torch.linalg.svdvals((tuned[name] - start).double()).square()
            kept.append(float(squares[: rank_of(tuple(start.shape), SHOWN, "ceil")].sum()))
            sizes.append(float(squares.sum()))
            shares.append(rank_share(squares) * sizes[-1])
    return {"kept": sum(kept) / sum(sizes), "weights": sum(shares) / sum(sizes)}


def rank_share(squares: Tensor, most: float = MOST) -> float:
    """Return the smallest share of all values, falling, whose sum is at least `most` of the whole.

    Args:
        squares: σ², falling, [r], not all 0.
        most: of their sum.

    Example:
        >>> rank_share(torch.tensor([6.0, 3.5, 0.5, 0.0]))
        0.5
    """
    running = np.asarray(squares.cumsum(dim=0)) / float(squares.sum())
    return float((int(np.searchsorted(running, most - 1e-12)) + 1) / len(squares))


def _features(bench: Bench, state: State, task: str) -> float:
    change = class_means(bench, state, task) - class_means(bench, bench.base, task)
    return rank_share(torch.linalg.svdvals(change).square())


def mean_rank(ranks: Mapping[str, Mapping[str, float]], name: str) -> float:
    """Return the mean over tasks of one of the measures, in %."""
    return 100 * fmean(row[name] for row in ranks.values())
