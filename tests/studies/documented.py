"""The committed rows of the studies' records."""

from typing import Any

import pyarrow.parquet as pq

from tasks.project.stage import RECORDS
from tests.studies.small_lab import ROOT


def documented_rows(study: str) -> list[dict[str, Any]]:
    """Return a study's committed rows."""
    rows: list[dict[str, Any]] = pq.read_table(ROOT / RECORDS / f"{study}.parquet").to_pylist()
    return rows
