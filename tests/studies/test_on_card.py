"""Studies that take a device, on the card of `tests.card`: their own loops leave nothing on the processor."""

from pathlib import Path
from typing import Any

import pytest

from studies.commands.study import find_studies
from tests.card import card
from tests.studies import (
    test_adviser_suites,
    test_cart,
    test_equivalence,
    test_linearity_experts,
    test_mergeability,
    test_projection,
)
from tests.studies.small_lab import ROOT, find_study, study_io

SMALL: dict[str, dict[str, Any]] = {
    "mima": {"rounds": [1, 4, 16], "budgets": [16], "at": [1, 4], "kept": [4]},
    "alignment": {"rounds": [1, 4], "shown": [4], "compared": ["per_round_2_4"]},
    "landscape": {"rounds": [1, 4, 16], "pairs": [["north", "east"]], "size": 7, "images": 100, "height": 0.1},
    "equivalence": test_equivalence.SMALL | {"model_tasks": ["north", "east", "south"]},
    "projection": test_projection.SMALL,
    "one_epoch": {"epochs": [1, 2], "further": {}},
    "cost": {"joint": ["joint"], "rates": [], "iterative": ["mima_4"], "one_shot": ["mima_1"], "rank_ratio": [0.1]},
    "merge_frequency": {"rounds": [1, 4], "multiples": [1, 2], "course": ["mima_4"]},
    "gradients": {"runs": {"paper": "cold"}, "images": 12, "steps": [1e-5]},
    "many_tasks": test_cart.MANY,
    "rank_curve": test_cart.CURVE,
    "subset_scaling": test_cart.SUBSETS,
    "interference": test_cart.LAYERS,
    "adaptation": test_cart.ADAPT,
    "cart_landscape": test_cart.PLANES,
    "compression": test_cart.FILES,
    "adviser_regimes": test_adviser_suites.SMALL,
    "linearity_experts": test_linearity_experts.SMALL,
    "mergeability": test_mergeability.SMALL,
    "mergeability_suites": {"runs": {"experts": "200 steps", "mima_3": "MIMA, N = 2"}, "counts": [2, 3], "images": 32},
}
STUDIES = find_studies(ROOT)
DAILY = ("gradients",)  # it has the most of its own: gradients over all images, and descent with them


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in SMALL]
)
def test_every_study(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    lab: Path = request.getfixturevalue("many_lab" if STUDIES[name].root.name == "pocket20" else "toy_lab")
    with card():
        io = study_io(lab, name, tmp_path, **SMALL[name])
        with io.holds:
            find_study(name).run(io)
    assert (io.scratch / "building" / io.stage.outs[0] / "rows.parquet").exists()
