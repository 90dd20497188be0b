"""Study `linearity_experts` on experts that are linear in their weights, and on drawn squares through a real CLIP."""

from pathlib import Path
from typing import Any

import pytest

from mergeflow.errors import MergeflowError
from studies.lab.linearity import worst_length, worst_share
from studies.lab.rows import select
from tests.studies.small_lab import make_lab, run_result, run_study

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "run": "mima_1",
    "images": 40,
    "path": 3,
    "scale": 0.4,
    "scales": [0.4],
    "add": [0.3, 1.0],
    "negate": [0.0, 1.0],
    "blocks": [1],
}


def test_the_whole_study_on_small_nets(toy_lab: Path, tmp_path: Path) -> None:
    result = run_result(toy_lab, "linearity_experts", tmp_path, **SMALL)
    assert set(result.draw()) == {"pairs", "addition", "negation"}
    rows = result.rows
    assert set(rows.part) == {"pairs", "paths", "edits", "stitches"}
    assert len(select(rows, part="pairs")) == 2 * 3 * 3, "seeds, pairs, α; one hidden layer"
    still = select(rows, part="stitches", scale=0.0, what="negation")
    wide = still.pivot(index=["seed", "tasks"], columns="kind", values=["first", "second"])
    for key in ("first", "second"):
        assert (wide[key, "mirrored"] == wide[key, "negated"]).all(), "λ = 0"


def test_experts_of_a_few_steps_are_linear_in_a_vision_transformer(tmp_path: Path) -> None:
    """After four steps the experts are so near to each other that features must be linear, at every block."""
    lab = make_lab(tmp_path / "lab", {"mima_1": {"regime": "iterative", "iterative": {"rounds": 1}}})
    result = run_result(lab, "linearity_experts", tmp_path / "work", **{**SMALL, "blocks": [4]})
    rows = select(result.rows, part="pairs")
    assert set(rows.depth) == {0, 1, 2, 3}
    assert worst_share(rows).max() < 0.05
    assert worst_length(rows).max() < 0.01


def test_a_block_that_the_model_does_not_have_is_refused(toy_lab: Path, tmp_path: Path) -> None:
    with pytest.raises(MergeflowError, match=r"blocks is \[7\], but the model has 1 blocks: expected 1 to 1"):
        run_study(toy_lab, "linearity_experts", tmp_path, **{**SMALL, "blocks": [7]})
