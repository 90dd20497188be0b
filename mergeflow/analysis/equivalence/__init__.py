"""Task vectors and gradients: where task arithmetic is joint gradient descent, and how far it is where it is not.

Source: Zhou et al. 2025, On Task Vectors and Gradients, Theorems 1 and 2. The second-order term and the bounds are
derived here anew, because the printed statement, its proof and the measurement disagree.
"""

from mergeflow.analysis.equivalence.bounds import (
    NetworkBounds,
    derived_network_bounds,
    pairs_factor,
    printed_network_bounds,
    task_factors,
)
from mergeflow.analysis.equivalence.flat import flat_loss, flat_weights, trained
from mergeflow.analysis.equivalence.gradient_descent import (
    Loss,
    descend,
    gradient,
    hessian,
    hessian_vector,
    merge,
    spectral_norm,
    summed,
)
from mergeflow.analysis.equivalence.nets import Net, random_tasks
from mergeflow.analysis.equivalence.problems import Problem, feed_forward_problem, image_problem
from mergeflow.analysis.equivalence.second_order import Gap, curvature_sum, log_log_slope, measure_gap, mismatches

__all__ = [
    "Gap",
    "Loss",
    "Net",
    "NetworkBounds",
    "Problem",
    "curvature_sum",
    "derived_network_bounds",
    "descend",
    "feed_forward_problem",
    "flat_loss",
    "flat_weights",
    "gradient",
    "hessian",
    "hessian_vector",
    "image_problem",
    "log_log_slope",
    "measure_gap",
    "merge",
    "mismatches",
    "pairs_factor",
    "printed_network_bounds",
    "random_tasks",
    "spectral_norm",
    "summed",
    "task_factors",
    "trained",
]
