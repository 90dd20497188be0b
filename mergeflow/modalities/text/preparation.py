"""How texts are prepared: every kind of source, transforms of labels, the choice of a figure, and tokens."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from mergeflow.data.address import Maker
from mergeflow.data.decoding import Decoding, Preparation
from mergeflow.data.task import Transform
from mergeflow.data.transforms import LABEL_TRANSFORMS
from mergeflow.errors import MergeflowError
from mergeflow.modalities.metrics import METRICS, find_metric
from mergeflow.modalities.text.decoding import text_decoding
from mergeflow.modalities.text.sections import DataSection
from mergeflow.modalities.text.sources.kinds import SOURCES
from mergeflow.modalities.text.tokenizer import load_tokenizer


def judged_by(value: str, class_names: Sequence[str] | None) -> Transform:
    """Judge the task by a figure; its examples stay as they are.

    Args:
        value: the figure's name.
        class_names: of the task.

    Raises:
        MergeflowError: an unknown name, or a figure of classes for a task of numbers and the reverse.

    Example:
        >>> judged_by("f1", ["no", "yes"]).text
        'metric=f1'
    """
    metric = find_metric(value)
    numbers = metric is not None and METRICS[value].numbers
    if numbers != (class_names is None):
        told = "numbers" if class_names is None else "classes"
        fitting = [name for name, one in METRICS.items() if one.numbers is (class_names is None)]
        raise MergeflowError(
            f"found '{value}', but this task's labels are {told}; expected one of {', '.join(fitting)}."
        )
    return Transform(f"metric={value}", class_names, lambda example, place: example)


def decoding(section: DataSection, root: Path) -> Decoding:
    """Return how texts become arrays of tokens."""
    return text_decoding(load_tokenizer(section.tokenizer, root, section.max_length))


TRANSFORMS: Mapping[str, Maker] = {**LABEL_TRANSFORMS, "metric": judged_by}
PREPARATION = Preparation(SOURCES, TRANSFORMS, decoding)
