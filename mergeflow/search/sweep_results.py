"""What a sweep found, and the files that it leaves: one Parquet row per trial, and the winner as a recipe."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergeflow.checkpoints import write_text
from mergeflow.evaluation.scoring import Score
from mergeflow.merging import Recipe
from mergeflow.merging.files.recipe_text import recipe_text
from mergeflow.search.sweep_file import Sweep


@dataclass(frozen=True)
class Trial:
    """One candidate and its score.

    Attributes:
        number: From 0, in the order of the sweep.
        method: A name of the catalog.
        args: All arguments with their defaults.
        varied: Those that the sweep names.
        score: On validation.
        objective: What the sweep maximises.
        edges: Arguments that stand at an end of what was tried.
    """

    number: int
    method: str
    args: dict[str, Any]
    varied: dict[str, Any]
    score: Score
    objective: float
    edges: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """Return the trial as plain values, for a table or a tracking server."""
        kept = {"trial": self.number, "method": self.method, "args": self.args, "accuracy": self.score.accuracy}
        return {**kept, "mean": self.score.mean, "normalised": self.score.normalised, "objective": self.objective}


@dataclass(frozen=True)
class SweepResult:
    """What a sweep found.

    Attributes:
        sweep: What was asked.
        folder: Where trials.jsonl, trials.parquet and winner.yaml are.
        trials: In the order of the sweep.
        winner: The trial with the highest objective, the first of equals.
        recipe: The winner, as `mergeflow merge` takes it.
        base: The base itself on all tasks (zero-shot).
        individual: Each task's expert on its own task; missing where a task has none, or where nothing asks for it.
        test: The winner on test, where the sweep asks for that one look.
        scored: How many models were scored now; the others were known from an earlier run.
        prepared: How many directions were computed.
        seconds: Wall time.
    """

    sweep: Sweep
    folder: Path
    trials: tuple[Trial, ...]
    winner: Trial
    recipe: Recipe
    base: Score
    individual: dict[str, float] | None
    test: Score | None
    scored: int
    prepared: int
    seconds: float

    def rows(self) -> list[dict[str, Any]]:
        """Return all trials as plain values."""
        return [trial.row() for trial in self.trials]


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]], references: Mapping[str, Any], prefix: str) -> None:
    """Write trials as Parquet: trial, method, args (JSON), accuracy.<task> ..., mean, normalised, objective.

    The columns of tasks are score.<task> where a scorer of the user's gave them.

    Args:
        path: The file; it appears whole.
        rows: From `Trial.row`.
        references: Accuracies of base and experts, stored as JSON in the file's metadata.
        prefix: Of the tasks' columns: accuracy or score.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {
        "trial": pa.array([row["trial"] for row in rows], pa.int64()),
        "method": pa.array([row["method"] for row in rows], pa.string()),
        "args": pa.array([json.dumps(row["args"], sort_keys=True) for row in rows], pa.string()),
    }
    for task in rows[0]["accuracy"]:
        columns[f"{prefix}.{task}"] = pa.array([row["accuracy"][task] for row in rows], pa.float64())
    for name in ("mean", "normalised", "objective"):
        columns[name] = pa.array([row[name] for row in rows], pa.float64())
    table = pa.table(columns).replace_schema_metadata({"mergeflow.references": json.dumps(dict(references))})
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table, scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def write_winner(path: Path, found: SweepResult) -> None:
    """Write the winner's recipe, complete with every default, as `mergeflow merge` takes it."""
    images = found.sweep.score is None
    head = f"# Winner of a sweep, on {found.sweep.split}: {_summary(found.winner.score, images)}.\n"
    if found.test is not None:
        head += f"# On test, looked at once: {_summary(found.test, images)}.\n"
    write_text(path, head + recipe_text(found.recipe))


def _summary(score: Score, images: bool) -> str:
    normalised = "" if score.normalised is None else f", normalised {100 * score.normalised:.2f} %"
    mean = f"mean accuracy {100 * score.mean:.2f} %" if images else f"mean score {score.mean:.6g}"
    return mean + normalised
