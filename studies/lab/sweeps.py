"""What a study tries of each merge method, and what readers call the models."""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from tasks.project.sections import Section

NAMES = {
    "zero_shot": "zero-shot",
    "individual": "individual",
    "average": "average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "consensus": "Consensus TA",
    "cart": "CART",
    "tsv": "TSV-M",
    "iso_c": "Iso-C",
    "iso_cts": "Iso-CTS",
    "wudi": "WUDI",
    "pcb": "PCB",
    "adamerging_ta": "AdaMerging + TA",
    "adamerging_cart": "AdaMerging + CART",
}
ADAPTED = {"task_vectors": "adamerging_ta", "cart": "adamerging_cart"}
"""What AdaMerging scales → the model."""


class Scales(Section):
    """A grid of scales, walked from `start`."""

    low: float
    high: float
    step: float = Field(gt=0)
    start: float


class Sweep(Section):
    """What is tried of one method. `args`: every other argument's values."""

    scale: Scales | None = None
    args: dict[str, list[Any]] = Field(default_factory=dict)


def ranges_of(sweep: Sweep) -> dict[str, Sequence[Any]]:
    """Return argument → the values that a sweep tries; of a scale the two ends."""
    return {**sweep.args, **({"scale": [sweep.scale.low, sweep.scale.high]} if sweep.scale else {})}
