"""Tasks drawn by formula, and how their examples are stored."""

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mergeflow.data.decoding import Decoded, Decoding, Preparation
from mergeflow.data.task import Example, RawTask
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.modalities.toy.sections import DataSection

NAMES = ("clouds",)
DEFAULTS = {"inputs": 8, "classes": 3, "train": 120, "validation": 60, "test": 60, "seed": 0}


def open_toy(task: str, place: str, seed: int, root: Path) -> RawTask:
    """Open a task of numbers: `NAME[,OPTION=VALUE...]`.

    `clouds`: a Gaussian cloud around a mean of the task's own, labelled by a linear teacher of the task's own.
    """
    name, *changes = place.split(",")
    if name not in NAMES:
        raise unknown_name("toy task", name, NAMES)
    options = dict(DEFAULTS)
    for change in changes:
        option, _, value = change.partition("=")
        if option not in DEFAULTS:
            raise unknown_name(f"option of toy:{name}", option, DEFAULTS)
        if not value.isdecimal() or (int(value) < 1 and option != "seed"):
            raise MergeflowError(f"task '{task}': {option} must be a whole number above 0, found '{value}'.")
        options[option] = int(value)
    splits = {split: partial(_clouds, task, split, options) for split in ("train", "validation", "test")}
    counts = {split: options[split] for split in splits}
    return RawTask(task, [f"{task} {label}" for label in range(options["classes"])], None, splits, counts=counts)


def _clouds(task: str, split: str, options: dict[str, int]) -> Iterator[Example]:
    rng = _generator(task, "task", options)
    mean, teacher = rng.normal(size=options["inputs"]), rng.normal(size=(options["inputs"], options["classes"]))
    cloud = _generator(task, split, options).normal(size=(options[split], options["inputs"]))
    labels = (cloud @ teacher).argmax(axis=1)
    for row, label in enumerate(labels):
        yield Example(cloud[row] + 0.5 * mean, f"{split}/{row}", int(label))


def _generator(task: str, part: str, options: dict[str, int]) -> np.random.Generator:
    digest = hashlib.sha256(f"{options['seed']}/{task}/{part}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8])))


def decoding(section: DataSection, root: Path) -> Decoding:
    """Return how examples become the arrays `inputs` (float64 [N, D]) and `labels` (int64 [N])."""

    def decode(example: Example, where: str) -> Decoded:
        inputs = np.asarray(example.read(), np.float64)
        if inputs.shape != (section.inputs,):
            raise MergeflowError(f"{where}: {inputs.size} numbers found, data.inputs says {section.inputs}.")
        arrays = {"inputs": inputs, "labels": np.asarray(example.label, np.int64)}
        row: dict[str, Any] = {"inputs": inputs.tolist(), "label": example.label}
        return Decoded(arrays, hashlib.sha256(inputs.tobytes()).digest(), row, inputs.nbytes)

    return Decoding({"inputs": section.inputs}, decode, _schema, size=8 * section.inputs + 8)


def _schema(class_names: Sequence[str] | None) -> pa.Schema:
    return pa.schema([("inputs", pa.list_(pa.float64())), ("label", pa.int64())])


PREPARATION = Preparation({"toy": open_toy}, {}, decoding)
