"""Study `alignment` on small nets, and its verdicts on made-up rows."""

from pathlib import Path
from statistics import fmean

import pytest

from studies.lab.inputs import Laboratory
from studies.old.papers.alignment import study as alignment
from studies.old.papers.alignment.findings import findings
from studies.old.papers.alignment.pairs import pair_names, pairs
from studies.old.results import StudyResult
from studies.old.rows import Row, picked
from tests.studies.small_lab import run_study, study_io
from tests.studies.toy_lab import NAMES


def test_small_nets_show_what_the_paper_shows(toy_lab: Path, tmp_path: Path) -> None:
    """M3: final task vectors align with N and from round to round, increments do not."""
    folder = run_study(toy_lab, "alignment", tmp_path, rounds=[1, 4, 16], shown=[4], compared=["per_round_2_4"])
    result = StudyResult.read(folder)
    lengths, rounds = result.tables
    assert [row["run"] for row in lengths.rows] == ["mima_1", "mima_4", "mima_16", "per_round_2_4"]
    assert [row["round"] for row in rounds.rows] == [1, 2, 3, 4, 1, 2, 3, 4]
    assert {path.stem for path in folder.glob("*.svg")} == {"final", "rounds", "matrix"}

    def mean(what: str, run: str, number: int) -> float:
        return fmean(row[what] for row in picked(result.rows, part="pair", run=run, round=number))

    assert mean("tau", "mima_1", 1) < 0.3 < 0.9 < mean("tau", "mima_16", 16)
    assert mean("tau", "mima_4", 1) < mean("tau", "mima_4", 2) < mean("tau", "mima_4", 4)
    assert mean("delta", "mima_16", 8) < 0.5


def test_a_first_round_has_the_same_increments_and_task_vectors(toy_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(toy_lab, "alignment", tmp_path))
    row = alignment.measure(inputs, "mima_4", 0)
    assert row["tau"][0] == row["delta"][0]
    assert pairs(row["tau"][1]) != pytest.approx(pairs(row["delta"][1]), abs=1e-3)
    once = alignment.measure(inputs, "mima_1", 0)
    assert (once["shared"], once["towards"]) == (0.0, 0.0)


def made_up(run: str, tau: list[float], delta: float, closer: float = 0.03) -> list[Row]:
    """Return three seeds of a run; its tasks a and b are that much closer than a and c, and b and c than these."""

    def matrix(cosine: float, more: float = 0.0) -> list[list[float]]:
        ab, ac, bc = cosine + more, cosine, cosine - more / 10
        return [[1.0, ab, ac], [ab, 1.0, bc], [ac, bc, 1.0]]

    row = {
        "run": run,
        "steps": list(range(len(tau))),
        "tau": [matrix(cosine, closer) for cosine in tau],
        "delta": [matrix(delta) for _ in tau],
        "shared": 1.0,
        "increment": 0.5,
        "towards": 0.0,
    }
    return [{**row, "seed": seed} for seed in range(3)]


def verdicts(*runs: list[Row]) -> list[bool | None]:
    rows = [row for run in runs for row in run]
    return [finding.holds for finding in findings(rows, pair_names("abc"), [["b", "a"]])]


ONCE, ROUNDS = made_up("mima_1", [0.05], 0.0), made_up("mima_16", [0.05, 0.5, 0.9], 0.1)
CLAIMS = ("once", "similar", "towards 1", "parallel", "increments", "any two increments", "each round")


def test_findings_follow_the_numbers() -> None:
    assert verdicts(ONCE, ROUNDS) == [True] * len(CLAIMS)
    bad = made_up("mima_1", [0.9], 0.4, closer=-0.03), made_up("mima_16", [0.4, 0.3, 0.2], 0.4)
    assert verdicts(*bad) == [False] * len(CLAIMS)
    opposed = made_up("mima_16", [0.05, 0.5, 0.9], -0.4)
    assert verdicts(ONCE, opposed) == [claim not in ("increments", "any two increments") for claim in CLAIMS]


def test_one_pair_or_one_quartile_is_enough_to_refute_a_claim() -> None:
    one_pair = made_up("mima_16", [0.05, 0.5, 0.9], 0.1)
    for row in one_pair:
        row["delta"][1][1][2] = 0.45
    assert verdicts(ONCE, one_pair) == [claim != "any two increments" for claim in CLAIMS]
    (single,) = [one for one in findings([*ONCE, *one_pair], pair_names("abc"), []) if "any two tasks" in one.claim]
    assert "mima_16, b – c, round 2: 0.450 ± 0.000" in single.measured
    left_behind = made_up("mima_16", [0.05, 0.5, 0.9], 0.1)
    for row in left_behind:
        row["tau"][-1][1][2] = row["tau"][-1][0][2] = -0.9
        row["tau"][-1][0][1] = 2.9
    assert verdicts(ONCE, left_behind)[2] is False


def test_without_similar_tasks_that_claim_is_left_open() -> None:
    found = findings([*ONCE, *ROUNDS], pair_names("abc"), [])
    assert [(one.holds, one.measured) for one in found if "similar" in one.claim] == [
        (None, "not measured with these choices")
    ]


def test_lengths_are_in_the_rows(toy_lab: Path, tmp_path: Path) -> None:
    io = study_io(toy_lab, "alignment", tmp_path)
    row = alignment.measure(Laboratory(io), "mima_4", 0)
    *cosines, last = alignment.tidy_rows([row], pair_names(NAMES))
    assert len(cosines) == 4 * 3  # rounds and pairs
    assert [last[name] for name in ("part", "run", "shared", "towards")] == [
        "last",
        "mima_4",
        row["shared"],
        row["towards"],
    ]
