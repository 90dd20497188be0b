"""Rows of texts in files: Parquet, JSON lines, and tables with commas or tabs between their columns."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, TypeAlias

import pyarrow as pa

from mergeflow.data.address import Opener, rooted
from mergeflow.data.locations import Location, list_shards
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError
from mergeflow.modalities.text.sources.columns import LABELS, PAIRS, SINGLES, task_of

Chosen: TypeAlias = Mapping[str, str]  # names of columns by what they are: text, text_pair, label
Read: TypeAlias = Callable[[IO[bytes], Chosen], pa.Table]

_TEXTS = {*SINGLES, *(name for pair in PAIRS for name in pair)}


def open_rows(
    task_of: Callable[..., RawTask],
    read: Read,
    ending: str,
    task: str,
    place: str,
    seed: int,
    root: Path,
    columns: Chosen = MappingProxyType({}),
) -> RawTask:
    """Open a file, or a folder with files for each split, as a task.

    Args:
        task_of: the task's name, tables and their names in messages by split, and a seed to the task.
        place: path or URI. A folder holds files named after their split; one file is a training split from which the
            others are carved.
    """
    location = Location.open(rooted(place, root))
    tables, where = {}, {}
    for split, paths in list_shards(location, task, ending).items():
        tables[split] = _joined(split, [_table(location, path, lambda stream: read(stream, columns)) for path in paths])
        where[split] = paths[0].rsplit("/", 1)[-1] if len(paths) == 1 else split
    return task_of(task, tables, where, seed, selected=columns)


def _table(location: Location, path: str, read: Callable[[IO[bytes]], pa.Table]) -> pa.Table:
    try:
        with location.open_file(path) as stream:
            table = read(stream)
        names = table.column_names
        table.validate(full=True)
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise MergeflowError(
            f"{path} is not in UTF-8: byte {error.start} is 0x{byte:02x}. Convert it to UTF-8."
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


def parquet_table(stream: IO[bytes], chosen: Chosen) -> pa.Table:
    """Return the table of a Parquet file."""
    import pyarrow.parquet as pq

    return pq.read_table(stream)


def lines_table(stream: IO[bytes], chosen: Chosen, names: Collection[str]) -> pa.Table:
    """Return the table of a file with one JSON object a line.

    Args:
        names: of the columns that examples are made of, besides the chosen ones. Another column, whose values differ in
            type, is left out.

    Raises:
        ArrowInvalid: a line is not a JSON object, or the values of a named column differ in type.
        UnicodeDecodeError: the file is not in UTF-8.
    """
    lines = enumerate(stream.read().decode("utf-8-sig").split("\n"), start=1)
    rows = {number: _json_object(number, line) for number, line in lines if line.strip()}
    columns = {}
    for name in dict.fromkeys(name for row in rows.values() for name in row):
        values = [row.get(name) for row in rows.values()]
        try:
            columns[name] = pa.array(values)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError) as error:
            if name in names or name in chosen.values():
                raise _unequal(name, values, [*rows]) or pa.ArrowInvalid(f"the column '{name}': {error}") from None
    return pa.table(columns)


def _json_object(number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise pa.ArrowInvalid(f"line {number} is not JSON ({error.msg} at its column {error.colno})") from None
    if not isinstance(row, dict):
        raise pa.ArrowInvalid(f'line {number} is {line.strip()[:40]}; expected an object such as {{"text": ...}}')
    return row


def _unequal(name: str, values: Sequence[Any], numbers: Sequence[int]) -> pa.ArrowInvalid | None:
    """Return the error for a column with values of two types, naming the first of each; None where they are of one."""
    first: dict[type, int] = {}
    for row, value in enumerate(values):
        if value is not None:
            first.setdefault(float if type(value) is int else type(value), row)
    if len(first) < 2:
        return None
    earlier, later = (f"{json.dumps(values[row])[:40]} in line {numbers[row]}" for row in [*first.values()][:2])
    return pa.ArrowInvalid(f"the column '{name}' has {earlier} and {later}; expected values of one type")


def _separated(stream: IO[bytes], chosen: Chosen, delimiter: str, quotes: bool) -> pa.Table:
    import pyarrow.csv as pv

    texts = {*_TEXTS, *(name for role, name in chosen.items() if role != "label")}
    labels = {*LABELS, chosen.get("label")} - {*texts}
    content = stream.read()
    head = content[: content.find(b"\n") + 1 or None].decode()  # a file in UTF-16 is told by its first line
    if delimiter == "," and "," not in head and ";" in head:
        delimiter = ";"  # as Excel writes where the comma is the decimal sign

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

    try:
        table = read(texts)  # they stay texts where all of a file look like numbers, or like "null"
    except pa.ArrowInvalid:
        content.decode()  # where the fault is the encoding, the error names the byte
        raise
    if table.num_columns == 1 and not table.column_names[0].isidentifier():
        signs = "tabs" if delimiter == "\t" else "commas"
        raise pa.ArrowInvalid(f"{table.column_names[0]!r} is its one column; expected names with {signs} between them")
    numbers = [
        column.name
        for column in table.schema
        if column.name in labels and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type))
    ]
    if not numbers or len(numbers) > len(set(numbers)):  # columns of one name are refused later
        return table
    written = read({*texts, *numbers})
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
    "jsonl": partial(open_rows, task_of, partial(lines_table, names={*_TEXTS, *LABELS}), "jsonl"),
    "csv": partial(open_rows, task_of, partial(_separated, delimiter=",", quotes=True), "csv"),
    "tsv": partial(open_rows, task_of, partial(_separated, delimiter="\t", quotes=False), "tsv"),
}
