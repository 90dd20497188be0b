"""Fine-tuning: settings, the one loop, the regimes, and what is recorded of a run."""

from mergeflow.training.batches import Batches, Part, plan_batches
from mergeflow.training.iterative import IterativeRun
from mergeflow.training.linearised import LinearisedEncoder
from mergeflow.training.loop import Outcome, Span, TrainingSet, fine_tune, learning_rate_factor
from mergeflow.training.lora import LoraEncoder
from mergeflow.training.settings import TOGETHER, FineTuneSettings, IterativeSettings, LoraSettings
from mergeflow.training.trajectory import Cost, EpochRow, Trajectory

__all__ = [
    "FineTuneSettings",
    "IterativeSettings",
    "LoraSettings",
    "TOGETHER",
    "TrainingSet",
    "Batches",
    "Part",
    "plan_batches",
    "fine_tune",
    "Span",
    "Outcome",
    "learning_rate_factor",
    "IterativeRun",
    "LinearisedEncoder",
    "LoraEncoder",
    "EpochRow",
    "Trajectory",
    "Cost",
]
