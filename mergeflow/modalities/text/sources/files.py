"""Rows of texts in files: Parquet, JSON lines, and tables with commas or tabs between their columns."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TypeAlias

import pyarrow as pa

from mergeflow.data.address import Opener, rooted
from mergeflow.data.locations import Location, list_shards
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.text.sources.columns import LABELS, PAIRS, SINGLES, task_of

Read: TypeAlias = Callable[[IO[bytes]], pa.Table]

_TEXTS = {*SINGLES, *(name for pair in PAIRS for name in pair)}


def open_rows(
    task_of: Callable[..., RawTask], read: Read, ending: str, task: str, place: str, seed: int, root: Path
) -> RawTask:
    """Open a file, or a folder with files for each split, as a task.

    Args:
        task_of: the task's name, tables and their names in messages by split, and a seed to the task.
        place: path or URI. A folder holds files named after their split; one file is a training split from which the
            others are carved.

    Raises:
        MergeflowError: missing path, unknown split names, a file that cannot be read, two columns of one name, files of
            one split whose columns differ in type, or columns that `task_of` does not take.
    """
    location = Location.open(rooted(place, root))
    tables, where = {}, {}
    for split, paths in list_shards(location, task, ending).items():
        tables[split] = _joined(split, [_table(location, path, read) for path in paths])
        where[split] = paths[0].rsplit("/", 1)[-1] if len(paths) == 1 else split
    return task_of(task, tables, where, seed)


def _table(location: Location, path: str, read: Read) -> pa.Table:
    try:
        with location.open_file(path) as stream:
            table = read(stream)
        names = table.column_names
        table.validate(full=True)  # the reader of JSON lines takes any bytes for text
    except UnicodeDecodeError as error:
        raise MergeflowError(
            f"{path} is not in UTF-8: its columns' names are {error.object!r:.40}. Convert it."
        ) from None
    except (pa.ArrowInvalid, pa.ArrowIOError, pa.ArrowNotImplementedError) as error:
        raise MergeflowError(
            f"{path} cannot be read: {str(error).splitlines()[0]}. Correct the file, or name it by its kind: parquet, "
            "jsonl, csv (with quotes), tsv (without)."
        ) from error
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise MergeflowError(f"{path}: two columns are called '{twice[0]}'; expected names that differ. Rename one.")
    return table


def _joined(split: str, tables: Sequence[pa.Table]) -> pa.Table:
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowTypeError as error:
        raise MergeflowError(
            f"the parts of {split} do not fit together: {str(error).splitlines()[0]}. Give a column one type "
            "in all files."
        ) from error


def parquet_table(stream: IO[bytes]) -> pa.Table:
    """Return the table of a Parquet file."""
    import pyarrow.parquet as pq

    return pq.read_table(stream)


def lines_table(stream: IO[bytes]) -> pa.Table:
    """Return the table of a file with one JSON object a line."""
    import pyarrow.json as pj

    content = stream.read()
    table = pj.read_json(pa.BufferReader(content))
    # JSON has no dates: texts that look like some are read once more, as they are written.
    written = pa.schema(
        [(field.name, kind) for field in table.schema if (kind := _as_written(field.type)) != field.type]
    )
    if not written.names:
        return table
    return pj.read_json(pa.BufferReader(content), parse_options=pj.ParseOptions(explicit_schema=written))


def _as_written(kind: pa.DataType) -> pa.DataType:
    """Return a type of JSON's values with texts for dates, in lists and records too."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_as_written(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _as_written(field.type)) for field in kind])
    return kind


def _separated(stream: IO[bytes], delimiter: str, quotes: bool) -> pa.Table:
    import pyarrow.csv as pv

    content = stream.read()
    content[: content.find(b"\n") + 1 or None].decode()  # a file in UTF-16 is told by its first line

    def read(as_written: Iterable[str]) -> pa.Table:
        return pv.read_csv(
            pa.BufferReader(content),
            parse_options=pv.ParseOptions(
                delimiter=delimiter, quote_char='"' if quotes else False, newlines_in_values=quotes
            ),
            convert_options=pv.ConvertOptions(
                column_types=dict.fromkeys(as_written, pa.string()), strings_can_be_null=False
            ),
        )

    table = read(_TEXTS)  # they stay texts where all of a file look like numbers, or like "null"
    if table.num_columns == 1 and not table.column_names[0].isidentifier():
        signs = "commas" if delimiter == "," else "tabs"
        raise pa.ArrowInvalid(f"{table.column_names[0]!r} is its one column; expected names with {signs} between them")
    numbers = [
        column.name
        for column in table.schema
        if column.name in LABELS and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type))
    ]
    if not numbers or len(numbers) > len(set(numbers)):  # columns of one name are refused later
        return table
    written = read({*_TEXTS, *numbers})
    return table if all(_are_numbers(table[name], written[name]) for name in numbers) else written


def _are_numbers(values: pa.ChunkedArray, written: pa.ChunkedArray) -> bool:
    """Whether cells that read as numbers are no more than that: `01` is another class than `1`, and `+1` is a class."""
    cells = [
        (value, cell.strip())
        for value, cell in zip(values.to_pylist(), written.to_pylist(), strict=True)
        if value is not None
    ]
    if pa.types.is_integer(values.type):
        return all(cell == str(value) for value, cell in cells)
    return not all(cell.lstrip("+-").isdecimal() for _, cell in cells)  # whole numbers that no integer holds


FILES: Mapping[str, Opener] = {
    "parquet": partial(open_rows, task_of, parquet_table, "parquet"),
    "jsonl": partial(open_rows, task_of, lines_table, "jsonl"),
    "csv": partial(open_rows, task_of, partial(_separated, delimiter=",", quotes=True), "csv"),
    "tsv": partial(open_rows, task_of, partial(_separated, delimiter="\t", quotes=False), "tsv"),
}
