"""Transforms that every modality has: they derive a task from another by its labels alone.

Each is a pure function of example, split, index and seed; order of reading, threads and other examples do not matter.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mergeflow.data.address import Maker
from mergeflow.data.task import Example, Place, Transform
from mergeflow.errors import MergeflowError


def chance(name: str, place: Place) -> float:
    """Return a number in [0, 1), uniform over examples: the first 53 bits of SHA-256 of (name, seed, split, index)."""
    text = f"{name}/{place.seed}/{place.split}/{place.index}"
    return (int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11) / 2**53


def choose_classes(value: str, class_names: Sequence[str] | None) -> Transform:
    """Keep the examples of two classes or more (`5-9`, `0,2,4`, `0-3,7`) and number these from 0, in order of labels.

    Example:
        >>> choose_classes("0,2-3", ["cat", "dog", "emu", "fox"]).class_names
        ['cat', 'emu', 'fox']
    """
    names = _classes(class_names)
    last = len(names) - 1
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", value):
        raise MergeflowError(f"found '{value}'; expected labels from 0 to {last}, such as 0-{last // 2} or 0,{last}.")
    ends = [[int(end) for end in part.split("-")] for part in value.split(",")]
    outside = [part for part, end in zip(value.split(","), ends, strict=True) if not end[0] <= end[-1] <= last]
    if outside:
        raise MergeflowError(
            f"found {', '.join(outside)}; the task has the labels 0 ('{names[0]}') to {last} ('{names[-1]}'), and a "
            "range goes upwards."
        )
    chosen = sorted({label for end in ends for label in range(end[0], end[-1] + 1)})
    if len(chosen) < 2:
        raise MergeflowError(f"found one class only ('{names[chosen[0]]}'); expected at least two, to tell them apart.")
    new = {label: number for number, label in enumerate(chosen)}

    def apply(example: Example, place: Place) -> Example | None:
        return replace(example, label=new[example.label]) if example.label in new else None

    return Transform("", [names[label] for label in chosen], apply)


def shuffle_labels(value: str, class_names: Sequence[str] | None) -> Transform:
    """Give every example of every split a label drawn uniformly, once, so that it says nothing about the content.

    The value is the seed of the draw, an integer from 0; the seed of the preparation does not matter.

    Example:
        >>> shuffled = shuffle_labels("7", ["cat", "dog", "emu"])
        >>> [shuffled.apply(Example(None, "", 0), Place("train", row, 0)).label for row in range(6)]
        [2, 1, 0, 2, 1, 2]

    Source: Zhang et al. 2017, "Understanding deep learning requires rethinking generalization" (random labels).
    """
    names = _classes(class_names)
    if not re.fullmatch(r"\d{1,9}", value):
        raise MergeflowError(f"found '{value}'; expected a seed, an integer from 0 to 999999999.")
    seed = int(value)

    def apply(example: Example, place: Place) -> Example:
        return replace(example, label=int(chance("shuffle_labels", replace(place, seed=seed)) * len(names)))

    return Transform("", names, apply)


def take_fraction(value: str, class_names: Sequence[str] | None) -> Transform:
    """Keep each training example with probability f, above 0 and at most 1; validation and test stay whole.

    A smaller fraction is a part of a larger one, and n examples become f n ± sqrt(f (1 - f) n).

    Example:
        >>> third = take_fraction("0.3", None)
        >>> [row for row in range(12) if third.apply(Example(None, ""), Place("train", row, 0))]
        [7, 9, 10, 11]
    """
    fraction = number(value)
    if fraction is None or not 0 < fraction <= 1:
        raise MergeflowError(f"found '{value}'; expected a fraction above 0 and at most 1, such as 0.1.")

    def apply(example: Example, place: Place) -> Example | None:
        return example if place.split != "train" or chance("fraction", place) < fraction else None

    return Transform("", class_names, apply)


def number(value: str) -> float | None:
    """Return a decimal number, or None where the text is not one.

    Example:
        >>> number(".5"), number("1e-1"), number("nan"), number("5%")
        (0.5, 0.1, None, None)
    """
    return float(value) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", value, re.IGNORECASE) else None


def _classes(class_names: Sequence[str] | None) -> Sequence[str]:
    if not class_names:
        raise MergeflowError("the task has no classes; this transform is for tasks that have. Remove it.")
    return class_names


LABEL_TRANSFORMS: Mapping[str, Maker] = {
    "classes": choose_classes,
    "shuffle_labels": shuffle_labels,
    "fraction": take_fraction,
}
