"""The committed results of the full studies; the docs are written from them."""

import json
from collections.abc import Callable

import pytest

from tasks.studies.results import Finding, StudyResult, Table
from tests.studies.small_lab import ROOT

RESULTS = ROOT / "docs" / "studies" / "results"


def read_documented(study: str) -> StudyResult:
    """Return a study's committed result."""
    path = RESULTS / f"{study}.json"
    if not path.exists():
        pytest.skip(f"docs/studies/results/{study}.json is not there: mergeflow study {study} --document writes it")
    content = json.loads(path.read_text())
    return StudyResult(
        [Table(**one) for one in content["tables"]], [Finding(**one) for one in content["findings"]], content["notes"]
    )


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
        return finding.holds

    return holds
