"""Every record: its rows give the verdicts of the papers' pages by today's claims, and tables and figures are made."""

import json
from functools import cache
from pathlib import Path

import pytest

from mergeflow.errors import MergeflowError
from studies.commands.study import find_studies
from studies.lab import pages
from studies.lab.claims import Finding
from studies.lab.pages import CHANGES, study_page, write_pages
from studies.lab.records import changes, find_record, recorded, write_record
from studies.lab.study import Result
from tasks.project.stage import RECORDS
from tests.studies.small_lab import ROOT

STUDIES = find_studies(ROOT)
OTHERS = {"mima": ["alignment"], "rank_curve": ["many_tasks"]}  # what their joined figures read
NAMES = sorted(path.stem for path in (ROOT / RECORDS).glob("*.parquet"))


@cache
def result_of(name: str) -> Result:
    return recorded(ROOT, STUDIES[name])


@pytest.fixture(scope="module")
def findings() -> dict[str, list[Finding]]:
    return {name: result_of(name).findings for name in STUDIES}


@pytest.mark.parametrize("name", NAMES)
def test_a_record_has_tables_and_a_page_with_all_its_findings(name: str) -> None:
    result = result_of(name)
    assert result.tables
    assert study_page(*STUDIES[name].text, name, {name: result}).count("*Rule:*") == len(result.findings) > 0


@pytest.mark.parametrize(
    "name", [name if name == "mima" else pytest.param(name, marks=pytest.mark.nightly) for name in NAMES]
)
def test_a_record_has_figures(name: str) -> None:
    figures = result_of(name).draw({other: result_of(other) for other in OTHERS.get(name, [])})
    assert all(svg.startswith(b"<?xml") for svg in figures.values())
    assert len(figures) > len(result_of(name).figures()) or name not in OTHERS


def test_the_same_sentence_has_one_rule_and_one_owner(findings: dict[str, list[Finding]]) -> None:
    rules: dict[tuple[str, str], set[str]] = {}
    for finding in (finding for listed in findings.values() for finding in listed if not finding.ours):
        assert finding.rule
        rules.setdefault((finding.system, finding.claim), set()).add(finding.rule)
    assert {claim: claimed for claim, claimed in rules.items() if len(claimed) > 1} == {}


def test_every_change_of_a_verdict_is_of_a_finding(findings: dict[str, list[Finding]]) -> None:
    verdicts = {
        (name, finding.claim, finding.setting): finding.verdict
        for name, listed in findings.items()
        for finding in listed
    }
    for change in json.loads((ROOT / CHANGES).read_text()):
        assert change["why"].strip()
        for study, claim, setting, was in change["claims"]:
            assert verdicts[study, claim, setting] != was


def test_every_study_has_a_record() -> None:
    assert {study.stage.name for study in STUDIES.values()} == set(NAMES)


def test_the_papers_pages_are_what_the_records_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "recorded", lambda home, study: result_of(study.stage.name))  # judged once a file
    (tmp_path / RECORDS).parent.mkdir()
    (tmp_path / RECORDS).symlink_to(ROOT / RECORDS)
    for page in write_pages(tmp_path, STUDIES.values()):
        assert page.read_text() == (ROOT / "docs/research" / page.name).read_text(), "run `mergeflow study --pages`"


def test_what_differs_from_a_record_is_named() -> None:
    differences = changes(ROOT, STUDIES["mima"])
    assert not [line for line in differences if line.startswith(("params.yaml", "studies/params.yaml"))]
    with pytest.raises(MergeflowError, match=r"study mima has no record .*--record"):
        find_record(ROOT / "docs", "mima")


def test_rows_without_the_facts_of_their_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / RECORDS).mkdir(parents=True)
    (tmp_path / RECORDS / "mima.parquet").touch()
    with pytest.raises(MergeflowError, match=r"mima.json is missing.*restore it"):
        find_record(tmp_path, "mima")


def test_a_study_that_has_not_run_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match="mima has no rows"):
        write_record(tmp_path, STUDIES["mima"])
    assert not (tmp_path / RECORDS / "mima.json").exists()


def test_rows_decide_a_verdict() -> None:
    """With a worse average at N = 20 in one seed a claim that held is undecided: no finding is stored."""
    whole = result_of("mima")
    changed = (whole.rows.seed == 0) & (whole.rows.model == "average") & (whole.rows["rounds"] == 20)
    worse = whole.rows.assign(accuracy=whole.rows.accuracy.mask(changed, whole.rows.accuracy - 20))
    again = Result(whole.study, whole.options, worse)
    assert [finding.holds for finding in again.findings] != [finding.holds for finding in whole.findings]
