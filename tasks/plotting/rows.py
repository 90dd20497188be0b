"""Rows of outputs/results/test.json for the base and the experts, with which merges are compared."""

from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {"zero_shot": "zero-shot", "base": "base, experts' heads", "individual": "individual experts"}


def base_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the base's row: `zero_shot`, or `base` where it is judged with heads that the experts trained."""
    return next(row for row in rows if row["name"] in ("zero_shot", "base"))


def experts_behind_base(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return task → (accuracy of its expert, of the base) for each expert that gained nothing by its training.

    Example:
        >>> experts_behind_base(
        ...     [
        ...         {"name": "zero_shot", "accuracy": {"signs": 0.6, "land": 0.5}},
        ...         {"name": "individual", "accuracy": {"signs": 0.2, "land": 0.9}},
        ...     ]
        ... )
        {'signs': (0.2, 0.6)}
    """
    base = base_row(rows)["accuracy"]
    experts = next(row for row in rows if row["name"] == "individual")["accuracy"]
    return {task: (experts[task], base[task]) for task in experts if experts[task] < 1 and experts[task] <= base[task]}


def model_name(name: str) -> str:
    """Return the title of the model of a row.

    Example:
        >>> model_name("zero_shot"), model_name("ties")
        ('zero-shot', 'ties')
    """
    return _NAMES.get(name, name)


def task_title(test: Mapping[str, Any], task: str) -> str:
    """Return a task's name, with what it is judged by where that is not the accuracy.

    Example:
        >>> task_title({"metrics": {"stars": "spearman"}}, "stars"), task_title({}, "signs")
        ('stars (spearman)', 'signs')
    """
    metrics = test.get("metrics", {})
    return f"{task} ({metrics[task]})" if task in metrics else task
