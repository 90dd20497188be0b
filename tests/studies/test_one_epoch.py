"""Study `one_epoch`: on a small laboratory, and the paper's findings on the documented result."""

from pathlib import Path

from tasks.studies.papers.one_epoch import study as one_epoch
from tasks.studies.pieces import Row
from tasks.studies.results import StudyResult
from tests.studies.documented import documented, leading, read_documented
from tests.studies.small_lab import SEEDS, study_io


def test_the_study_compares_both_regimes_and_every_epoch(lab: Path, tmp_path: Path) -> None:
    one_epoch.run(study_io(lab, "one_epoch", tmp_path, epochs=[1, 2]))
    folder = tmp_path / "building/outputs/studies/one_epoch"
    tasks, curve = StudyResult.read(folder).tables
    assert [row["task"] for row in tasks.rows] == ["red", "blue", "grey", "mean"]
    assert [row["trained"] for row in curve.rows] == ["one epoch, own schedule", "epoch 1 of 2", "epoch 2 of 2"]
    assert [row["steps"] for row in curve.rows] == [2, 2, 4]
    assert all(str(row["λ"]).count(",") == len(SEEDS) - 1 for row in curve.rows)
    assert {path.stem for path in folder.glob("*.svg")} == {"tasks", "curve"}


def made_up(epoch: int | None, experts: float, merged: float) -> Row:
    return {"epoch": epoch, "experts": {"a": experts}, "merged": {"a": merged}}


def test_findings_follow_the_numbers() -> None:
    short = [made_up(None, 0.9, 0.8)]
    saturating = [made_up(1, 0.9, 0.79), made_up(2, 0.95, 0.82), made_up(3, 0.97, 0.81)]
    assert all(f.holds for f in one_epoch.findings({"one epoch": short, "converged": saturating[-1:]}, saturating))
    rising = [made_up(1, 0.97, 0.5), made_up(2, 0.95, 0.6), made_up(3, 0.95, 0.9)]
    assert not any(f.holds for f in one_epoch.findings({"one epoch": short, "converged": rising[-1:]}, rising))


def test_findings_of_the_paper() -> None:
    held = documented("one_epoch")
    assert held("after the first epoch")
    assert held("saturates or falls")
    short, *_, converged = (leading(row["merged"]) for row in read_documented("one_epoch").tables[1].rows)
    assert short > converged - 6
