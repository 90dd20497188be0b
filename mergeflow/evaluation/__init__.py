"""Accuracy, means and intervals, and selection on validation."""

from mergeflow.evaluation.accuracy import Judge, accuracies, example_scores, losses, read_scores, write_scores
from mergeflow.evaluation.averages import at_grid_edge, best_candidate, mean, normalised
from mergeflow.evaluation.scoring import CandidateScorer, Score, score_of

__all__ = [
    "CandidateScorer",
    "Judge",
    "Score",
    "accuracies",
    "example_scores",
    "losses",
    "at_grid_edge",
    "best_candidate",
    "mean",
    "normalised",
    "read_scores",
    "score_of",
    "write_scores",
]
