"""Study `mima`: on a small laboratory, and the paper's findings on the documented result."""

from pathlib import Path

import pytest

from tasks.studies.inputs import StudyInputs
from tasks.studies.papers.mima import study as mima
from tasks.studies.pieces import Row, grid, kept
from tasks.studies.results import StudyResult
from tests.studies.documented import documented
from tests.studies.small_lab import study_io


@pytest.fixture(scope="module")
def result(lab: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    io = study_io(lab, "mima", tmp_path_factory.mktemp("mima"), rounds=[1, 2])
    mima.run(io)
    folder = io.scratch / "building/outputs/studies/mima"
    assert {path.name for path in folder.glob("*.svg")} == {"accuracy.svg", "gap.svg", "tasks.svg"}
    return StudyResult.read(folder)


def test_the_study_covers_every_n_task_and_method(result: StudyResult) -> None:
    accuracy, fixed, scales, experts, merged = result.tables
    assert [row["N"] for row in accuracy.rows] == [row["N"] for row in scales.rows] == [1, 2]
    assert {"average", "task arithmetic", "TIES"} <= accuracy.rows[0].keys()
    assert {"task_arithmetic λ=0.4", "ties λ=1"} <= fixed.rows[0].keys()
    assert [row["task"] for row in experts.rows] == [row["task"] for row in merged.rows] == ["red", "blue", "grey"]
    assert {finding.system for finding in result.findings} == {"M2", "M4", "M6"}


def test_the_average_of_the_last_round_is_the_run_s_own_merge(lab: Path, tmp_path: Path) -> None:
    io = study_io(lab, "mima", tmp_path)
    inputs = StudyInputs(io)
    row = mima.measure(inputs, 2, 0, 0.2)
    assert row["average"] == inputs.accuracy(inputs.run("mima_2").merged(0, 2), "test")
    assert row["experts"].keys() == {"red", "blue", "grey"}


def made_up(rounds: int, expert: float, merged: float, fixed: float) -> Row:
    tuned = {name: {"a": merged} for name in mima.TUNED}
    return {"rounds": rounds, "seed": 0, "experts": {"a": expert}, **tuned, mima.FIXED["task_arithmetic"]: {"a": fixed}}


def test_findings_follow_the_numbers() -> None:
    rows = [made_up(1, 0.97, 0.7, 0.8), made_up(16, 0.96, 0.95, 0.6)]
    rows[0]["ties"] = {"a": 0.9}
    assert all(finding.holds for finding in mima.findings(rows))
    worse = [made_up(1, 0.97, 0.9, 0.6), made_up(16, 0.9, 0.8, 0.8)]
    assert not any(finding.holds for finding in mima.findings(worse))


def test_findings_of_the_paper() -> None:
    held = documented("mima")
    for claim in ("rises with N", "at most 2 points", "methods converge", "fixed at 0.4 degrades"):
        assert held(claim)


def test_a_kept_piece_is_measured_once(lab: Path, tmp_path: Path) -> None:
    io, calls = study_io(lab, "mima", tmp_path), iter((1, 2))
    assert [kept(io, "piece", lambda: {"call": next(calls)}) for _ in range(2)] == [{"call": 1}] * 2


def test_grid_is_the_paper_s() -> None:
    assert len(grid(0, 1, 0.05)) == len(grid(0.8, 1.8, 0.05)) == 21
    assert grid(0.8, 1.8, 0.05)[-1] == 1.8
