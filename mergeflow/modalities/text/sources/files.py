"""Rows of texts in files: Parquet, JSON lines, and tables with commas or tabs between their columns."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO

import pyarrow as pa

from mergeflow.data.address import Opener, rooted
from mergeflow.data.locations import Location
from mergeflow.data.shards import list_shards
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.text.sources.columns import PAIRS, SINGLES, task_of

_TEXTS = {*SINGLES, *(name for pair in PAIRS for name in pair)}


def open_rows(
    read: Callable[[IO[bytes]], pa.Table], ending: str, task: str, place: str, seed: int, root: Path
) -> RawTask:
    """Open a file, or a folder with files for each split, as a task.

    Args:
        read: one file to its table.
        ending: of the files' names.
        task: the task's name.
        place: path or URI. A folder holds files named after their split; one file is a training split from which the
            others are carved.
        seed: decides the carved splits.
        root: what a relative path starts from.

    Raises:
        MergeflowError: missing path, unknown split names, a file that cannot be read, or columns that are not of texts.
    """
    location = Location.open(rooted(place, root))
    tables, where = {}, {}
    for split, paths in list_shards(location, task, ending).items():
        tables[split] = pa.concat_tables([_table(location, path, read) for path in paths], promote_options="permissive")
        where[split] = paths[0].rsplit("/", 1)[-1] if len(paths) == 1 else split
    return task_of(task, tables, where, seed)


def _table(location: Location, path: str, read: Callable[[IO[bytes]], pa.Table]) -> pa.Table:
    try:
        with location.open_file(path) as stream:
            return read(stream)
    except (pa.ArrowInvalid, pa.ArrowIOError, pa.ArrowNotImplementedError) as error:
        raise MergeflowError(
            f"{path} cannot be read: {str(error).splitlines()[0]}. Correct the file, or name it by its kind: parquet, "
            "jsonl, csv (with quotes), tsv (without)."
        ) from error


def _parquet(stream: IO[bytes]) -> pa.Table:
    import pyarrow.parquet as pq

    return pq.read_table(stream)


def _json_lines(stream: IO[bytes]) -> pa.Table:
    import pyarrow.json as pj

    return pj.read_json(stream)


def _separated(stream: IO[bytes], delimiter: str, quotes: bool) -> pa.Table:
    import pyarrow.csv as pv

    return pv.read_csv(
        stream,
        parse_options=pv.ParseOptions(delimiter=delimiter, quote_char='"' if quotes else False),
        # A column of texts stays one where all texts of a file look like numbers, or like "null".
        convert_options=pv.ConvertOptions(column_types=dict.fromkeys(_TEXTS, pa.string()), strings_can_be_null=False),
    )


FILES: Mapping[str, Opener] = {
    "parquet": partial(open_rows, _parquet, "parquet"),
    "jsonl": partial(open_rows, _json_lines, "jsonl"),
    "csv": partial(open_rows, partial(_separated, delimiter=",", quotes=True), "csv"),
    "tsv": partial(open_rows, partial(_separated, delimiter="\t", quotes=False), "tsv"),
}
