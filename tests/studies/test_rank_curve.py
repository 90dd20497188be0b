"""Study `rank_curve` on a small laboratory and on small nets, and its verdicts on made-up curves."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mergeflow.merging import configure
from studies.lab.inputs import Laboratory
from studies.old.judging.cart import of_rank_curve
from studies.old.papers.rank_curve import study as rank_curve
from studies.old.papers.rank_curve.findings import findings
from studies.old.papers.rank_curve.results import notes, peak, tables
from studies.old.results import StudyResult
from studies.old.rows import Row
from tests.studies.small_lab import run_study, study_io

SMALL: dict[str, Any] = {
    "suites": [{"tasks": 3, "ratios": [0.0, 0.08, 1.0], "tuned": [0.08]}],
    "scales": {"centred": [1.0, 2.0], "original": [0.3, 0.6]},
}


@pytest.fixture(scope="module")
def result(many_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    folder = run_study(many_lab, "rank_curve", tmp_path_factory.mktemp("rank_curve"), **SMALL)
    assert {path.name for path in folder.glob("*.svg")} == {"mean_3.svg", "tasks_3.svg"}
    return StudyResult.read(folder)


@pytest.mark.slow
def test_the_study_covers_ratios_methods_and_tasks(result: StudyResult) -> None:
    levels, curve, peaks = result.tables
    assert [row["tasks"] for row in levels.rows] == [3]
    assert [row["k / r"] for row in curve.rows] == ["0", "0.08", "1"]
    assert [row["task"] for row in peaks.rows] == ["red", "blue", "grey"]
    assert {finding.system for finding in result.findings} == {"C2"}
    assert of_rank_curve(result.rows) == result.findings


def test_the_ends_are_the_average_and_task_arithmetic(many_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(many_lab, "rank_curve", tmp_path, **SMALL))
    scorer = inputs.scorer(inputs.run("experts").experts(0))
    walk = rank_curve.Walk(inputs, scorer, {})
    average = scorer.merge(configure("average"))
    addition = scorer.merge(configure("task_arithmetic", {"scale": 0.3}))
    none, whole = (walk.merged("centred", ratio, 2.0) for ratio in (0.0, 1.0))
    base, all_of_it = (walk.merged("original", ratio, 0.3) for ratio in (0.0, 1.0))
    for name, tensor in average.items():
        assert tensor.equal(none[name])
        assert (tensor - whole[name]).abs().max() < 1e-5
        assert (addition[name] - all_of_it[name]).abs().max() < 1e-5
        treated = ("attn" in name or "mlp" in name) and tensor.ndim == 2
        assert base[name].equal(inputs.base[name] if treated else all_of_it[name])


def made_up(
    centred: list[float], original: list[float], average: float, alone: list[float] | None = None, base: float = 0.5
) -> Row:
    def points(values: list[float]) -> list[Row]:
        ratios = (0.0, 0.08, 0.32, 1.0)
        return [{"ratio": r, "scale": 1.0, "test": {"a": v}} for r, v in zip(ratios, values, strict=True)]

    curves = {
        kind: {"once": points(v), "per rank": points(v)[1:3]}
        for kind, v in (("centred", centred), ("original", original), ("matrices alone", alone or original))
    }
    levels: Row = {"average": {"a": average}, "experts": {"a": 0.95}, "zero_shot": {"a": base}}
    curves["matrices alone"]["per rank"] = []
    return {"tasks": 8, "seed": 0, "curves": curves, "tried": {"centred": [0.2, 1.0], "original": [0.5, 2.0]}, **levels}


BELL = [0.7, 0.9, 0.8, 0.7]
RISING = [0.5, 0.7, 0.75, 0.8]


def test_findings_follow_the_numbers() -> None:
    bell = [made_up(BELL, RISING, 0.7)] * 3
    assert all(finding.holds is True for finding in findings(bell))
    flat = [made_up([0.7, 0.69, 0.7, 0.8], [0.6, 0.9, 0.75, 0.81], 0.6)] * 3
    assert all(finding.holds is False for finding in findings(flat))
    assert "centred curve, 90.0 %, is at 0.08, 10.0 ± 0.0 points above 0.32, the next" in notes(bell)[0]
    assert notes(bell)[2] == (
        "8 tasks: λ chosen per rank stood at an end of those tried: centred at 0.08 (3 of 3 seeds), "
        "centred at 0.32 (3 of 3 seeds)."
    )
    assert tables(bell)[2].rows[0]["centred peaks at"] == "0.08"


@pytest.mark.parametrize(
    ("row", "refuted"),
    [
        (made_up([0.7, 0.9, 0.8, 0.95], RISING, 0.7), "bell-shaped"),
        (made_up([0.95, 0.9, 0.8, 0.7], RISING, 0.7), "bell-shaped"),
        (made_up([0.7, 0.7, 0.9, 0.7], RISING, 0.7), "bell-shaped"),
        (made_up(BELL, RISING, 0.7, base=0.4), "at rank 0 the original curve is the pre-trained model"),
        (made_up(BELL, RISING, 0.7, base=0.6), "at rank 0 the original curve is the pre-trained model"),
        (made_up(BELL, RISING, 0.7, alone=[0.4, 0.7, 0.75, 0.8]), "at rank 0 the original curve"),
        (made_up(BELL, [0.4, 0.7, 0.75, 0.8], 0.7, alone=RISING), "where all other tensors are added"),
        (made_up(BELL, [0.5, 0.7, 0.75, 0.95], 0.7), "the peak of the centred curve lies above task arithmetic"),
        (made_up(BELL, [0.5, 0.7, 0.75, 0.85], 0.7), "the peak of the centred curve significantly outperforms"),
        (made_up([0.7, 0.79, 0.85, 0.7], RISING, 0.7), "the peak of the centred curve lies above task arithmetic"),
        (made_up(BELL, [0.5, 0.95, 0.95, 0.95], 0.7), "at 8 % CART is above task arithmetic on every task"),
        (made_up(BELL, [0.5, 0.7, 0.75, 0.95], 0.7), "at 8 % CART is above task arithmetic of the full rank"),
    ],
)
def test_each_claim_can_be_refuted(row: Row, refuted: str) -> None:
    (finding,) = [one for one in findings([row] * 3) if refuted in one.claim]
    assert finding.holds is False


def test_a_bell_is_measured_from_the_higher_of_its_ends() -> None:
    bell = findings([made_up([0.7, 0.9, 0.92, 0.8], RISING, 0.7)] * 3)[0]
    assert bell.measured == (
        "highest point inside less the higher end: 12.0 ± 0.0 points; at 8 %, less the higher end: 10.0 ± 0.0 points"
    )


@pytest.mark.slow
def test_small_nets_show_what_the_paper_shows(toy_experts: Path, tmp_path: Path) -> None:
    """C2: the centred curve is a bell between two averages; the original one goes from the base to task arithmetic."""
    suites = [{"tasks": 3, "ratios": [0.0, 0.02, 0.08, 0.4, 1.0], "tuned": [0.08]}]
    result = StudyResult.read(run_study(toy_experts, "rank_curve", tmp_path, suites=suites))

    def mean(curve: str, ratio: float) -> float:
        wanted = (curve, "once", ratio)
        return fmean(r["accuracy"] for r in result.rows if (r["curve"], r["rule"], r["ratio"]) == wanted)

    assert mean("centred", 0.0) == pytest.approx(mean("centred", 1.0), abs=0.1)
    assert max(mean("centred", 0.02), mean("centred", 0.08)) > mean("centred", 0.0) + 2
    assert mean("original", 1.0) > mean("matrices alone", 0.0) + 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ratios": [0.0, 0.5, 0.2, 1.0]}, "must ascend"),
        ({"ratios": [0.1, 0.5, 1.0]}, "from 0 to 1"),
        ({"tuned": [0.0, 0.08]}, r"lie in \(0, 1\]"),
        ({"ratios": [0.0, 0.1, 1.0]}, "ratios need 0.08"),
    ],
)
def test_ratios_that_draw_no_curve_are_refused(change: dict[str, list[float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rank_curve.Suite.model_validate({"tasks": 3, "ratios": [0.0, 0.08, 1.0], "tuned": [0.08], **change})


def test_of_equal_points_the_smaller_ratio_is_the_peak() -> None:
    assert peak({0.32: 1.0, 0.08: 1.0, 0.0: 0.5}) == 0.08
