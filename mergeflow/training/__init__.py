"""Fine-tuning: settings, the one loop, the regimes, and what is recorded of a run.

The settings are imported with the package; what trains is imported when it is first used, with torch.
"""

from typing import TYPE_CHECKING

from mergeflow.late import late_names
from mergeflow.training.settings import TOGETHER, FineTuneSettings, IterativeSettings, LoraSettings

if TYPE_CHECKING:
    from mergeflow.training.batches import plan_batches
    from mergeflow.training.iterative import IterativeRun
    from mergeflow.training.linearised import LinearisedModel
    from mergeflow.training.loop import Span, fine_tune, learning_rate_factor
    from mergeflow.training.lora import LoraModel
    from mergeflow.training.trajectory import Cost, EpochRow, Trajectory

_HOMES = {
    "plan_batches": "mergeflow.training.batches",
    "IterativeRun": "mergeflow.training.iterative",
    "LinearisedModel": "mergeflow.training.linearised",
    "Span": "mergeflow.training.loop",
    "fine_tune": "mergeflow.training.loop",
    "learning_rate_factor": "mergeflow.training.loop",
    "LoraModel": "mergeflow.training.lora",
    "Cost": "mergeflow.training.trajectory",
    "EpochRow": "mergeflow.training.trajectory",
    "Trajectory": "mergeflow.training.trajectory",
}

__all__ = [
    "TOGETHER",
    "Cost",
    "EpochRow",
    "FineTuneSettings",
    "IterativeRun",
    "IterativeSettings",
    "LinearisedModel",
    "LoraModel",
    "LoraSettings",
    "Span",
    "Trajectory",
    "fine_tune",
    "learning_rate_factor",
    "plan_batches",
]


__getattr__ = late_names(__name__, _HOMES)
