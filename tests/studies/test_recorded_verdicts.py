"""The recorded findings are what the studies' rules make of the recorded rows.

A sign, a margin or a pairing that is changed in a rule changes a verdict or what it says of the measured values here.
"""

from pathlib import Path

import pytest

from flows.lockfile import locked_stages
from mergeflow.errors import MergeflowError
from tasks.project.graph import load_graph
from tasks.project.stage import STUDIES
from tasks.studies.judging.notes import NOTES
from tasks.studies.judging.rules import RULES, judge_rows, notes_of
from tests.studies.documented import documented_rows, projects, read_documented


@pytest.mark.parametrize("study", RULES)
def test_the_rules_make_the_recorded_findings_of_the_recorded_rows(study: str) -> None:
    found = judge_rows(projects()[study], study, documented_rows(study))
    assert found == read_documented(study).findings


@pytest.mark.parametrize("study", NOTES)
def test_what_decides_a_recorded_finding_is_told_from_the_recorded_rows(study: str) -> None:
    assert notes_of(projects()[study], study, documented_rows(study)) == read_documented(study).notes


def test_every_study_can_be_judged_from_its_rows() -> None:
    assert set(RULES) == set(projects())


@pytest.mark.parametrize("root", sorted(set(projects().values())), ids=lambda root: root.name)
def test_what_is_recorded_is_of_stages_that_there_are(root: Path) -> None:
    addresses = set(load_graph(root, studies=True))
    assert {f"{STUDIES}:{name}" for name in locked_stages(root, STUDIES)} <= addresses


def test_a_study_of_somebody_s_own_is_refused() -> None:
    with pytest.raises(MergeflowError, match=r"study own cannot be judged from its rows.*mergeflow study own"):
        judge_rows(projects()["cost"], "own", [])
