"""What a manifest says of a task of texts among its transforms: its figure, and whether examples are pairs."""

from collections.abc import Sequence

from mergeflow.data.task import Example, Place, Transform
from mergeflow.errors import MergeflowError
from mergeflow.modalities.metrics import METRICS, find_metric


def judged_by(value: str, class_names: Sequence[str] | None) -> Transform:
    """Judge the task by a figure; its examples stay as they are.

    Example:
        >>> judged_by("f1", ["no", "yes"]).text
        'metric=f1'
    """
    metric = find_metric(value)
    numbers = metric is not None and METRICS[value].numbers
    if numbers != (class_names is None):
        kind = "numbers" if class_names is None else "classes"
        fitting = [name for name, metric in METRICS.items() if metric.numbers is (class_names is None)]
        raise MergeflowError(
            f"found '{value}', but this task's labels are {kind}; expected one of {', '.join(fitting)}."
        )
    if value == "f1" and class_names is not None and len(class_names) != 2:
        raise MergeflowError(
            f"found 'f1', which is of two classes, but the task has {len(class_names)}; expected macro_f1, or two "
            "classes kept before it (?classes=0,1&metric=f1)."
        )
    return Transform(f"metric={value}", class_names, _unchanged)


PAIRS = "pairs"


def of_pairs(class_names: Sequence[str] | None) -> Transform:
    """Say in the manifest that every example is two texts; the examples stay as they are."""
    return Transform(PAIRS, class_names, _unchanged)


def _unchanged(example: Example, place: Place) -> Example:
    return example
