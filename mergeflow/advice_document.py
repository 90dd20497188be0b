"""The advice of a pipeline's run as the document that report and registry read, beside what the sweep then chose."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from mergeflow.documents import Selection
from mergeflow.layout import RESULTS

ADVICE = f"{RESULTS}/advice.json"
SUM = "task_arithmetic"  # the method whose `scale` is the λ of a sum of task vectors


class AdviceDocument(TypedDict):
    """What `mergeflow.analysis.provable.advising.Advice.as_json` gives; a part that was not computed is None.

    A range is [low, high] with None for no end; an empty one is None.
    """

    experts: list[str]
    scales: list[float] | None
    theory: list[float | None] | None
    weighed: list[str]
    cosines: list[list[float]] | None
    answered: list[str] | None
    alphas: list[list[float]] | None
    changes: list[list[float]] | None
    pairs: list[dict[str, Any]] | None
    unlearning: dict[str, dict[str, float]] | None
    linearity: dict[str, str] | None
    remarks: list[str]


class AdviceNote(TypedDict):
    """What is kept of it with a registered version.

    `chosen` is the λ that the sweep chose for the plain sum, None where it tried none; `inside` says whether it lies
    in the range of the `suggested`, `theory_inside` whether in the theory's; None where there is nothing to compare.
    `relations` counts the pairs of tasks by their verdict.
    """

    suggested: list[float] | None
    theory: list[float | None] | None
    chosen: float | None
    inside: bool | None
    theory_inside: bool | None
    relations: dict[str, int]
    remarks: list[str]


def read_advice(path: Path) -> AdviceDocument | None:
    """Return the advice of a run; None where the file is missing, as after a run of an earlier version."""
    return cast(AdviceDocument, json.loads(path.read_text("utf-8"))) if path.exists() else None


def advice_note(advice: AdviceDocument, selection: Selection | Mapping[str, Any]) -> AdviceNote:
    """Return the advice in short, with where the sweep's choice lies in it.

    Args:
        advice: of the run's experts.
        selection: what `select` chose on validation.
    """
    pairs = [pair["relation"] for pair in advice["pairs"] or []]
    methods: Mapping[str, Any] = selection["methods"]
    chosen = methods.get(SUM, {}).get("args", {}).get("scale")
    suggested = advice["scales"]
    return {
        "suggested": suggested,
        "theory": advice["theory"],
        "chosen": chosen,
        "inside": _inside(chosen, suggested and [suggested[0], suggested[-1]]),
        "theory_inside": _inside(chosen, advice["theory"]),
        "relations": {relation: pairs.count(relation) for relation in dict.fromkeys(sorted(pairs))},
        "remarks": advice["remarks"],
    }


def _inside(value: float | None, interval: Sequence[float | None] | None) -> bool | None:
    if value is None or not interval:
        return None
    low, high = interval
    return (low is None or low <= value) and (high is None or value <= high)


def range_text(interval: Sequence[float | None] | None) -> str:
    """Return a range of λ in words.

    Args:
        interval: [low, high], None for no end; None where it is empty.

    Example:
        >>> [range_text(one) for one in ([0.5, None], [None, 0], [0, 0.25], None)]
        ['≥ 0.50', '≤ 0.00', '0.00 … 0.25', 'none']
    """
    if interval is None:
        return "none"
    low, high = interval
    if high is None:
        return f"≥ {low:.2f}"
    return f"≤ {high:.2f}" if low is None else f"{low:.2f} … {high:.2f}"
