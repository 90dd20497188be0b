"""Read a Parquet snapshot in the Hugging Face image convention, from any place fsspec reaches."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mergeflow.data.locations import Location, list_shards
from mergeflow.data.task import Example, RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.vision.image_columns import find_columns

_BATCH_ROWS = 16


def open_parquet(
    task_name: str, uri: str, templates: Sequence[str], seed: int, chosen: Mapping[str, str] | None = None
) -> RawTask:
    """Open a folder of Parquet shards, or one Parquet file, as a task.

    Args:
        uri: path or fsspec URI. A folder holds shards named after their split (also val, valid, dev), directly, in
            `data/` or in one folder per split. One file is a training split from which the others are carved.
        templates: prompts with `{}`.
        chosen: columns, as `find_columns` takes them.
    """
    location = Location.open(uri)
    shards = list_shards(location, task_name)
    columns: dict[str, tuple[str, str, list[str]]] = {}
    counts: dict[str, int] = {}
    for split, paths in shards.items():
        for path in paths:
            with _parquet(location, path) as file:
                columns[path] = find_columns(file.schema_arrow, path, chosen=chosen)
                counts[split] = counts.get(split, 0) + file.metadata.num_rows
    first = shards["train"][0] if "train" in shards else next(iter(columns))
    for path, in_file in columns.items():
        if in_file != columns[first]:
            raise MergeflowError(
                f"{path}: columns and class names are {in_file}, but those of {first} are {columns[first]}. "
                "All shards of a task must agree: write them again together."
            )
    image, label, class_names = columns[first]
    return RawTask(
        name=task_name,
        class_names=class_names,
        templates=templates,
        splits={split: partial(_examples, location, paths, image, label) for split, paths in shards.items()},
        seed=seed,
        counts=counts,
        keys={split: partial(_keys, location, paths, image, label) for split, paths in shards.items()},
    )


@contextmanager
def _parquet(location: Location, path: str) -> Iterator[pq.ParquetFile]:
    try:
        # Buffered, not pre-buffered: memory stays at a few pages whatever the size of the row groups.
        with location.open_file(path) as stream:
            yield pq.ParquetFile(stream, buffer_size=2**20, pre_buffer=False)
    except (pa.ArrowInvalid, pa.ArrowIOError, pa.ArrowNotImplementedError) as error:
        raise MergeflowError(
            f"{path}: not a readable Parquet file ({str(error).splitlines()[0]}). It may be truncated: download or "
            "write it again."
        ) from error


def _batches(location: Location, paths: Sequence[str], columns: list[str]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    for path in paths:
        with _parquet(location, path) as file:
            row = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                yield path, row, batch.to_pydict()
                row += batch.num_rows


def _examples(location: Location, paths: Sequence[str], image: str, label: str) -> Iterator[Example]:
    for path, start, batch in _batches(location, paths, [image, label]):
        for row, (cell, value) in enumerate(zip(batch[image], batch[label], strict=True), start=start):
            if value is None or cell is None or cell["bytes"] is None:
                missing = "label" if value is None else "image bytes"
                raise MergeflowError(
                    f"{path}, row {row}: no {missing}. Expected every row to hold a label and the image itself; "
                    "a snapshot that only names image files must be written again with the images embedded."
                )
            yield Example(cell["bytes"], _name(cell, path, row), value)


def _keys(location: Location, paths: Sequence[str], image: str, label: str) -> Iterator[tuple[str, int]]:
    for path, start, batch in _batches(location, paths, [f"{image}.path", label]):
        for row, (cell, value) in enumerate(zip(batch[image], batch[label], strict=True), start=start):
            yield _name(cell, path, row), -1 if value is None else value


def _name(cell: dict[str, Any] | None, path: str, row: int) -> str:
    """Return the image's own path, or its place in the shard when it has none."""
    return (cell and cell["path"]) or f"{path.rsplit('/', 1)[-1]}#{row}"
