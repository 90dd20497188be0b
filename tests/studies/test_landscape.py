"""Study `landscape` on small nets, and its verdicts on made-up planes."""

from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from studies.lab.inputs import Laboratory
from studies.old.papers.landscape import study as landscape
from studies.old.results import StudyResult
from studies.old.rows import Row, picked
from tasks.project.stage import StageIO
from tests.studies.small_lab import study_io
from tests.studies.toy_lab import SEEDS, WrongTest

SMALL: dict[str, Any] = {"rounds": [1, 4, 16], "pairs": [["north", "east"]], "size": 7, "images": 100, "height": 0.1}


@pytest.fixture(scope="module")
def io(toy_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> StageIO:
    return study_io(toy_lab, "landscape", tmp_path_factory.mktemp("landscape"), **SMALL)


@pytest.mark.slow
def test_small_nets_show_what_the_paper_shows(io: StageIO) -> None:
    """M5: with more rounds the task vectors turn towards each other and the error of their mean falls."""
    landscape.run(io)
    folder = io.scratch / "building/outputs/studies/landscape"
    assert (folder / "north_east.svg").exists()
    result = StudyResult.read(folder)
    planes, errors = result.tables
    assert [row["N"] for row in planes.rows] == [row["N"] for row in errors.rows] == [1, 4, 16]
    assert {finding.system for finding in result.findings} == {"M5"}
    assert len(list((io.scratch / "pieces").glob("*.json"))) == 3 * len(SEEDS)

    def mean(what: str, **wanted: Any) -> float:
        return fmean(row[what] for row in picked(result.rows, **wanted))

    for shrinking in ("angle", "distance"):
        few, some, many = (mean(shrinking, part="plane", rounds=rounds) for rounds in (1, 4, 16))
        assert few > many
        assert few > some
    merged = [mean("accuracy", part="model", model="merged", rounds=rounds) for rounds in (1, 16)]
    assert merged[0] < merged[1] - 2
    assert len(picked(result.rows, part="grid")) == 3 * len(SEEDS) * 2 * 7 * 7  # N, seeds, tasks, points


def test_a_plane_meets_its_models(io: StageIO) -> None:
    options = landscape.DECLARED.chosen(io).model_copy(update={"margin": 0.0, "images": 1000})
    inputs = Laboratory(io)
    row = landscape.measure(inputs, options, ("north", "east"), 1, 0)
    expert = inputs.run("mima_1").expert(0, "north")
    x, y = row["places"]["north"]
    assert y == pytest.approx(0, abs=1e-5)
    assert (row["xs"][-1], row["ys"][0]) == pytest.approx((x, 0), abs=0.1 * x)  # nearly orthogonal: the box is τ's
    assert row["test"]["north"] == {t: 1 - a for t, a in inputs.accuracy(expert, "test", ["north", "east"]).items()}
    assert np.array(row["errors"]["east"]).shape == (7, 7)


def test_the_grid_does_not_depend_on_test(io: StageIO) -> None:
    options = landscape.DECLARED.chosen(io).model_copy(update={"size": 3})
    right, wrong = (
        landscape.measure(inputs, options, ("north", "east"), 1, 0) for inputs in (Laboratory(io), WrongTest(io))
    )
    assert right["errors"] == wrong["errors"]
    assert right["test"] != wrong["test"]


def made_up(rounds: int, seed: int, apart: float, error: float) -> Row:
    """A plane with two round valleys."""
    axis = np.linspace(-1, 2, 31)
    x, y = np.meshgrid(axis, axis)
    places = {"base": (0.0, 0.0), "a": (1.0, 0.0), "b": (1 - apart, apart), "mean": (1 - apart / 2, apart / 2)}
    models = {"base": 0.5, "a": 0.1, "b": 0.1, "mean": error, "merged": error}
    row = {
        "pair": ["a", "b"],
        "rounds": rounds,
        "seed": seed,
        "xs": axis.tolist(),
        "ys": axis.tolist(),
        "errors": {t: (0.2 * np.hypot(x - places[t][0], y - places[t][1]) ** 2).tolist() for t in "ab"},
        "places": places,
        "off": 0.1,
        "test": {name: {"a": value, "b": value} for name, value in models.items()},
    }
    return {**row, **landscape.geometry(row, 0.05)}


def test_geometry_of_known_valleys() -> None:
    row = made_up(1, 0, 1.0, 0.3)
    assert row["angle"] == pytest.approx(90)
    assert row["turn"] == pytest.approx(90, abs=2)
    assert row["distance"] == pytest.approx(2**0.5, abs=0.02)
    assert row["overlap"] == pytest.approx(0, abs=0.02)
    assert row["floor"] == pytest.approx(0.1, abs=1e-3)  # halfway: 0.2 · (1/√2)² for both
    assert made_up(16, 0, 0.0, 0.3)["overlap"] == 1


def test_findings_follow_the_numbers() -> None:
    rows = [made_up(n, seed, 1 / n, 0.3 / n) for n in (1, 4, 16) for seed in (0, 1)]
    assert all(finding.holds is True for finding in landscape.findings(rows))
    worse = [made_up(n, seed, n / 16, n / 20) for n in (1, 4, 16) for seed in (0, 1)]
    assert all(finding.holds is False for finding in landscape.findings(worse))
