"""The committed rows of the studies' records."""

from typing import Any

import pyarrow.parquet as pq

from studies.lab.records import FOLDER
from tests.studies.small_lab import ROOT


def documented_rows(study: str) -> list[dict[str, Any]]:
    """Return a study's committed rows."""
    rows: list[dict[str, Any]] = pq.read_table(ROOT / FOLDER / f"{study}.parquet").to_pylist()
    return rows
