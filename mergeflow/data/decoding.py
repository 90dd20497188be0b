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
    """One example ready to be stored: its row of each array, the same names, shapes and dtypes in all of a task.

    `labels` is among the arrays where the task has classes.
    """

    arrays: Mapping[str, np.ndarray]
    digest: bytes  # SHA-256 of the content as the source gives it, before any edit: equal content has equal digests
    row: Mapping[str, Any]  # its cells in Parquet, by column
    size: int  # bytes of these cells, roughly
    note: str = ""  # a remark on how it is stored; the manifest's warnings count the examples of each note


@dataclass(frozen=True)
class Decoding:
    """How the examples of one task become arrays.

    `decode` takes an example, and what an error message calls it besides its path. It runs on several threads, and
    raises a MergeflowError for content that cannot be decoded.
    """

    settings: Mapping[str, Any]  # what the manifest records of it, such as `image_size`
    decode: Callable[[Example, str], Decoded]
    schema: Callable[[Sequence[str] | None], pa.Schema]
    size: int  # bytes of the arrays' rows of one example; serves the disk check


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
