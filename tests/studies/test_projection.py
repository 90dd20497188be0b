"""Study `projection` on small nets, and its verdicts on made-up models."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from matplotlib.text import Text
from pydantic import ValidationError
from studies.old.judging.merging import of_projection

from mergeflow.merging import methods
from studies.old.papers.projection import study as projection
from studies.old.papers.projection.findings import findings
from studies.old.papers.projection.results import OTHERS, Space
from studies.old.results import StudyResult, with_interval
from studies.old.rows import Row
from tasks.plotting.drawing import new_figure
from tasks.plotting.labels import place_labels
from tests.studies.small_lab import study_io

FEW = ["task_arithmetic", "ties", "breadcrumbs", "dare", "della"]
SMALL = {"paths": ["mima_4", "per_round_2_4"], "factors": [1.0], "images": 100, "drops": [0.5], "methods": FEW}


@pytest.fixture(scope="module")
def result(toy_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    io = study_io(toy_lab, "projection", tmp_path_factory.mktemp("projection"), **SMALL)
    projection.run(io)
    folder = io.scratch / "building/outputs/studies/projection"
    assert {path.name for path in folder.glob("*.svg")} == {"planes.svg", "cosines.svg"}
    return StudyResult.read(folder)


@pytest.mark.slow
def test_the_study_covers_merges_paths_and_joint_training(result: StudyResult) -> None:
    merges, distances, across, drops = result.tables
    assert [row["model"] for row in merges.rows] == [*FEW, "mima_4, last round", "per_round_2_4, last round", "joint"]
    assert distances.rows[0]["models"] == "ties – breadcrumbs"
    assert [row["model"] for row in across.rows] == ["task_arithmetic", "ties", "mima_4", "per_round_2_4"]
    assert [row["drop p"] for row in drops.rows] == [0.5]
    assert {finding.system for finding in result.findings} == {"G8"}


@pytest.mark.slow
def test_one_seed_leaves_open_what_seeds_decide(toy_lab: Path, tmp_path: Path) -> None:
    io = study_io(toy_lab, "projection", tmp_path, **SMALL)
    assert io.studies
    projection.run(replace(io, studies=io.studies.model_copy(update={"seeds": [0]})))
    result = StudyResult.read(tmp_path / "building/outputs/studies/projection")
    assert {finding.holds for finding in result.findings} == {None}


def test_dare_lies_where_its_mask_puts_it(result: StudyResult) -> None:
    (law,) = [finding for finding in result.findings if "random mask: λ" in finding.claim]
    assert float(law.measured.partition(": ")[2].split()[0]) < 5, law.measured


def test_the_rows_give_the_findings_on_distances(result: StudyResult) -> None:
    """What a page says of DARE's mask and of two merges can be computed from the rows alone."""
    drops = [row for row in result.rows if row["part"] == "drop"]
    off = [100 * max(abs(one["distance"] / one["expected"] - 1) for one in drops if one["seed"] == s) for s in (0, 1)]
    (law,) = [finding for finding in result.findings if "random mask: λ" in finding.claim]
    assert with_interval(off) in law.measured
    pairs = {(row["model"], row["other"]) for row in result.rows if row["part"] == "pair"}
    assert ("ties", "breadcrumbs") in pairs or ("breadcrumbs", "ties") in pairs
    assert {row["seed"] for row in result.rows if row["part"] == "pair"} == {0, 1}
    assert any(row["part"] == "seeds" for row in result.rows)
    assert of_projection(result.rows) == result.findings


def test_small_nets_show_what_the_paper_shows(result: StudyResult) -> None:
    """G8: DARE is the most lonely merge, and the trajectory ends at a lower loss than one-shot merges."""

    def mean(model: str, what: str) -> float:
        return fmean(row[what] for row in result.rows if (row["part"], row["model"]) == ("model", model))

    others = ("task_arithmetic", "ties", "breadcrumbs")
    assert mean("dare", "to_nearest_merge") > max(mean(name, "to_nearest_merge") for name in others)
    barriers = {
        frozenset((row["model"], row["other"])): row["barrier"] for row in result.rows if row["barrier"] is not None
    }
    assert barriers.keys() == {frozenset(pair) for pair in combinations(OTHERS, 2)}
    assert barriers[frozenset(("ties", "breadcrumbs"))] < 0.1
    assert mean("mima_4 round 4", "loss") < min(mean(name, "loss") for name in (*others, "dare"))


def test_every_method_that_needs_no_data_is_merged() -> None:
    found = projection.mergeable(8)
    assert {"average", "task_arithmetic", "ties", "cart", "dare", "tsv", "iso_c", "wudi"} <= set(found)
    assert not {"fisher", "regmean", "adamerging", "slerp"} & set(found)
    assert "slerp" in projection.mergeable(2)
    assert set(found) <= set(methods())


@pytest.mark.parametrize("names", [["ties", "average"], [*FEW, "fisher"], [*FEW, "tise"]])
def test_methods_that_the_findings_miss_or_cannot_merge_are_refused(names: list[str]) -> None:
    with pytest.raises(ValidationError, match=r"expected methods of the catalog that need no data, task_arithmetic, "):
        projection.Options(**{**SMALL, "one_shot": "mima_1", "joint": "joint", "methods": names})


def made_up(
    ties: tuple[float, float], dare: tuple[float, float], end: tuple[float, float], loss: float, rise: float = 0.0
) -> Row:
    """Models on a plane, which here is the whole space."""
    places = {
        "base": (0.0, 0.0),
        "ties": ties,
        "breadcrumbs": (1.0, 0.0),
        "task_arithmetic": (0.0, 1.0),
        "cart": (-1.0, 0.0),
        "dare": dare,
        "mima_2 round 1": (0.0, 0.9),
        "mima_2 round 2": end,
        "joint": (9.0, 9.0),
    }
    points = np.array(list(places.values()))
    merges = ["ties", "breadcrumbs", "task_arithmetic", "cart", "dare"]
    return {
        "names": list(places),
        "gram": (points @ points.T).tolist(),
        "merges": merges,
        "random": ["dare"],
        "joint": "joint",
        "paths": {"mima_2": ["mima_2 round 1", "mima_2 round 2"]},
        "loss": {**dict.fromkeys(merges, 7.0), "ties": 5.0, "mima_2": loss},
        "barriers": {f"{one} – {other}": rise for one, other in combinations(OTHERS, 2)},
        "drops": [{"drop": 0.5, "distance": dare[1], "expected": 5.0, "accuracy": 80.0}],
    }


def test_findings_follow_the_numbers() -> None:
    good = made_up((1.0, 0.2), (0.0, 5.0), (3.0, 3.0), 4.0)
    across = {"mima_2": [1.0], "ties": [1.0]}
    assert all(finding.holds is True for finding in findings([good] * 3, across))
    worse = made_up((-3.0, -3.0), (0.0, 1.1), (1.0, 0.1), 6.0, rise=0.2)
    found = findings([worse] * 3, across)
    assert all(finding.holds is False for finding in found)
    (law,) = [finding for finding in found if "random mask" in finding.claim]
    assert law.measured.endswith("of measured and expected: 78.0 ± 0.0 %")  # 1.1 in place of 5


def test_a_barrier_between_ties_and_breadcrumbs_alone_refutes_that_they_share_a_basin() -> None:
    row = made_up((1.0, 0.2), (0.0, 5.0), (3.0, 3.0), 4.0)
    row["barriers"]["ties – breadcrumbs"] = 0.2
    similar, all_four, *_ = findings([row] * 3, {"mima_2": [1.0], "ties": [1.0]})
    assert (similar.holds, similar.ours, all_four.holds, all_four.ours) == (False, False, True, True)
    row["barriers"] = {**dict.fromkeys(row["barriers"], 0.0), "breadcrumbs – dare": 0.2}
    similar, all_four, *_ = findings([row] * 3, {"mima_2": [1.0], "ties": [1.0]})
    assert (similar.holds, all_four.holds) == (True, False)


def test_a_barrier_is_what_rises_above_the_chord() -> None:
    assert projection.barrier([4.0, 3.0, 2.5, 1.0, 0.0]) == pytest.approx(0.5)
    assert projection.barrier([0.0, 0.5, 1.0, 2.0, 4.0]) == pytest.approx(-0.5)


def test_space_measures_the_whole_space() -> None:
    space = Space(made_up((3.0, 4.0), (0.0, 5.0), (3.0, 3.0), 4.0))
    assert space.length("ties") == pytest.approx(5)
    assert space.distance("ties", "breadcrumbs") == pytest.approx(20**0.5)
    assert space.cosine("ties", "breadcrumbs") == pytest.approx(0.6)
    assert space.nearest("ties", space.calm) == "task_arithmetic"
    assert space.calm == ["ties", "breadcrumbs", "task_arithmetic", "cart"]


def test_labels_cover_neither_each_other_nor_points() -> None:
    panel = new_figure(6, 4).subplots()
    labels = {f"point {number}": (0.01 * number, 0.5) for number in range(12)}
    panel.set(xlim=(-1, 1), ylim=(0, 1))
    place_labels(panel, labels)
    panel.figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in panel.texts]  # an annotation's own has its line in it
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[i + 1 :])
