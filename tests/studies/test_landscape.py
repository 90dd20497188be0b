"""Study `landscape`: on a small laboratory, and the paper's finding on the documented result."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tasks.studies.inputs import StudyInputs
from tasks.studies.papers.landscape import study as landscape
from tasks.studies.pieces import Row
from tasks.studies.results import StudyResult
from tests.studies.documented import documented
from tests.studies.small_lab import study_io

SMALL = {"rounds": [1, 2], "pairs": [["red", "blue"]], "size": 3, "images": 6}


@pytest.fixture(scope="module")
def io(lab: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    small = study_io(lab, "landscape", tmp_path_factory.mktemp("landscape"), **SMALL)
    return replace(small, stage=replace(small.stage, deps=(*small.stage.deps, "outputs/studies/runs")))


def test_the_study_covers_every_n_and_seed(io) -> None:  # type: ignore[no-untyped-def]
    landscape.run(io)
    folder = io.scratch / "building/outputs/studies/landscape"
    assert (folder / "red_blue.svg").exists()
    result = StudyResult.read(folder)
    planes, errors = result.tables
    assert [row["N"] for row in planes.rows] == [row["N"] for row in errors.rows] == [1, 2]
    assert {finding.system for finding in result.findings} == {"M5"}
    assert len(list((io.scratch / "pieces").glob("*.json"))) == 4


def test_a_plane_meets_its_models(io) -> None:  # type: ignore[no-untyped-def]
    options = landscape.Options.model_validate({**StudyInputs(io).options("landscape"), "margin": 0.0, "images": 1000})
    inputs = StudyInputs(io)
    row = landscape.measure(inputs, options, ("red", "blue"), 1, 0)
    expert = inputs.run("mima_1").expert(0, "red")
    x, y = row["places"]["red"]
    assert y == pytest.approx(0, abs=1e-5)
    assert (row["xs"][-1], row["ys"][0]) == pytest.approx((x, 0), abs=0.1 * x)  # nearly orthogonal: the box is τ's
    assert row["test"]["red"] == {t: 1 - a for t, a in inputs.accuracy(expert, "test", ["red", "blue"]).items()}
    assert np.array(row["errors"]["blue"]).shape == (3, 3)


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
    assert made_up(16, 0, 0.0, 0.3)["overlap"] == 1


def test_findings_follow_the_numbers() -> None:
    rows = [made_up(n, seed, 1 / n, 0.3 / n) for n in (1, 4, 16) for seed in (0, 1)]
    assert all(finding.holds for finding in landscape.findings(rows))
    worse = [made_up(n, seed, n / 16, n / 20) for n in (1, 4, 16) for seed in (0, 1)]
    assert not any(finding.holds for finding in landscape.findings(worse))


def test_findings_of_the_paper() -> None:
    held = documented("landscape")
    for claim in (
        "angle between the task vectors shrinks",
        "valleys turn",
        "minima move together",
        "merged model falls",
    ):
        assert held(claim)
