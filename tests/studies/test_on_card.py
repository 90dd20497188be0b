"""Every study that takes a device on the card of `tests.card`: its own loops leave nothing on the processor."""

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from studies.commands.study import find_studies
from tasks.project.studies import declared_study
from tests.card import card
from tests.studies import (
    test_adviser_suites,
    test_cart,
    test_equivalence,
    test_landscape,
    test_linearity_experts,
    test_mergeability,
    test_projection,
)
from tests.studies.small_lab import ROOT, study_io

SMALL: dict[str, dict[str, Any]] = {
    "mima": {"rounds": [1, 4, 16], "budgets": [16], "at": [1, 4], "kept": [4]},
    "alignment": {"rounds": [1, 4], "shown": [4], "compared": ["per_round_2_4"]},
    "landscape": test_landscape.SMALL,
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
# They take a device by the same Laboratory; what is special in them is on the card elsewhere.
ELSEWHERE = {
    "glue": "a laboratory of texts: tests/test_on_card.py trains, judges and adapts texts",
    "structure_suite": "a laboratory of adapters: tests/training/test_on_card.py trains LoRA",
    "bases": "bases of its own: tests/studies/test_bases.py, nightly",
    "adviser_suites": "what adviser_regimes measures, of more tasks",
}
STUDIES = find_studies(ROOT)
DAILY = ("gradients",)  # it has the most of its own: gradients over all images, and descent with them


def takes_a_device(module: str, seen: set[str]) -> bool:
    """Whether a study's code, or what it imports of the studies, opens `Laboratory`, which choose a device."""
    seen.add(module)
    path = ROOT / f"{module.replace('.', '/')}.py"
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if "Laboratory" in called:
        return True
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    return any(takes_a_device(one, seen) for one in imported - seen if one.startswith("studies.lab."))


@pytest.mark.slow
def test_every_study_that_takes_a_device_is_here() -> None:
    takers = {name for name, study in STUDIES.items() if takes_a_device(study.stage.module, set())}
    assert takers == {*SMALL, *ELSEWHERE}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in SMALL]
)
def test_every_study(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    lab: Path = request.getfixturevalue("many_lab" if STUDIES[name].root.name == "pocket20" else "toy_lab")
    with card():
        io = study_io(lab, name, tmp_path, **SMALL[name])
        with io.holds:
            module = import_module(io.stage.module)
            (module if hasattr(module, "run") else declared_study(module, name)).run(io)
    assert (io.scratch / "building" / io.stage.outs[0] / "rows.parquet").exists()
