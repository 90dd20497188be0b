"""How much memory of a device work will take, before it starts."""

from mergeflow.memory.needs import Need, blank_model, judging_need, training_needs
from mergeflow.memory.tally import Tally, tallied, without_values

__all__ = ["Need", "Tally", "blank_model", "judging_need", "tallied", "training_needs", "without_values"]
