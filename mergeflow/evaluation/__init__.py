"""Accuracy, means and intervals, and selection on validation."""

from mergeflow.evaluation.accuracy import accuracies, example_scores, losses
from mergeflow.evaluation.averages import mean, normalised
from mergeflow.evaluation.scores_file import read_scores, write_scores
from mergeflow.evaluation.scoring import CandidateScorer, Score, score_of
from mergeflow.evaluation.selection import at_grid_edge, best_candidate

__all__ = [
    "CandidateScorer",
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
