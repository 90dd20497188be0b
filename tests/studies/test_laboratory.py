"""Study `laboratory`, small: what it finds with little data."""

from pathlib import Path

import pandas as pd
import pytest

from studies.laboratory import critical, retained_until
from tests.studies.small_lab import ROOT, run_result

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
    "keep": [0.5, 0.9],
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
    "Leaving out the smaller half of the rows of ΔV changes nothing either.",
]


@pytest.mark.nightly
def test_what_survives_a_small_model_is_found(tmp_path: Path) -> None:
    findings = run_result(ROOT, "laboratory", tmp_path, **SMALL).findings
    verdicts = {finding.claim: finding.holds for finding in findings}
    assert [claim for claim in HOLD if verdicts[claim] is not True] == []
    assert [claim for claim in REFUTED if verdicts[claim] is not False] == []


def test_critical_scales_are_interpolated() -> None:
    rows = pd.DataFrame({"scale": [0.0, 1.0, 2.0], "hinge_2": [1.0, 0.5, 0.0]})
    assert critical(rows, 0.25) == pytest.approx(1.5)
    below = pd.DataFrame({"scale": [0.0, -1.0, -2.0], "hinge_1": [0.0, 0.0, 1.0]})
    assert retained_until(below, 0.5) == pytest.approx(-1.5)
