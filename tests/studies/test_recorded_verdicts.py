"""The recorded findings are what the studies' rules make of the recorded rows.

A sign, a margin or a pairing that is changed in a rule changes a verdict or what it says of the measured values here.
"""

from dataclasses import replace

import pytest

from mergeflow.errors import MergeflowError
from tasks.studies.judging.rules import RULES, judge_rows
from tasks.studies.papers.cost import study as cost
from tasks.studies.results import Finding
from tests.studies.documented import cost_pieces, documented_rows, projects, read_documented


@pytest.mark.parametrize("study", RULES)
def test_the_rules_make_the_recorded_findings_of_the_recorded_rows(study: str) -> None:
    found = judge_rows(projects()[study], study, documented_rows(study))
    assert found == read_documented(study).findings


def test_the_rules_of_cost_make_what_its_rows_tell() -> None:
    """Its rows have accuracy on test alone, and validation tells which one-shot merge is the best: the recorded one."""
    found = cost.findings(cost_pieces())
    assert [beginning(one) for one in found] == [beginning(one) for one in read_documented("cost").findings]


def beginning(finding: Finding) -> Finding:
    return replace(finding, measured=finding.measured.partition(";")[0])


def test_a_study_whose_rows_do_not_tell_all_is_refused() -> None:
    with pytest.raises(MergeflowError, match=r"study cost cannot be judged from its rows.*mergeflow study cost"):
        judge_rows(projects()["cost"], "cost", [])
