"""Accuracy, means and intervals, and selection on validation.

What scores models is imported when it is first used, with torch.
"""

from typing import TYPE_CHECKING

from mergeflow.evaluation.averages import at_grid_edge, best_candidate, mean, normalised
from mergeflow.late import late_names

if TYPE_CHECKING:
    from mergeflow.evaluation.accuracy import Judge, accuracies, example_scores, losses, read_scores, write_scores
    from mergeflow.evaluation.scoring import CandidateScorer

__all__ = [
    "CandidateScorer",
    "Judge",
    "accuracies",
    "example_scores",
    "losses",
    "at_grid_edge",
    "best_candidate",
    "mean",
    "normalised",
    "read_scores",
    "write_scores",
]
_HOMES = {  # a literal: digests of code read from it what a name leads to
    "CandidateScorer": "mergeflow.evaluation.scoring",
    "Judge": "mergeflow.evaluation.accuracy",
    "accuracies": "mergeflow.evaluation.accuracy",
    "example_scores": "mergeflow.evaluation.accuracy",
    "losses": "mergeflow.evaluation.accuracy",
    "read_scores": "mergeflow.evaluation.accuracy",
    "write_scores": "mergeflow.evaluation.accuracy",
}
__getattr__ = late_names(__name__, _HOMES)
