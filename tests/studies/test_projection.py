"""Study `projection` on small nets: the whole space is measured, and DARE lies where its mask puts it."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Text
from pydantic import ValidationError

from mergeflow.merging import methods
from studies.lab.rows import select
from studies.projection import Options, Space, mergeable
from tasks.plotting.drawing import new_figure
from tasks.plotting.panels import place_labels
from tests.studies.small_lab import run_result

FEW = ["task_arithmetic", "ties", "breadcrumbs", "dare", "della"]
SMALL: dict[str, Any] = {
    "paths": ["mima_4", "per_round_2_4"],
    "factors": [1.0],
    "images": 100,
    "drops": [0.5],
    "methods": FEW,
}


@pytest.mark.slow
def test_small_nets_show_what_the_paper_shows(toy_lab: Path, tmp_path: Path) -> None:
    result = run_result(toy_lab, "projection", tmp_path, **SMALL)
    assert set(result.draw()) == {"planes", "cosines"}
    rows = result.rows
    drops = select(rows, part="drop")
    assert (drops.distance / drops.expected).to_numpy() == pytest.approx(1, abs=0.05), "the size of DARE's mask"
    space = Space(rows[rows.seed == rows.seed.min()])
    assert space.merges == FEW
    assert space.random == ["dare", "della"]
    assert set(space.ends.values()) == {"mima_4 round 4", "per_round_2_4 round 4"}
    models = select(rows, part="model").set_index(["seed", "model"])
    for name in FEW:
        assert space.gap(name, FEW) == pytest.approx(models.to_nearest_merge[rows.seed.min(), name])
        assert space.cosine(name, "ties") <= 1 + 1e-9


def test_every_method_that_needs_no_data_is_merged() -> None:
    merged = mergeable(8)
    assert set(FEW) <= set(merged)
    assert all(not methods()[name].given for name in merged)
    assert "slerp" not in merged, "it merges two"


@pytest.mark.parametrize("names", [["ties", "average"], [*FEW, "fisher"], [*FEW, "tise"]])
def test_methods_that_the_findings_miss_or_cannot_merge_are_refused(names: list[str]) -> None:
    with pytest.raises(ValidationError, match=r"expected methods of the catalog that need no data, task_arithmetic, "):
        Options(**{**SMALL, "one_shot": "mima_1", "joint": "joint", "methods": names})


def test_labels_cover_neither_each_other_nor_points() -> None:
    panel = new_figure(6, 4).subplots()
    labels = {f"point {number}": (0.01 * number, 0.5) for number in range(12)}
    panel.set(xlim=(-1, 1), ylim=(0, 1))
    place_labels(panel, labels)
    panel.figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in panel.texts]  # an annotation's own has its line in it
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
