"""Study `compression` on a small laboratory and on small nets, and its verdicts on made-up rows."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from mergeflow.errors import MergeflowError
from tasks.studies.inputs import StudyInputs
from tasks.studies.papers.compression import study as compression
from tasks.studies.papers.compression.measured import low_rank_bits, share, smallest
from tasks.studies.papers.compression.results import findings
from tasks.studies.results import StudyResult
from tasks.studies.rows import picked
from tests.studies.from_rows import compression_findings
from tests.studies.small_lab import run_study, study_io
from tests.studies.toy_lab import WrongTest

slow = pytest.mark.slow

SMALL: dict[str, Any] = {"counts": [2, 3], "ratios": [0.05, 1.0], "thresholds": [0.4]}


@pytest.fixture(scope="module")
def made(many_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_study(many_lab, "compression", tmp_path_factory.mktemp("compression"), **SMALL)


@slow
def test_the_study_covers_every_method_and_number_of_tasks(made: Path) -> None:
    result = StudyResult.read(made)
    assert (made / "storage.svg").exists()
    accuracy, bits, curves, width = result.tables
    assert [(row["tasks"], row["method"]) for row in accuracy.rows][:2] == [
        (2, "individual"),
        (2, "CART-Indexing, 8 %"),
    ]
    assert len(accuracy.rows) == 2 * 6
    assert [row["tasks"] for row in curves.rows] == [2, 2, 2, 3, 3, 3]
    assert len(bits.rows) == 5
    assert [row["width M"] for row in width.rows] == [128, 768, 1024, 4096]
    assert {finding.system for finding in result.findings} == {"C5"}


@slow
def test_the_findings_come_out_of_the_rows_alone(made: Path) -> None:
    result = StudyResult.read(made)
    assert compression_findings(result.rows, 0.99) == result.findings
    tall = picked(result.rows, part="suites", kind="tall")
    assert {row["threshold"] for row in picked(result.rows, part="thresholds", chosen=True)} == {0.4}
    assert {row["threshold"] for row in tall} == {0.4}
    assert all(row["shared"] + row["tasks"] * row["own"] <= row["file"] for row in tall)


@slow
def test_counted_bytes_are_those_of_the_formula_and_of_the_file(made: Path, many_lab: Path, tmp_path: Path) -> None:
    rows = json.loads((made / "suites.json").read_text())
    inputs = StudyInputs(study_io(many_lab, "compression", tmp_path))
    sizes = {name: list(tensor.shape) for name, tensor in inputs.base.items()}
    model = sum(tensor.nbytes for tensor in inputs.base.values())
    own = {row["kind"]: row for row in rows if row["tasks"] == 3 and row["args"].get("rank_ratio", 0.08) == 0.08}
    assert own["cart"]["own"] * 8 == low_rank_bits(sizes, 0.08)
    assert own["cart"]["shared"] == own["emr"]["shared"] == model
    assert own["emr"]["own"] == pytest.approx(model / 32, rel=0.01)
    for row in rows:
        parts = row["shared"] + row["tasks"] * row["own"]
        assert row["all_experts"] == row["tasks"] * model
        assert parts <= row["file"] < parts + 120_000  # the header names every part
        assert row["one_task"] < row["file"]


@slow
def test_nothing_left_out_gives_every_expert_back(many_lab: Path, tmp_path: Path) -> None:
    inputs = StudyInputs(study_io(many_lab, "compression", tmp_path))
    experts = inputs.run("experts").experts(0)
    args = {"rank_ratio": 1.0, "non_matrices": "own"}
    found = compression.measure(inputs, experts, "cart_indexing", args, ("test",))
    assert "validation" not in found
    assert found["test"] == inputs.individual(experts, "test")
    assert share(found, True) > 1


@slow
def test_the_threshold_does_not_depend_on_test(toy_experts: Path, tmp_path: Path) -> None:
    """With every test label wrong the same one is taken: of two the better one."""
    io = study_io(toy_experts, "compression", tmp_path, thresholds=[0.2, 1.0])
    options = compression.DECLARED.chosen(io)
    for inputs in (StudyInputs(io), WrongTest(io)):
        tried = compression._thresholds(inputs, inputs.run("experts").experts(0), options)
        assert compression._best(tried) == 1.0


@slow
def test_a_rank_out_of_range_is_refused(many_lab: Path, tmp_path: Path) -> None:
    io = study_io(many_lab, "compression", tmp_path, **SMALL | {"counts": [2], "ratios": [1.2]})
    with pytest.raises(MergeflowError, match="rank_ratio"):
        compression.run(io)
    io = study_io(many_lab, "compression", tmp_path, **SMALL | {"counts": [4]})
    with pytest.raises(MergeflowError, match="first 4 tasks, but there are 3"):
        compression.run(io)


def made_up(kind: str, count: int, relative: float, **args: Any) -> list[dict[str, Any]]:
    scores = {"test": relative, "validation": relative}
    file = {"file": 20 * count, "all_experts": 100 * count, "base": 100, "needs_base": kind != "cart"}
    return [{"kind": kind, "tasks": count, "seed": n, "args": args, "relative": scores, **file} for n in range(3)]


def test_findings_follow_the_numbers() -> None:
    rows = []
    for count, lost in ((8, 0.0), (20, 0.02)):
        rows += [*made_up("cart", count, 0.985, rank_ratio=0.08), *made_up("cart", count, 0.995, rank_ratio=0.16)]
        rows += [*made_up("emr", count, 0.97 - lost), *made_up("tall", count, 0.99, threshold=0.4)]
    assert [smallest(rows, count, 0.99) for count in (8, 20)] == [0.16, 0.16]
    assert [finding.holds for finding in findings(rows, 0.08, 0.99)] == [False] + [True] * 5
    for row in rows:
        level = 0.96 if row["kind"] == "cart" else 0.98 + 0.001 * (row["tasks"] == 20)
        row["relative"] = dict.fromkeys(("test", "validation"), level)
    assert [smallest(rows, count, 0.99) for count in (8, 20)] == [None, None]
    assert [finding.holds for finding in findings(rows, 0.08, 0.99)] == [False, False, None, False, False, False]


@slow
def test_small_nets_show_what_the_paper_shows(toy_experts: Path, tmp_path: Path) -> None:
    """C5: most of the accuracy is in few directions: a small rank keeps it at a fraction of the storage."""
    choices = {"counts": [3], "rank_ratio": 0.1, "ratios": [0.02, 0.4], "thresholds": [0.4]}
    rows = picked(StudyResult.read(run_study(toy_experts, "compression", tmp_path, **choices)).rows, split="test")

    def mean(kind: str, ratio: float | None) -> float:
        return fmean(r["accuracy"] for r in rows if (r["kind"], r["rank_ratio"]) == (kind, ratio))

    expert = fmean(row["expert"] for row in rows)
    assert mean("cart", 0.02) > expert - 5
    assert mean("cart", 0.4) > expert - 2
    size = {row["rank_ratio"]: row["file_share"] for row in rows if row["kind"] == "cart"}
    assert size[0.02] < size[0.1] < size[0.4]
    assert {row["seed"] for row in rows} == {0, 1}
