"""Which of several models is ahead, said with the interval that decides whether it is."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TypeVar

from studies.old.claims import paired
from studies.old.results import with_interval

Name = TypeVar("Name")


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
