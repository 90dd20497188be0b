"""The committed results of the full studies; the docs are written from them."""

from tasks.studies.results import StudyResult
from tests.studies.small_lab import ROOT

RESULTS = ROOT / "docs" / "studies" / "results"


def read_documented(study: str) -> StudyResult:
    """Return a study's committed result."""
    return StudyResult.parse((RESULTS / f"{study}.json").read_text())
