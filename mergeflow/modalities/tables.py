"""Tables of rows: Parquet, JSON lines, and data sets of the Hugging Face hub through the package `datasets`."""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, NamedTuple, TypeAlias

import pyarrow as pa

from mergeflow.data.address import rooted
from mergeflow.data.locations import Location, list_shards, split_of
from mergeflow.data.task import RawTask
from mergeflow.errors import MergeflowError


def separator(head: str) -> str:
    """Return the sign between a CSV file's columns: a semicolon where Excel's comma is the decimal sign; or a tab."""
    return next((sign for sign in ",;\t" if sign in head), ",")


def load_splits(
    hub_id: str, config: str | None, revision: str | None, renamed: Mapping[str, str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the data sets of train, validation and test, and the names of the splits that are none of these.

    Args:
        renamed: the hub's name of a split to ours, beyond val, valid and dev.
    """
    try:
        import datasets
    except ImportError as error:
        raise MergeflowError(
            f"hf:{hub_id} needs the package 'datasets', which is not installed. "
            "Install it with: pip install 'mergeflow[hub]'"
        ) from error
    parts: dict[str, Any] = {}
    ignored = []
    try:
        for name in datasets.get_dataset_split_names(hub_id, config, revision=revision):
            split = renamed.get(str(name)) or split_of(str(name))
            if split is None or split in parts:
                ignored.append(str(name))
            else:
                parts[split] = datasets.load_dataset(hub_id, config, split=name, revision=revision)
    # The hub's client raises its own, the HTTP library's and the parsers' errors; all mean "no data from there".
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise MergeflowError(
            f"hf:{hub_id} cannot be loaded ({type(error).__name__}: {first}). Check the name and the network; with "
            "HF_HUB_OFFLINE set only data sets in the local cache can be read. A snapshot on disk can be read "
            "with parquet:FOLDER."
        ) from error
    if "train" not in parts:
        names = ", ".join([*parts, *ignored]) or "none"
        raise MergeflowError(f"hf:{hub_id}: splits found: {names}; expected at least train.")
    return parts, ignored


class HubPlace(NamedTuple):
    """A data set by its address."""

    name: str
    config: str | None = None
    revision: str | None = None


def parse_place(place: str, root: Path) -> HubPlace:
    """Cut `OWNER/NAME[#CONFIG][@REVISION]`; a local folder is taken as it is, whatever characters it has.

    Example:
        >>> parse_place("nyu-mll/glue#rte@main", Path())
        HubPlace(name='nyu-mll/glue', config='rte', revision='main')
    """
    if Path(rooted(place, root)).is_dir():
        return HubPlace(rooted(place, root))
    rest, _, revision = place.partition("@")
    name, _, config = rest.partition("#")
    return HubPlace(name, config or None, revision or None)


def open_hub(
    task_of: Callable[..., RawTask],
    task: str,
    place: str,
    seed: int,
    root: Path,
    columns: Mapping[str, str] | None = None,
    renamed: Mapping[str, str] = MappingProxyType({}),
) -> RawTask:
    """Open a data set of the hub, or a local folder, as a task; `datasets` downloads it to its own cache once.

    Args:
        place: `OWNER/NAME[#CONFIG][@REVISION]`, or a local folder.
        renamed: as `load_splits` takes it.
    """
    parts, ignored = load_splits(*parse_place(place, root), renamed)
    tables = {  # with the metadata that name classes
        split: part.with_format("arrow")[:].replace_schema_metadata(part.features.arrow_schema.metadata)
        for split, part in parts.items()
    }
    return task_of(task, tables, {split: f"{place}, {split}" for split in tables}, seed, ignored, columns)


Chosen: TypeAlias = Mapping[str, str]  # names of columns by what they are: text, text_pair, label
Read: TypeAlias = Callable[[IO[bytes], Chosen], pa.Table]


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
    except (pa.ArrowInvalid, pa.ArrowIOError, pa.ArrowNotImplementedError, EOFError, zlib.error) as error:
        raise MergeflowError(
            f"{path} cannot be read: {str(error).splitlines()[0]}. Correct the file, or name it by its kind: parquet, "
            "jsonl, csv (with quotes), tsv (without)."
        ) from error
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise MergeflowError(f"{path}: two columns are called '{twice[0]}'; expected names that differ. Rename one.")
    return table


def class_labels(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the class names in label order of each column whose metadata declare them, as `datasets` writes them."""
    raw = (schema.metadata or {}).get(b"huggingface")
    features = (json.loads(raw).get("info") or {}).get("features") if raw else None
    declared = {key: value for key, value in (features or {}).items() if isinstance(value, dict)}
    return {key: [*map(str, value["names"])] for key, value in declared.items() if value.get("names")}


def _joined(split: str, tables: Sequence[pa.Table]) -> pa.Table:
    first, *others = (class_labels(table.schema) for table in tables)
    if other := next((names for names in others if names != first), None):
        raise MergeflowError(
            f"the parts of {split} number their classes differently ({first} and {other}): write them again together."
        )
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


def without_test(
    tables: Mapping[str, pa.Table], where: Mapping[str, str], ignored: Sequence[str], secret: str
) -> tuple[dict[str, pa.Table], dict[str, str], list[str]]:
    """Return tables, places and ignored splits without a test split whose labels, or answers, are `secret`."""
    remaining, named, test_note = dict(tables), dict(where), f"test (its {secret} are secret)"
    del remaining["test"]
    if "validation" in remaining:
        remaining["test"], named["test"] = remaining.pop("validation"), named["validation"]
        test_note += ", for which validation stands"
    return remaining, named, [*ignored, test_note]
