"""Study `cost`: on a small laboratory, and its findings on the documented result."""

from pathlib import Path

import pytest

from tasks.studies.inputs import StudyInputs
from tasks.studies.papers.cost import study as cost
from tasks.studies.pieces import Row
from tasks.studies.results import StudyResult
from tests.studies.documented import documented, leading, read_documented
from tests.studies.small_lab import SEEDS, study_io


def test_models_stand_beside_their_cost(lab: Path, tmp_path: Path) -> None:
    io = study_io(lab, "cost", tmp_path, iterative=["mima_1", "mima_2"], one_shot=["one_epoch"], rank_ratio=[0.1])
    cost.run(io)
    folder = tmp_path / "building/outputs/studies/cost"
    table, chosen = StudyResult.read(folder).tables
    joint, once, twice, merged = table.rows
    assert [row["model"] for row in table.rows] == [
        "joint training",
        "MIMA N = 1",
        "MIMA N = 2",
        "one-shot, one epoch",
    ]
    assert joint["task steps"] == once["task steps"] == twice["task steps"] == 12  # 4 steps of each of 3 tasks
    assert joint["images"] == once["images"] == 3 * 4 * 12
    assert (merged["images"], merged["merges"]) == (3 * 24, 1)
    assert 2 * float(once["sent, MiB"]) == pytest.approx(float(twice["sent, MiB"]), abs=1)  # type: ignore[arg-type]
    assert (joint["sent, MiB"], joint["selection images"]) == ("the data", 0)
    assert [row["seed"] for row in chosen.rows] == SEEDS
    assert (folder / "accuracy.svg").exists()


def test_every_family_competes(lab: Path, tmp_path: Path) -> None:
    io = study_io(lab, "cost", tmp_path)
    methods = [family.method for family in cost.families(cost.Options.model_validate(StudyInputs(io).options("cost")))]
    assert methods == ["average", "task_arithmetic", "ties", "cart", "tsv"]


def made_up(run: str, accuracy: float) -> Row:
    return {"run": run, "test": {"a": accuracy}, "tried": int(run == "one_epoch")}


def test_findings_follow_the_numbers() -> None:
    good = [made_up("joint", 0.9), made_up("mima_1", 0.5), made_up("mima_16", 0.89), made_up("one_epoch", 0.8)]
    assert all(finding.holds for finding in cost.findings(good))
    bad = [made_up("joint", 0.9), made_up("mima_1", 0.9), made_up("mima_16", 0.7), made_up("one_epoch", 0.8)]
    assert not any(finding.holds for finding in cost.findings(bad))


def test_findings_of_the_full_study() -> None:
    assert documented("cost")("beats the best one-shot merge")
    accuracy = {str(r["model"]): leading(r["test accuracy, %"]) for r in read_documented("cost").tables[0].rows}
    assert accuracy["MIMA N = 1"] < accuracy["MIMA N = 4"] < accuracy["MIMA N = 16"] < accuracy["joint training"]
    assert accuracy["MIMA N = 16"] > accuracy["joint training"] - 5
