"""Study `laboratory`, small: what it finds with little data, and that its rows are enough to judge and draw it."""

from pathlib import Path

import pytest

from studies.old.papers.laboratory import study as laboratory
from studies.old.papers.laboratory.figures import figures
from studies.old.papers.laboratory.options import Options
from studies.old.papers.laboratory.results import study_result
from studies.old.papers.laboratory.rows import critical, retained_until, slope
from studies.old.results import Finding, StudyResult
from studies.old.rows import tidy
from tasks.plotting.drawing import to_svg
from tests.studies.small_lab import ROOT, run_study

pytestmark = pytest.mark.slow

SMALL = {
    "seeds": [0, 1, 2],
    "dimensions": 10,
    "width": 96,
    "batch": 64,
    "samples": 64,
    "alphas": [-0.8, -0.5, 0.0, 0.5],
    "scales": [-12, -8, -6, -5, -4, -3, -2, -1, -0.5, 0, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 2],
    "step_sizes": [0.25, 0.5],
    "shares": [4, 8],
    "batches": [16, 64],
    "widths": [96],
    "spreads": [0.5],
    "bits": [1, 2],
    "targets": [[0.8, 0.4], [0.792, -0.6], [0.0, 0.0]],
    "drawn": 20,
    "keep": [0.5],
}
HOLD = [
    "Fine-tuning brings the generalisation error to order ε.",
    "The steps needed grow as 1/η.",
    "For α ≥ 0 every λ ≥ 1 − α + β solves both tasks (Theorem 1).",
    "For α < 0 no λ ≥ −1 solves both tasks.",
    "For α = 0 and every λ ≤ 0 task 1 is kept (Theorem 2, A).",
    "For α = 0 and −1 ≤ λ ≤ 0 task 2 is forgotten.",
    "For α < 0 and −1/α² ≤ λ ≤ 0 task 1 is kept (Theorem 2, B).",
    "μ′ᵀΔWμ′ = α² μᵀΔWμ (Equation 21).",
    "Rows of ΔV point along ±μ (Lemma 4): its leading direction is μ.",
    "A task that is irrelevant to all experts is reached by no λ (Theorem 3, A).",
    "The closed form of λ, as derived, meets both sums of Equation 7 (Equations 75 and 76).",
]
REFUTED = [
    "For α < 0 no λ solves both tasks (Remark 1).",
    "For α = 0 and every λ ≤ 0 task 2 is forgotten (Theorem 2, A).",
    "There its predictions on task 2 are no longer right.",
    "Attention between label-relevant tokens goes to 1 (Lemma 1).",
    "The closed form of λ, as printed, meets both sums of Equation 7 (Equations 75 and 76).",
    "Leaving out the small rows of ΔV changes nothing (Corollary 2).",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The study has run; it needs no outputs of other stages."""
    return run_study(ROOT, "laboratory", tmp_path_factory.mktemp("laboratory"), **SMALL)


def verdicts(findings: list[Finding]) -> dict[str, bool | None]:
    return {finding.claim: finding.holds for finding in findings}


def test_what_survives_a_small_model_is_found(folder: Path) -> None:
    found = verdicts(StudyResult.read(folder).findings)
    assert [claim for claim in HOLD if found[claim] is not True] == []
    assert [claim for claim in REFUTED if found[claim] is not False] == []


def test_findings_tables_and_figures_follow_from_the_rows(folder: Path) -> None:
    kept, options = StudyResult.read(folder), Options.model_validate(SMALL)
    again = study_result(kept.rows, options)
    assert (again.findings, again.tables) == (kept.findings, kept.tables)
    for name, figure in figures(kept.rows, options).items():
        assert to_svg(figure, name) == (folder / f"{name}.svg").read_bytes()


def test_a_seed_measures_the_same_twice(folder: Path) -> None:
    rows = tidy(list(laboratory.PARTS["targets"](Options.model_validate(SMALL), 1)))
    kept = [row for row in StudyResult.read(folder).rows if row["part"] == "target" and row["seed"] == 1]
    assert [{name: row[name] for name in rows[0]} for row in kept] == rows


def test_tasks_that_were_mixed_up_are_found(folder: Path) -> None:
    kept = StudyResult.read(folder).rows
    mixed = [row | {"hinge_1": row["hinge_2"], "hinge_2": row["hinge_1"]} for row in kept if row["part"] == "phase"]
    rest = [row for row in kept if row["part"] != "phase"]
    found = verdicts(study_result([*mixed, *rest], Options.model_validate(SMALL)).findings)
    assert found["Fine-tuning brings the generalisation error to order ε."] is False
    assert found["For α = 0 and every λ ≤ 0 task 1 is kept (Theorem 2, A)."] is False
    assert found["For α = 0 and −1 ≤ λ ≤ 0 task 2 is forgotten."] is False


def test_thresholds_are_interpolated() -> None:
    rows = [{"scale": scale, "hinge_1": max(0, -scale - 1), "hinge_2": max(0, 1 - scale)} for scale in (-2, -1, 0, 1)]
    assert critical(rows, 0.5) == 0.5
    assert retained_until(rows, 0.5) == -1.5
    assert slope([(0, 1), (1, -1)]) == pytest.approx(-2)
