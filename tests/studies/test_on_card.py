"""Every study on the card of `tests.card`: its own loops leave nothing on the processor."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flows.study_commands import find_studies
from tests.card import card
from tests.studies import (
    test_adaptation,
    test_cart_landscape,
    test_compression,
    test_equivalence,
    test_interference,
    test_landscape,
    test_many_tasks,
    test_mima,
    test_projection,
    test_rank_curve,
    test_subset_scaling,
)
from tests.studies.small_lab import ROOT, study_io

SMALL: dict[str, dict[str, Any]] = {
    "mima": test_mima.CHOICES,
    "alignment": {"rounds": [1, 4], "shown": [4], "compared": ["per_round_2_4"]},
    "landscape": test_landscape.SMALL,
    "equivalence": test_equivalence.SMALL | {"model_tasks": ["north", "east", "south"]},
    "projection": test_projection.SMALL,
    "one_epoch": {"epochs": [1, 2], "further": {}},
    "cost": {"joint": ["joint"], "rates": [], "iterative": ["mima_4"], "one_shot": ["mima_1"], "rank_ratio": [0.1]},
    "merge_frequency": {"rounds": [1, 4], "multiples": [1, 2], "course": ["mima_4"]},
    "gradients": {"runs": {"paper": "cold"}, "images": 12, "steps": [1e-5]},
    "many_tasks": test_many_tasks.SMALL,
    "rank_curve": test_rank_curve.SMALL,
    "subset_scaling": test_subset_scaling.SMALL,
    "interference": test_interference.SMALL,
    "adaptation": test_adaptation.SMALL,
    "cart_landscape": test_cart_landscape.SMALL,
    "compression": test_compression.SMALL,
}
STUDIES = find_studies(ROOT)
DAILY = ("gradients",)  # it has the most of its own: gradients over all images, and descent with them


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in STUDIES]
)
def test_every_study(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    lab: Path = request.getfixturevalue("many_lab" if STUDIES[name].root.name == "pocket20" else "toy_lab")
    with card():
        io = study_io(lab, name, tmp_path, **SMALL[name])
        with io.holds:
            import_module(io.stage.module).run(io)
    assert (io.scratch / "building" / io.stage.outs[0] / "result.json").exists()
