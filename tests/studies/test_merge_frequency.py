"""Study `merge_frequency`: on a small laboratory, and the paper's finding on the documented result."""

from pathlib import Path

from tasks.studies.papers.merge_frequency import study as merge_frequency
from tasks.studies.pieces import Row
from tasks.studies.results import StudyResult
from tests.studies.documented import documented
from tests.studies.small_lab import study_io


def test_both_rules_over_n_and_over_steps(lab: Path, tmp_path: Path) -> None:
    merge_frequency.run(study_io(lab, "merge_frequency", tmp_path, atm=[1, 4], mima=[1, 2], course=["atm_4"]))
    folder = tmp_path / "building/outputs/studies/merge_frequency"
    final, course = StudyResult.read(folder).tables
    assert [(row["rule"], row["N"]) for row in final.rows] == [("ATM", 1), ("ATM", 4), ("MIMA", 1), ("MIMA", 2)]
    assert [row["steps between merges"] for row in final.rows] == [4, 1, 4, 2]
    assert [row["steps"] for row in course.rows] == [1, 2, 3, 4]
    assert (folder / "frequency.svg").exists()


def made_up(kind: str, rounds: int, accuracy: float) -> Row:
    return {"kind": kind, "rounds": rounds, "seed": 0, "steps": 4, "merged": {"a": accuracy}}


def test_findings_follow_the_numbers() -> None:
    rows = [made_up("ATM", 1, 0.8), made_up("ATM", 4, 0.9), made_up("MIMA", 1, 0.8), made_up("MIMA", 4, 0.7)]
    assert [finding.holds for finding in merge_frequency.findings(rows)] == [True, False]


def test_findings_of_the_paper() -> None:
    held = documented("merge_frequency")
    assert held("merged model: ATM")
    assert held("merged model: MIMA")
