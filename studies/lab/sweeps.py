"""What a study tries of each merge method, which one leads, and what readers call the models."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, TypeVar

from pydantic import Field

from studies.lab.claims import with_interval
from studies.lab.rows import paired
from tasks.project.sections import Section

Name = TypeVar("Name")
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


def at_end(value: float, tried: Iterable[float]) -> bool:
    """Say whether the smallest or the largest of two values or more was taken.

    Example:
        >>> at_end(0.1, [0.1, 0.2]), at_end(0.2, [0.1, 0.2, 0.3]), at_end(0.1, [0.1])
        (True, False, False)
    """
    values = set(tried)
    return len(values) > 1 and value in (min(values), max(values))


def leader(values: Mapping[Name, Sequence[float]], names: Mapping[Name, str]) -> tuple[Name, str]:
    """Return the model with the highest mean, and its name for readers with its paired lead over the next.

    Args:
        values: model → accuracy in %, one value for each seed, the same seeds for all.
        names: model → what readers call it.

    Example:
        >>> leader({"ties": [70.0, 71.0], "cart": [72.0, 73.0]}, {"ties": "TIES", "cart": "CART"})
        ('cart', 'CART, 2.0 ± 0.0 points above TIES, the next')
        >>> leader({"ties": [70.0, 71.0]}, {"ties": "TIES"})
        ('ties', 'TIES')
    """
    first, *others = sorted(values, key=lambda model: fmean(values[model]), reverse=True)
    if not others:
        return first, names[first]
    lead = with_interval(paired(values[first], values[others[0]]))
    return first, f"{names[first]}, {lead} points above {names[others[0]]}, the next"
