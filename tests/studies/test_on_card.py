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
    test_landscape,
    test_linearity_experts,
    test_mergeability,
    test_projection,
    test_rounds,
)
from tests.studies.small_lab import ROOT, find_study, study_io

SMALL: dict[str, dict[str, Any]] = {
    **test_rounds.CHOICES,
    "landscape": test_landscape.CHOICES,
    "equivalence": test_equivalence.SMALL | {"model_tasks": ["north", "east", "south"]},
    "projection": test_projection.SMALL,
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
