"""The recorded findings are what the studies' rules make of the recorded rows.

A sign, a margin or a pairing that is changed in a rule changes a verdict or what it says of the measured values here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pyarrow.parquet as pq
import pytest

from tasks.studies.papers.adviser import results as adviser
from tasks.studies.papers.adviser_suites import results as adviser_suites
from tasks.studies.papers.analogy import results as analogy
from tasks.studies.papers.coloured_digits import results as coloured_digits
from tasks.studies.papers.language_arithmetic import results as language_arithmetic
from tasks.studies.papers.linearity_controls import results as linearity_controls
from tasks.studies.papers.linearity_edits import study as linearity_edits
from tasks.studies.papers.linearity_matching import results as linearity_matching
from tasks.studies.papers.linearity_stitches import study as linearity_stitches
from tasks.studies.papers.linearity_why import study as linearity_why
from tasks.studies.papers.mergeability import results as mergeability
from tasks.studies.papers.sentence_arithmetic import results as sentence_arithmetic
from tasks.studies.papers.structure import results as structure
from tasks.studies.papers.unlearning import results as unlearning
from tasks.studies.papers.unseen_tasks import results as unseen_tasks
from tasks.studies.results import Finding
from tasks.studies.rows import Row, picked
from tests.studies.documented import RESULTS, read_documented
from tests.studies.rejudging import PARTLY
from tests.studies.rejudging import RULES as RULES_OF_MERGING
from tests.studies.rejudging_cart import RULES as RULES_OF_CART
from tests.studies.rejudging_pieces import choices

Rule = Callable[[Sequence[Row]], list[Finding]]


def of_adviser(rows: Sequence[Row]) -> list[Finding]:
    return adviser.findings(*(picked(rows, part=part) for part in ("sets", "edits")))


def of_controls(rows: Sequence[Row]) -> list[Finding]:
    labels = [row for row in rows if "labels" in row["combination"]]
    return linearity_controls.findings({"matching": [row for row in rows if row not in labels], "labels": labels})


def of_edits(rows: Sequence[Row]) -> list[Finding]:
    options = choices("linearity_edits")
    return linearity_edits.findings(list(rows), options.scale, options.scales)


def of_mergeability(rows: Sequence[Row]) -> list[Finding]:
    options = choices("mergeability")
    return mergeability.findings(rows, options.runs, options.iterative)


def of_unlearning(rows: Sequence[Row]) -> list[Finding]:
    return unlearning.study_result(rows, choices("unlearning")).findings


RULES: dict[str, Any] = {
    **RULES_OF_MERGING,
    **RULES_OF_CART,
    "adviser": of_adviser,
    "adviser_regimes": adviser_suites.findings,
    "adviser_suites": adviser_suites.findings,
    "analogy": analogy.findings,
    "coloured_clip": coloured_digits.findings,
    "coloured_clip_head": coloured_digits.findings,
    "coloured_digits": coloured_digits.findings,
    "language_arithmetic": lambda rows: language_arithmetic.study_result(rows).findings,
    "linearity_controls": of_controls,
    "linearity_edits": of_edits,
    "linearity_matching": linearity_matching.findings,
    "linearity_stitches": linearity_stitches.findings,
    "linearity_why": linearity_why.findings,
    "mergeability": of_mergeability,
    "sentence_arithmetic": lambda rows: sentence_arithmetic.study_result(rows).findings,
    "structure": structure.findings,
    "structure_suite": structure.findings,
    "unlearning": of_unlearning,
    "unseen_tasks": unseen_tasks.findings,
}


@pytest.mark.parametrize("study", RULES)
def test_the_rules_make_the_recorded_findings_of_the_recorded_rows(study: str) -> None:
    rule: Rule = RULES[study]
    found = rule(pq.read_table(RESULTS / f"{study}.parquet").to_pylist())
    assert [told(study, one) for one in found] == [told(study, one) for one in read_documented(study).findings]


def told(study: str, finding: Finding) -> Finding:
    """Return what is compared of a finding: without what is said beside its measured values where no row tells that."""
    if finding.claim not in PARTLY.get(study, {}):
        return finding
    return replace(finding, measured=finding.measured.partition(";")[0])


def test_what_is_compared_in_part_is_a_recorded_claim_with_a_reason() -> None:
    for study, claims in PARTLY.items():
        assert claims.keys() <= {one.claim for one in read_documented(study).findings}
        assert study in RULES
        assert all(claims.values())
