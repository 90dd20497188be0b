"""Study `alignment`: on a small laboratory, and the paper's findings on the documented result."""

from pathlib import Path
from typing import Any

import pytest

from tasks.studies.inputs import StudyInputs
from tasks.studies.papers.alignment import study as alignment
from tasks.studies.results import StudyResult
from tests.studies.documented import documented
from tests.studies.small_lab import study_io


def test_the_study_shows_runs_rounds_and_lengths(lab: Path, tmp_path: Path) -> None:
    io = study_io(lab, "alignment", tmp_path, rounds=[1, 2], shown=[2], compared=["atm_4"])
    alignment.run(io)
    folder = tmp_path / "building/outputs/studies/alignment"
    lengths, rounds = StudyResult.read(folder).tables
    assert [row["run"] for row in lengths.rows] == ["mima_1", "mima_2", "atm_4"]
    assert [row["round"] for row in rounds.rows] == [1, 2, 1, 2, 3, 4]
    assert {path.stem for path in folder.glob("*.svg")} == {"final", "rounds", "matrix"}


def test_a_first_round_has_the_same_increments_and_task_vectors(lab: Path, tmp_path: Path) -> None:
    inputs = StudyInputs(study_io(lab, "alignment", tmp_path))
    row = alignment.measure(inputs, "mima_2", 0)
    assert row["tau"][0] == row["delta"][0]
    assert alignment.pairs(row["tau"][1]) != pytest.approx(alignment.pairs(row["delta"][1]), abs=1e-3)
    once = alignment.measure(inputs, "mima_1", 0)
    assert (once["shared"], once["towards"]) == (0.0, 0.0)


def made_up(run: str, tau: list[float], delta: float) -> dict[str, Any]:
    def matrix(cosine: float) -> list[list[float]]:
        return [[1.0, cosine], [cosine, 1.0]]

    return {
        "run": run,
        "seed": 0,
        "steps": list(range(len(tau))),
        "tau": [matrix(cosine) for cosine in tau],
        "delta": [matrix(delta) for _ in tau],
        "shared": 1.0,
        "increment": 0.5,
        "towards": 0.0,
    }


def test_findings_follow_the_numbers() -> None:
    good = [made_up("mima_1", [0.0], 0.0), made_up("mima_16", [0.0, 0.5, 0.9], 0.1)]
    assert all(finding.holds for finding in alignment.findings(good))
    bad = [made_up("mima_1", [0.9], 0.0), made_up("mima_16", [0.4, 0.3, 0.2], 0.4)]
    assert not any(finding.holds for finding in alignment.findings(bad))


def test_findings_of_the_paper() -> None:
    held = documented("alignment")
    for claim in ("above 0.8", "under 0.3", "from round to round"):
        assert held(claim)
