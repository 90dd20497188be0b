"""Where waves come from, and how they are stored."""

import hashlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from mergeflow.data.decoding import Decoded, Decoding, Preparation
from mergeflow.data.task import Example, RawTask
from mergeflow.errors import MergeflowError

from .sections import DataSection

COUNTS = {"train": 240, "validation": 90, "test": 90}


def open_sine(task: str, place: str, seed: int, root: Path) -> RawTask:
    """Open `sine:PERIODS`, such as `sine:2,5,9`: noisy waves, one class for each number of periods."""
    if not all(text.isdecimal() for text in place.split(",")):
        raise MergeflowError(f"task '{task}': 'sine:{place}' must name whole numbers of periods, such as 'sine:2,5,9'.")
    periods = [int(text) for text in place.split(",")]
    splits = {split: partial(draw, task, split, periods) for split in COUNTS}
    return RawTask(task, [f"{count} periods" for count in periods], None, splits, counts=COUNTS)


def draw(task: str, split: str, periods: list[int]) -> Iterator[Example]:
    chance = np.random.default_rng(int.from_bytes(hashlib.sha256(f"{task}/{split}".encode()).digest()[:8]))
    for row in range(COUNTS[split]):
        label = row % len(periods)
        phase, noise = chance.uniform(0, 2 * np.pi), chance.normal(size=64)
        wave = np.sin(np.linspace(0, 2 * np.pi * periods[label], 64) + phase) + 0.3 * noise
        yield Example(wave.astype(np.float32), f"{split}/{row}", label)


def decoding(section: DataSection, root: Path) -> Decoding:
    def decode(example: Example, where: str) -> Decoded:
        series = np.asarray(example.read(), np.float32)
        if series.shape != (section.length,):
            raise MergeflowError(f"{where}: {series.size} values found, data.length says {section.length}.")
        arrays = {"series": series, "labels": np.asarray(example.label, np.int64)}
        digest = hashlib.sha256(series.tobytes()).digest()
        return Decoded(arrays, digest, {"series": series.tolist(), "label": example.label}, series.nbytes)

    schema = pa.schema([("series", pa.list_(pa.float32())), ("label", pa.int64())])
    return Decoding({"length": section.length}, decode, lambda class_names: schema, size=4 * section.length + 8)


PREPARATION = Preparation({"sine": open_sine}, {}, decoding)
