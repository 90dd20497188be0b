"""The rows of outputs/results/test.json beside the merges: the base and the experts, between which merges are seen."""

from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {"zero_shot": "zero-shot", "base": "base, experts' heads", "individual": "individual experts"}


def base_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the base's row: `zero_shot`, or `base` where it is judged with heads that the experts trained."""
    return next(row for row in rows if row["name"] in ("zero_shot", "base"))


def model_name(name: str) -> str:
    """Return what people call the model of a row.

    Example:
        >>> model_name("zero_shot"), model_name("ties")
        ('zero-shot', 'ties')
    """
    return _NAMES.get(name, name)
