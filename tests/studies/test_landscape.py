"""Study `landscape` on small nets: the planes turn and shrink with N, and a plane meets its models."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from studies.lab.inputs import Laboratory
from studies.lab.rows import select
from studies.landscape import Options, geometry, measure_plane
from studies.theory.landscape import Grid
from tests.studies.small_lab import SEEDS, run_result, study_io

pytestmark = pytest.mark.slow

CHOICES = {"rounds": [1, 4, 16], "pairs": [["north", "east"]], "size": 7, "margin": 0.5, "images": 60, "height": 0.05}


def test_small_nets_show_what_the_paper_shows(toy_lab: Path, tmp_path: Path) -> None:
    result = run_result(toy_lab, "landscape", tmp_path, **CHOICES)
    assert set(result.draw()) == {"north_east"}
    rows = result.rows
    planes = select(rows, part="plane").groupby("rounds")[["angle", "distance"]].mean()
    assert planes.angle[1] > max(planes.angle[4], planes.angle[16])
    merged = select(rows, part="model", model="merged").groupby("rounds").accuracy.mean()
    assert merged[1] < merged[16] - 2
    assert len(select(rows, part="grid")) == 3 * len(SEEDS) * 2 * 7 * 7, "N, seeds, tasks, points"


def test_a_plane_meets_its_models(toy_lab: Path, tmp_path: Path) -> None:
    lab = Laboratory(study_io(toy_lab, "landscape", tmp_path, **CHOICES))
    options = Options.model_validate({**CHOICES, "margin": 0.0, "images": 1000})
    rows = pd.DataFrame(measure_plane(lab, "mima_1", 0, options, ("north", "east")))
    expert = select(rows, part="model", model="north").set_index("task")
    assert expert.y.to_numpy() == pytest.approx(0, abs=1e-5)
    grid = select(rows, part="grid")
    assert grid.x.max() == pytest.approx(expert.x.iloc[0], abs=0.1 * expert.x.iloc[0]), (
        "nearly orthogonal: the box is τ's"
    )
    judged = lab.accuracy(lab.run("mima_1").expert(0, "north"), "test", ["north", "east"])
    assert dict(expert.accuracy / 100) == pytest.approx(judged)


def test_the_geometry_of_two_bowls_is_theirs() -> None:
    grid = Grid.around([(-3.0, -3.0), (3.0, 3.0)], 61, 0.0)
    x, y = np.meshgrid(grid.xs, grid.ys)
    bowls = {"north": (x - 2) ** 2 + y**2, "east": x**2 + (y - 1) ** 2}
    expected = {"angle": 90, "length": 3, "turn": 90, "distance": 5**0.5 / 3, "overlap": 0, "floor": 1.25}
    assert geometry(grid, bowls, [(4.0, 0.0), (0.0, 2.0)], 0.001) == pytest.approx(expected)
