"""Fine-tuning: settings, the one loop, the regimes, and what is recorded of a run."""

from mergeflow.training.batches import Batches, Part, plan_batches
from mergeflow.training.iterative import IterativeRun
from mergeflow.training.linearised import LinearisedModel
from mergeflow.training.loop import Outcome, Span, fine_tune, learning_rate_factor
from mergeflow.training.lora import LoraModel
from mergeflow.training.settings import TOGETHER, FineTuneSettings, IterativeSettings, LoraSettings
from mergeflow.training.trajectory import Cost, EpochRow, Trajectory

__all__ = [
    "FineTuneSettings",
    "IterativeSettings",
    "LoraSettings",
    "TOGETHER",
    "Batches",
    "Part",
    "plan_batches",
    "fine_tune",
    "Span",
    "Outcome",
    "learning_rate_factor",
    "IterativeRun",
    "LinearisedModel",
    "LoraModel",
    "EpochRow",
    "Trajectory",
    "Cost",
]
