"""The committed results of the full studies; the docs are written from them."""

from collections.abc import Callable

from tasks.studies.results import StudyResult
from tests.studies.small_lab import ROOT

RESULTS = ROOT / "docs" / "studies" / "results"


def read_documented(study: str) -> StudyResult:
    """Return a study's committed result."""
    return StudyResult.parse((RESULTS / f"{study}.json").read_text())


def leading(cell: object) -> float:
    """Return the number with which a table's cell begins.

    Example:
        >>> leading("92.0 ± 0.2")
        92.0
    """
    return float(str(cell).split()[0])


def documented(study: str) -> Callable[[str], bool]:
    """Return a function that says whether the one finding whose claim has these words holds."""
    findings = read_documented(study).findings

    def holds(words: str) -> bool:
        (finding,) = [one for one in findings if words in one.claim]
        return finding.holds is True

    return holds
