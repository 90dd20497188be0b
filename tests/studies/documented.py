"""The committed results of the full studies; the docs are written from them."""

from functools import cache
from pathlib import Path

import pyarrow.parquet as pq

from studies.commands.study import find_studies
from studies.old.results import StudyResult
from studies.old.rows import Row
from tests.studies.small_lab import ROOT

RESULTS = ROOT / "docs" / "studies" / "results"


def read_documented(study: str) -> StudyResult:
    """Return a study's committed result."""
    return StudyResult.parse((RESULTS / f"{study}.json").read_text())


def documented_rows(study: str) -> list[Row]:
    """Return a study's committed rows."""
    rows: list[Row] = pq.read_table(RESULTS / f"{study}.parquet").to_pylist()
    return rows


@cache
def projects() -> dict[str, Path]:
    """Return study → the project whose `studies/params.yaml` has its choices."""
    return {name: study.root for name, study in find_studies(ROOT).items()}
