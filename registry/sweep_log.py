"""A finished sweep in MLflow: one run, and a run below it for each trial; no weights."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from registry.logging import log_pipeline
from registry.records import ChildRecord, PipelineRecord
from registry.store import Store

_FIGURES = ("objective", "mean", "normalised")


def log_sweep(store: Store, name: str, rows: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Log the trials of a sweep, once.

    Args:
        store: the open registry.
        name: what the sweep is called.
        rows: one mapping per trial: `trial` (its number), `method`, `args`, `accuracy` per task and figures by name.
        folder: where trials.parquet and winner.yaml are; both become artifacts.

    Returns:
        The id of the sweep's run.
    """
    plain = json.dumps(list(rows), sort_keys=True, default=str)
    best = max(rows, key=lambda row: row["objective"])
    record = PipelineRecord(
        name=f"sweep {name}",
        fingerprint=hashlib.sha256(plain.encode()).hexdigest(),
        params={"trials": len(rows), "winner": best["method"]},
        metrics={f"validation/{key}": float(best[key]) for key in _FIGURES if best.get(key) is not None},
        artifacts={"": tuple(str(folder / file) for file in ("trials.parquet", "winner.yaml"))},
    )
    return log_pipeline(store, record, [_trial(row) for row in rows]).run_id


def _trial(row: Mapping[str, Any]) -> ChildRecord:
    figures = {key: float(row[key]) for key in _FIGURES if row.get(key) is not None}
    figures |= {f"accuracy/{task}": float(value) for task, value in row["accuracy"].items()}
    return ChildRecord(
        kind="trial",
        name=f"{row['trial']:04d}",
        params={"method": row["method"], "args": json.dumps(row["args"], sort_keys=True, default=str)},
        metrics={f"validation/{key}": value for key, value in figures.items()},
    )
