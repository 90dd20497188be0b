"""The committed results of the full studies; the docs are written from them."""

from functools import cache
from pathlib import Path

import pyarrow.parquet as pq

from flows.study_commands import find_studies
from tasks.studies.judging.pieces import measured
from tasks.studies.papers.cost.study import label
from tasks.studies.results import StudyResult
from tasks.studies.rows import Row
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


def cost_pieces() -> list[Row]:
    """Return the pieces of the study `cost`, as far as its rows tell them.

    They have accuracy on test alone; which one-shot merge is the best on validation is read from the recorded finding.
    """
    (told,) = [one.measured for one in read_documented("cost").findings if "best one-shot merge" in one.claim]
    best = told.partition(": ")[0]
    return [
        {**piece, "validation": float(best.endswith(f" less {label(piece['run'])}"))}
        for piece in measured(documented_rows("cost"), "run", "seed", "budget", "rounds", "tried")
    ]
