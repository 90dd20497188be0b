"""Study `interference`, on a small laboratory and on made-up rows."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from studies.old.papers.interference import study as interference
from studies.old.papers.interference.results import findings, notes
from studies.old.papers.interference.theorem import constants, slope, theorem_findings, theorem_rows
from studies.old.results import StudyResult
from studies.old.rows import Row, picked
from tests.studies.small_lab import study_io

SMALL: dict[str, Any] = {
    "counts": [2, 3],
    "shown": [3],
    "compared": {"mima_3": 3},
    "ratios": [0.02, 0.08, 1.0],
    "draws": 1,
}


@pytest.fixture(scope="module")
def theorem() -> dict[str, list[Row]]:
    return theorem_rows(1)


@pytest.fixture(scope="module")
def result(
    many_lab: Path,
    tmp_path_factory: pytest.TempPathFactory,
    theorem: dict[str, list[Row]],
) -> StudyResult:
    io = study_io(many_lab, "interference", tmp_path_factory.mktemp("interference"), **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interference, "theorem_rows", lambda draws: theorem)
        interference.run(io)
    folder = io.scratch / "building/outputs/studies/interference"
    assert {path.name for path in folder.glob("*.svg")} == {"layers_3.svg", "kinds_3.svg", "bound.svg"}
    return StudyResult.read(folder)


@pytest.mark.slow
def test_the_study_covers_experts_layers_and_kinds(result: StudyResult) -> None:
    lower, course, kinds, *_ = result.tables
    assert [(row["experts"], row["tasks"]) for row in lower.rows] == [("experts", 2), ("experts", 3), ("mima_3", 3)]
    assert [row["k / r"] for row in course.rows] == ["0.02", "0.08", "1"]
    assert [row["matrix"] for row in kinds.rows] == [
        "patch embedding", "positions", "projection", "attention in", "attention out", "MLP in", "MLP out",
    ]  # fmt: skip
    assert {finding.system for finding in result.findings} == {"C3"}
    assert {(row["origin"], row["ratio"]) for row in result.rows} >= {("centred", 0.08), ("original", 1.0)}


def test_the_rows_give_the_findings_on_the_theorem(result: StudyResult, theorem: dict[str, list[Row]]) -> None:
    draws = [row for row in result.rows if row["part"] == "draws"]
    worst = max(row["L"] / row["printed"] for row in draws)
    assert any(f"of {len(draws)} draws" in f.measured and f"{worst:.2g}" in f.measured for f in result.findings)
    assert {row["part"] for row in result.rows} == {"layer", "common", *theorem}
    assert {row["seed"] for row in result.rows if row["part"] in theorem} == {None}  # no seed of experts


def test_the_rows_give_what_the_note_says_of_the_theorem_s_term(result: StudyResult) -> None:
    own = [row for row in picked(result.rows, part="layer", tasks=3, origin="centred") if row["run"] == "experts"]
    informative = 100 * fmean(row["theorem"] < 1 for row in own)
    assert any(f"says anything, at {informative:.1f} % of layers and ranks" in note for note in result.notes)


def test_two_centred_tasks_interfere_as_much_as_can_be(result: StudyResult) -> None:
    """Their row spaces are the same, so the meant and the printed I(k) agree, and centring lowers none."""
    assert result.tables[0].rows[0]["I(k)"] == "0.0 ± 0.0"


def made_up(centred: float, original: float, error: float) -> Row:
    def curves(value: float) -> dict[str, list[float]]:
        rising = [value * part for part in (0.1, 1.0)]
        same = dict.fromkeys(("whole", "kept", "spectral", "loss"), rising)
        return {**same, "error": [error, 0.0], "theorem": [2.0, 2.0]}

    layer = {"kind": "MLP in", "ratios": [0.08, 1.0], "centred": curves(centred), "original": curves(original)}
    return {"run": "experts", "tasks": 8, "seed": 0, "common": 0.2, "layers": [layer]}


def test_findings_follow_the_numbers() -> None:
    assert all(finding.holds is True for finding in findings([made_up(0.1, 0.3, 0.2)] * 3, [("experts", 8)]))
    assert all(finding.holds is False for finding in findings([made_up(0.3, 0.1, 0.95)] * 3, [("experts", 8)]))
    assert "at 0.0 % of layers" in notes([made_up(0.1, 0.3, 0.2)], [("experts", 8)])[1]


@pytest.mark.parametrize(("error", "holds"), [(0.49, True), (0.51, False)])
def test_half_of_the_task_vectors_is_asked_of_the_first_8_percent_of_the_ranks(error: float, holds: bool) -> None:
    (finding,) = [
        one for one in findings([made_up(0.1, 0.3, error)] * 3, [("experts", 8)]) if "R(k) falls" in one.claim
    ]
    assert finding.holds is holds


def test_the_bound_holds_as_it_must_be_read_and_not_as_printed(theorem: dict[str, list[Row]]) -> None:
    held = {finding.claim: finding.holds for finding in theorem_findings(theorem)}
    assert [holds for claim, holds in held.items() if "as printed" in claim] == [False]
    assert sum(held.values()) == len(held) - 1


def test_the_smallest_singular_value_is_needed_once(theorem: dict[str, list[Row]]) -> None:
    found = constants(theorem["condition"])
    late = list(found)[2:]
    course = {name: slope(late, [found[c][name] for c in late]) for name in ("L", "derived", "printed")}
    assert course["L"] < course["derived"] + 0.1
    assert course["printed"] - course["derived"] == pytest.approx(2, abs=0.01)
