"""Study `one_epoch` on small nets, and its verdicts on made-up rows."""

from pathlib import Path
from statistics import fmean

from tasks.studies.papers.one_epoch import study as one_epoch
from tasks.studies.results import StudyResult
from tasks.studies.rows import Row
from tests.studies.small_lab import run_study
from tests.studies.toy_lab import NAMES, SEEDS


def test_small_nets_show_what_the_paper_shows(toy_lab: Path, tmp_path: Path) -> None:
    """G5, G9: one epoch is nearly enough for merging; experts go on getting better, their merge does not as much."""
    folder = run_study(toy_lab, "one_epoch", tmp_path, epochs=[1, 2, 3], further={"one_epoch": "mima_1"})
    result = StudyResult.read(folder)
    tasks, curve, pairs = result.tables
    assert [row["task"] for row in tasks.rows] == [*NAMES, "mean"]
    assert [row["trained"] for row in curve.rows][1:] == [f"epoch {number} of 3" for number in (1, 2, 3)]
    assert [row["steps"] for row in curve.rows] == [38, 38, 76, 114]
    assert [row["steps of one epoch"] for row in pairs.rows] == [38]
    assert all(str(row["λ"]).count(",") == len(SEEDS) - 1 for row in curve.rows)
    assert {path.stem for path in folder.glob("*.svg")} == {"tasks", "curve"}

    def mean(run: str, epoch: int | None, model: str) -> float:
        wanted = (run, epoch, model)
        return fmean(r["accuracy"] for r in result.rows if (r["run"], r["epoch"], r["model"]) == wanted)

    assert mean("converged", 3, "experts") > mean("converged", 1, "experts") + 2
    assert mean("one_epoch", None, "merged") > mean("converged", 3, "merged") - 5
    assert {row["seed"] for row in result.rows} == set(SEEDS)


def made_up(epoch: int | None, experts: float, merged: float) -> list[Row]:
    return [{"seed": n, "epoch": epoch, "experts": {"a": experts}, "merged": {"a": merged}} for n in range(3)]


def test_findings_follow_the_numbers() -> None:
    short = made_up(None, 0.9, 0.8)
    saturating = [*made_up(1, 0.9, 0.79), *made_up(2, 0.95, 0.82), *made_up(3, 0.97, 0.81)]
    found = one_epoch.findings({"one epoch": short, "converged": saturating[-3:]}, saturating)
    assert [finding.holds for finding in found] == [True, True]
    rising = [*made_up(1, 0.97, 0.5), *made_up(2, 0.95, 0.6), *made_up(3, 0.95, 0.9)]
    found = one_epoch.findings({"one epoch": short, "converged": rising[-3:]}, rising)
    assert [finding.holds for finding in found] == [False, False]
    assert [finding.ours for finding in found] == [False, True]
