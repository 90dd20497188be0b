"""Study `alignment` on small nets, and its verdicts on made-up rows."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tasks.studies.inputs import StudyInputs
from tasks.studies.papers.alignment import study as alignment
from tasks.studies.results import StudyResult
from tests.studies.small_lab import run_study, study_io


def test_small_nets_show_what_the_paper_shows(toy_lab: Path, tmp_path: Path) -> None:
    """M3: final task vectors align with N and from round to round, increments do not."""
    folder = run_study(toy_lab, "alignment", tmp_path, rounds=[1, 4, 16], shown=[4], compared=["per_round_2_4"])
    result = StudyResult.read(folder)
    lengths, rounds = result.tables
    assert [row["run"] for row in lengths.rows] == ["mima_1", "mima_4", "mima_16", "per_round_2_4"]
    assert [row["round"] for row in rounds.rows] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert {path.stem for path in folder.glob("*.svg")} == {"final", "rounds", "matrix"}

    def mean(what: str, run: str, number: int) -> float:
        return fmean(row[what] for row in result.rows if (row["run"], row["round"]) == (run, number))

    assert mean("tau", "mima_1", 1) < 0.3 < 0.9 < mean("tau", "mima_16", 16)
    assert mean("tau", "mima_4", 1) < mean("tau", "mima_4", 2) < mean("tau", "mima_4", 4)
    assert mean("delta", "mima_16", 8) < 0.5


def test_a_first_round_has_the_same_increments_and_task_vectors(toy_lab: Path, tmp_path: Path) -> None:
    inputs = StudyInputs(study_io(toy_lab, "alignment", tmp_path))
    row = alignment.measure(inputs, "mima_4", 0)
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
    def three(*rows: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**row, "seed": seed} for row in rows for seed in range(3)]

    good = three(made_up("mima_1", [0.0], 0.0), made_up("mima_16", [0.0, 0.5, 0.9], 0.1))
    assert all(finding.holds is True for finding in alignment.findings(good))
    bad = three(made_up("mima_1", [0.9], 0.4), made_up("mima_16", [0.4, 0.3, 0.2], 0.4))
    assert all(finding.holds is False for finding in alignment.findings(bad))
    opposed = three(made_up("mima_1", [0.0], 0.0), made_up("mima_16", [0.0, 0.5, 0.9], -0.4))
    assert [finding.holds for finding in alignment.findings(opposed)] == [True, True, False, True]
