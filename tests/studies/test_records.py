"""Every record: its rows give the published verdicts by today's claims, and tables, figures and pages are made of them.

`frozen_findings.json` has the 619 findings that were published with the records, before studies were single files.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mergeflow.errors import MergeflowError
from studies.commands.study import find_studies
from studies.lab.pages import study_page, write_pages
from studies.lab.records import FOLDER, changes, find_record, recorded, write_record
from studies.lab.study import Result
from tests.studies.small_lab import ROOT

STUDIES = find_studies(ROOT)
FROZEN: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "frozen_findings.json").read_text())
RECORDS = sorted(path.stem for path in (ROOT / FOLDER).glob("*.parquet"))
NUMBER = re.compile(r"(-?\d+\.\d+) ± (\d+\.\d+)")


def intervals(text: str) -> list[tuple[float, float]]:
    """Return the numbers with intervals that a text prints, sorted: parts may be named in another order."""
    return sorted((float(centre), float(half)) for centre, half in NUMBER.findall(text))


def last_digit(text: str) -> float:
    """Return one and a half units of the last digit of the coarsest number in a text: rounding may tie."""
    return 1.5 * 10.0 ** -min((len(digits) for digits in re.findall(r"\d\.(\d+)", text)), default=0)


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_gives_the_published_verdicts_and_draws(name: str) -> None:
    result = recorded(ROOT, STUDIES[name])
    published = [(one["system"], one["claim"], one["holds"]) for one in FROZEN[name]]
    assert [(one.system, one.claim, one.holds) for one in result.findings] == published
    for finding, then in zip(result.findings, FROZEN[name], strict=True):
        assert finding.rule
        ours, digit = intervals(finding.measured), last_digit(then["measured"])
        for theirs in intervals(then["measured"]):
            assert any(numbers == pytest.approx(theirs, abs=digit) for numbers in ours), finding.claim
    assert result.tables
    assert all(svg.startswith(b"<?xml") for svg in result.draw().values())
    assert study_page(*STUDIES[name].text, name, result).count("*Rule:*") == len(published)


def test_every_study_has_a_record() -> None:
    assert {study.stage.name for study in STUDIES.values()} == set(RECORDS) == set(FROZEN)
    assert sum(map(len, FROZEN.values())) == 619


def test_the_papers_pages_are_what_the_records_give(tmp_path: Path) -> None:
    (tmp_path / FOLDER).parent.mkdir()
    (tmp_path / FOLDER).symlink_to(ROOT / FOLDER)
    for page in write_pages(tmp_path, STUDIES.values()):
        assert page.read_text() == (ROOT / "docs/research" / page.name).read_text(), "run `mergeflow study --pages`"


def test_what_differs_from_a_record_is_named() -> None:
    differences = changes(ROOT, STUDIES["mima"])
    assert not [line for line in differences if line.startswith(("params.yaml", "studies/params.yaml"))]
    with pytest.raises(MergeflowError, match=r"study mima has no record .*--record"):
        find_record(ROOT / "docs", "mima")


def test_a_study_that_has_not_run_leaves_no_record(tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match="mima has no rows"):
        write_record(tmp_path, STUDIES["mima"])
    assert not (tmp_path / FOLDER / "mima.json").exists()


def test_rows_decide_a_verdict() -> None:
    """With a worse average at N = 20 in one seed a claim that held is undecided: no finding is stored."""
    whole = recorded(ROOT, STUDIES["mima"])
    changed = (whole.rows.seed == 0) & (whole.rows.model == "average") & (whole.rows["rounds"] == 20)
    worse = whole.rows.assign(accuracy=whole.rows.accuracy.mask(changed, whole.rows.accuracy - 20))
    again = Result(whole.study, whole.options, worse)
    assert [one.holds for one in again.findings] != [one.holds for one in whole.findings]
