"""Fine-tuning: settings, the loop, and what is recorded of a run."""

from mergeflow.training.loop import TrainingSet, fine_tune, learning_rate_factor
from mergeflow.training.settings import FineTuneSettings
from mergeflow.training.trajectory import EpochRow, Trajectory

__all__ = ["FineTuneSettings", "TrainingSet", "fine_tune", "learning_rate_factor", "EpochRow", "Trajectory"]
