"""Study `many_tasks`: on a small laboratory, and the paper's findings on the documented result."""

from pathlib import Path
from typing import Any

import pytest

from tasks.studies.inputs import StudyInputs
from tasks.studies.papers.many_tasks import study as many_tasks
from tasks.studies.papers.many_tasks.results import findings, tables
from tasks.studies.pieces import Row
from tasks.studies.results import StudyResult
from tests.studies.documented import documented
from tests.studies.small_lab import run_study, study_io

SCALE = {"low": 0.5, "high": 1.0, "step": 0.5, "start": 0.5}
SMALL: dict[str, Any] = {
    "counts": [2, 3],
    "together": ["joint"],
    "adapted": {"cart": {"lr": 0.01, "steps": 2}},
    "methods": {
        "average": {},
        "task_arithmetic": {"scale": SCALE},
        "ties": {"scale": SCALE},
        "consensus": {"scale": SCALE},
        "cart": {"scale": SCALE, "args": {"rank_ratio": [0.04, 0.16]}},
    },
}


@pytest.fixture(scope="module")
def result(many_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    folder = run_study(many_lab, "many_tasks", tmp_path_factory.mktemp("many_tasks"), **SMALL)
    assert {path.name for path in folder.glob("*.svg")} == {"radar.svg", "counts.svg"}
    return StudyResult.read(folder)


def test_the_table_has_every_model_at_every_count(result: StudyResult) -> None:
    absolute, relative, two, three, chosen = result.tables
    models = ["zero-shot", "individual", "joint training", "average", "task arithmetic", "TIES", "Consensus TA", "CART"]
    assert [row["model"] for row in absolute.rows] == [*models, "AdaMerging + CART"]
    assert absolute.rows[0].keys() == {"model", "2 tasks", "3 tasks", "2 → 3"}
    assert relative.rows[1]["3 tasks"] == "100.0 ± 0.0"
    assert set(two.rows[0]) == {"model", "red", "blue"}
    assert set(three.rows[0]) == {"model", "red", "blue", "grey"}
    assert [row["tried"] for row in chosen.rows if row["method"] == "CART"] == ["4"]
    assert {finding.system for finding in result.findings} == {"C1", "C4", "C6"}


def test_a_merge_sees_the_first_tasks_alone(many_lab: Path, tmp_path: Path) -> None:
    io = study_io(many_lab, "many_tasks", tmp_path, **SMALL)
    options = many_tasks.Options.model_validate({**SMALL, "adapted": {}, "methods": {"average": {}}})
    inputs = StudyInputs(io).first(2)
    rows = {row["model"]: row for row in many_tasks.measure(inputs, options, 2, 0)}
    experts = inputs.run("experts").experts(0)
    mean = {name: sum(state[name] for state in experts.values()) / 2 for name in inputs.base}
    assert rows["average"]["test"] == inputs.accuracy(mean, "test")
    assert rows["joint"]["test"].keys() == {"red", "blue"}


def made_up(count: int, **accuracy: float) -> list[Row]:
    return [{"tasks": count, "seed": 0, "model": name, "test": {"a": value}} for name, value in accuracy.items()]


def test_findings_follow_the_numbers() -> None:
    good = {"zero_shot": 0.5, "individual": 0.9, "average": 0.6, "task_arithmetic": 0.7, "ties": 0.7, "cart": 0.8}
    worse = {**good, "average": 0.55, "task_arithmetic": 0.6, "ties": 0.6, "cart": 0.79}
    assert all(finding.holds for finding in findings([*made_up(8, **good), *made_up(20, **worse)]))
    behind = {**good, "cart": 0.4}
    assert not any(finding.holds for finding in findings([*made_up(8, **good), *made_up(20, **behind)])[:2])
    assert len(tables(made_up(8, **good))[0].rows) == 6


def test_findings_of_the_paper() -> None:
    held = documented("many_tasks")
    for claim in ("CART is at least as good as task arithmetic", "CART is at least as good as TIES"):
        assert held(claim)
