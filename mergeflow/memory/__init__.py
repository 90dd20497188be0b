"""How much memory of a device work will take, before it starts."""

from mergeflow.memory.forecast import Forecast, Work, fewer, forecast_on, largest
from mergeflow.memory.needs import Need, blank_model, judging_need, training_needs, work_need
from mergeflow.memory.tally import Tally, tallied, without_values

__all__ = [
    "Forecast",
    "Need",
    "Tally",
    "Work",
    "blank_model",
    "fewer",
    "forecast_on",
    "judging_need",
    "largest",
    "tallied",
    "training_needs",
    "without_values",
    "work_need",
]
