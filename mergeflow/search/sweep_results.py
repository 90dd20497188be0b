"""The files a sweep leaves: one Parquet row per trial, and the winner as a recipe."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mergeflow.checkpoints import write_text
from mergeflow.merging import Recipe


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], references: Mapping[str, Any]) -> None:
    """Write trials as Parquet: trial, method, args (JSON), accuracy.<task> ..., mean, normalised, objective.

    Args:
        path: The file; it appears whole.
        rows: From `Trial.row`.
        references: Accuracies of base and experts, stored as JSON in the file's metadata.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {
        "trial": pa.array([row["trial"] for row in rows], pa.int64()),
        "method": pa.array([row["method"] for row in rows], pa.string()),
        "args": pa.array([json.dumps(row["args"], sort_keys=True) for row in rows], pa.string()),
    }
    for task in rows[0]["accuracy"]:
        columns[f"accuracy.{task}"] = pa.array([row["accuracy"][task] for row in rows], pa.float64())
    for name in ("mean", "normalised", "objective"):
        columns[name] = pa.array([row[name] for row in rows], pa.float64())
    table = pa.table(columns).replace_schema_metadata({"mergeflow.references": json.dumps(dict(references))})
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_winner(path: Path, recipe: Recipe, row: Mapping[str, Any], split: str) -> None:
    """Write the winner's recipe, complete with every default, as `mergeflow merge` takes it."""
    normalised = "" if row["normalised"] is None else f", normalised {100 * row['normalised']:.2f} %"
    head = f"# Winner of a sweep, on {split}: mean accuracy {100 * row['mean']:.2f} %{normalised}.\n"
    write_text(path, head + recipe_text(recipe))


def recipe_text(recipe: Recipe) -> str:
    """Return a recipe as YAML."""
    values = {key: value for key, value in recipe.model_dump(mode="json", exclude_none=True).items() if value != {}}
    if recipe.data:
        values["data"] = {kind: dict(paths) for kind, paths in recipe.data}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
