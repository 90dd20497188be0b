"""The interface of a modality's data: sources, transforms, and a function from examples to named arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from mergeflow.data.address import Maker, Opener
from mergeflow.data.task import Example


@dataclass(frozen=True)
class Decoded:
    """One example ready to be stored.

    Args:
        arrays: its row of each array; every example of a task has the same names, shapes and dtypes. `labels` is among
            them where the task has classes.
        digest: SHA-256 of the content as the source gives it, before any edit: equal content has equal digests.
        row: its cells in Parquet, by column.
        size: bytes of these cells, roughly.
        note: a remark on how it is stored; the manifest's warnings count the examples of each note.
    """

    arrays: Mapping[str, np.ndarray]
    digest: bytes
    row: Mapping[str, Any]
    size: int
    note: str = ""


@dataclass(frozen=True)
class Decoding:
    """How the examples of one task become arrays.

    Args:
        settings: what the manifest records of it, such as `image_size`.
        decode: the example, and what an error message calls it besides its path. It runs on several threads, and
            raises a MergeflowError for content that cannot be decoded.
        size: bytes of the arrays' rows of one example; serves the disk check.
    """

    settings: Mapping[str, Any]
    decode: Callable[[Example, str], Decoded]
    schema: Callable[[Sequence[str] | None], pa.Schema]
    size: int


@dataclass(frozen=True)
class Preparation:
    """How a modality's data are prepared. It is separate from the models, so that training depends on no reader."""

    sources: Mapping[str, Opener]
    transforms: Mapping[str, Maker]
    decoding: Callable[[Any, Path], Decoding]  # of the section `data` of params.yaml and the project folder


@dataclass(frozen=True)
class Source:
    """A kind of source that an installed package or a project adds to a modality."""

    name: str  # the kind, as the tasks of params.yaml name it: `csv` for `csv:inputs/birds.csv`
    modality: str
    open: Opener
