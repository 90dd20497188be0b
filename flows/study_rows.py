"""`mergeflow study NAME --rows FILE`: hand over a study's raw rows; nothing runs."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mergeflow.errors import MergeflowError

if TYPE_CHECKING:
    from pyarrow import Table

    from tasks.project.studies import Study


def check_rows_file(path: Path, studies: Sequence["Study"]) -> None:
    """Refuse a file that `--rows` cannot write.

    Args:
        path: the file.
        studies: whose rows are asked for.

    Raises:
        MergeflowError: none or several studies, an unknown ending, a file that exists, a folder that does not or where
            nothing may be written.
    """
    if len(studies) != 1:
        found = ", ".join(study.stage.name for study in studies) or "none"
        raise MergeflowError(f"`--rows` takes one study, found {found}: mergeflow study NAME --rows FILE.csv")
    if path.suffix not in {".csv", ".parquet"}:
        raise MergeflowError(f"--rows {path}: rows are written as .csv or .parquet. Name such a file.")
    if path.exists() or not path.parent.is_dir():
        found = "the file exists already" if path.exists() else f"there is no folder {path.parent}"
        raise MergeflowError(f"--rows {path}: {found}. Name a new file in an existing folder.")
    if not os.access(path.parent, os.W_OK):
        raise MergeflowError(f"--rows {path}: nothing may be written in {path.parent}. Name a file in another folder.")


def write_rows(study: "Study", home: Path, path: Path) -> None:
    """Write the raw rows of a study's last run here, or else of its record, one per seed, task and setting.

    In a .csv a list is a cell of JSON.

    Args:
        study: whose rows.
        home: the folder whose docs may have its record.
        path: a new file, .csv or .parquet.

    Raises:
        MergeflowError: there is neither, or the study keeps no rows.
    """
    from pyarrow import csv, parquet

    from tasks.studies.results import ROWS

    name, ran = study.stage.name, (study.folder / "result.json").exists()
    kept = study.folder / ROWS if ran else home / f"docs/studies/results/{name}.parquet"
    if not kept.exists() and ran:
        raise MergeflowError(f"study {name} keeps no raw rows; its tables are in {study.folder}/result.json.")
    if not kept.exists():
        raise MergeflowError(f"study {name} has not run here and has no record: run it, mergeflow study {name}")
    table = parquet.read_table(kept)
    making = path.with_name(f".{path.name}.new{os.getpid()}")
    try:
        csv.write_csv(_in_cells(table), making) if path.suffix == ".csv" else parquet.write_table(table, making)
        making.replace(path)
    finally:
        making.unlink(missing_ok=True)
    source = "the last run" if ran else "the record in docs/studies"
    typer.echo(f"Wrote {table.num_rows} rows of {source} to {path}.")


def _in_cells(table: "Table") -> "Table":
    """Return a table whose lists and records are texts of JSON."""
    from pyarrow import array, string, types

    for place, field in enumerate(table.schema):
        if types.is_nested(field.type):
            texts = [None if value is None else json.dumps(value) for value in table.column(place).to_pylist()]
            table = table.set_column(place, field.name, array(texts, string()))
    return table
