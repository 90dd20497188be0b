"""Accuracy, statistics and selection on validation."""

from mergeflow.evaluation.accuracy import LabelledImages, accuracies, correct_predictions
from mergeflow.evaluation.scoring import CandidateScorer, Score, score_of
from mergeflow.evaluation.selection import at_grid_edge, best_candidate
from mergeflow.evaluation.statistics import mean, normalised

__all__ = [
    "CandidateScorer",
    "LabelledImages",
    "Score",
    "accuracies",
    "correct_predictions",
    "at_grid_edge",
    "best_candidate",
    "mean",
    "normalised",
    "score_of",
]
