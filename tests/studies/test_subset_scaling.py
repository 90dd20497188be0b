"""Study `subset_scaling` on a small laboratory, and its verdicts on made-up subsets."""

from dataclasses import replace
from itertools import product
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from mergeflow.merging import configure
from studies.lab.inputs import Laboratory
from studies.old.judging.cart import of_subset_scaling
from studies.old.papers.subset_scaling import study as subset_scaling
from studies.old.papers.subset_scaling.findings import findings
from studies.old.papers.subset_scaling.results import notes, tables
from studies.old.papers.subset_scaling.samples import WIDER
from studies.old.results import StudyResult
from studies.old.rows import Row
from tests.studies.small_lab import run_study, study_io
from tests.studies.toy_lab import SEEDS, WrongTest

SMALL: dict[str, Any] = {
    "sizes": [2, 3],
    "starts": [2],
    "margin": 0.01,
    "pilot": 3,
    "most": 3,
    "validation": 6,
    "test": 6,
    "grids": {
        "average": {},
        "task_arithmetic": {"scale": [0.3]},
        "ties": {"keep": [0.2], "scale": [1.0]},
        "cart": {"rank_ratio": [0.08], "scale": [1.0]},
    },
    "wider": {"task_arithmetic": [0.5]},
}
METHODS = ("average", "task_arithmetic", "task_arithmetic" + WIDER, "ties", "cart")


@pytest.fixture(scope="module")
def io(many_lab: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    return study_io(many_lab, "subset_scaling", tmp_path_factory.mktemp("subset_scaling"), **SMALL)


@pytest.mark.slow
def test_the_study_measures_every_subset_by_every_method(io) -> None:  # type: ignore[no-untyped-def]
    subset_scaling.run(io)
    folder = io.scratch / "building/outputs/studies/subset_scaling"
    assert (folder / "scaling.svg").exists()
    result = StudyResult.read(folder)
    accuracy, sample = result.tables[0], result.tables[5]
    assert [row["N"] for row in accuracy.rows] == [2, 3]
    assert [row["subsets"] for row in accuracy.rows] == [row["m measured"] for row in sample.rows]
    assert list(accuracy.rows[0])[2:] == ["average", "task arithmetic", "task arithmetic, wider λ", "TIES", "CART"]
    assert [row["subsets there are"] for row in sample.rows] == [3, 1]
    assert {finding.system for finding in result.findings} == {"C7"}
    assert {row["seed"] for row in result.rows} == {0, 1}
    assert {(row["size"], row["method"]) for row in result.rows} == {(n, m) for n in (2, 3) for m in METHODS}
    assert of_subset_scaling(result.rows, SMALL["starts"]) == result.findings


def test_a_subset_is_merged_from_its_own_experts_alone(io) -> None:  # type: ignore[no-untyped-def]
    inputs = Laboratory(io)
    options = subset_scaling.DECLARED.chosen(io)
    splits = [inputs.examples(split) for split in ("validation", "test")]
    experts = inputs.run("experts").experts(0)
    few = {task: experts[task] for task in ("red", "grey")}
    row = subset_scaling.measure(inputs, options, splits, few, ["red", "grey"])  # no other expert is asked for
    halfway = {name: (few["red"][name] + few["grey"][name]) / 2 for name in few["red"]}
    assert row["methods"].keys() == set(METHODS)
    assert row["methods"]["average"]["test"] == inputs.accuracy(halfway, "test", ["red", "grey"])


def test_cart_of_two_tasks_is_the_average(io) -> None:  # type: ignore[no-untyped-def]
    inputs = Laboratory(io)
    experts = inputs.run("experts").experts(0)
    scorer = inputs.scorer({task: experts[task] for task in ("red", "blue")})
    average = scorer.merge(configure("average"))
    for name, tensor in scorer.merge(configure("cart", {"rank_ratio": 0.08, "scale": 3.0})).items():
        torch.testing.assert_close(tensor, average[name], atol=1e-5, rtol=0)


def test_the_papers_rule_and_the_two_stages(io) -> None:  # type: ignore[no-untyped-def]
    options = subset_scaling.DECLARED.chosen(io)
    tasks = [str(number) for number in range(6)]
    known = {"zero_shot": dict.fromkeys(tasks, 0.5), "individual": dict.fromkeys(tasks, 0.9)}
    options = options.model_copy(update={"margin": 0.02, "pilot": 4, "most": 18})
    planned = subset_scaling.plan(tasks, known, options, 3)  # σ = 0.2: (1.96 · 10)² = 384.2
    assert (planned["wanted"], planned["population"]) == (385, 20)
    seen: list[tuple[str, ...]] = []

    def work(size: int, number: int, subset: tuple[str, ...]) -> Row:
        seen.append(subset)
        return {"methods": {method: {"validation": 0.7 + 0.01 * (number % 2)} for method in options.grids}}

    sample = subset_scaling._sample(tasks, known, options, 3, work)
    assert len(seen) == 4
    assert list(sample["subsets"])[:4] == seen, "the pilot belongs to the sample"
    assert sample["spread"] == pytest.approx(0.01 * (1 / 3) ** 0.5)
    assert sample["asked"] == len(sample["subsets"]) == 4  # (3.18 · 0.0058 / 0.02)² < 1
    assert subset_scaling.two_stage_size(0.05, 0.02, 4) == 64


def made_up(lead: float, growth: float) -> tuple[list[Row], list[Row], dict[int, dict[str, dict[str, float]]]]:
    """Six tasks, three seeds; CART leads at N = 2 by `lead` and by `growth` more for every further task."""
    tasks = [str(number) for number in range(6)]
    own = {"zero_shot": dict.fromkeys(tasks, 0.4), "individual": dict.fromkeys(tasks, 1.0)}
    plans: list[Row] = []
    rows: list[Row] = []
    for size, count in ((2, 4), (4, 4), (6, 1)):
        numbers = {"range": [0.4, 1.0], "population": comb(6, size), "wanted": 99, "spread": 0.01, "asked": count}
        plans.append({"size": size, "margin": 0.03, **numbers})
        for seed, number in product(range(3), range(count)):
            subset = tasks[number % 3 :][:size] if size < 6 else tasks
            level = 0.7 - 0.01 * size + 0.01 * (number % 2)
            ours = level + lead + growth * (size - 2) - 0.005 * (number % 2)
            accuracy = {method: ours if method == "cart" else level for method in METHODS}
            found = {
                method: {"args": {"scale": 0.3}, "ends": ["scale"], "test": dict.fromkeys(subset, value)}
                for method, value in accuracy.items()
            }
            rows.append({"seed": seed, "size": size, "tasks": subset, "methods": found})
    return rows, plans, dict.fromkeys(range(3), own)


def test_findings_follow_the_numbers() -> None:
    good = made_up(0.05, 0.01)
    found = findings(*good, [2, 4])
    assert [finding.holds for finding in found] == [True] * 9
    assert [finding.ours for finding in found] == [False, True, False, True, True, False, True, False, False]
    (_, _, fall, least, *_) = found
    assert "CART's lead over average grows by: 4.3" in least.measured
    assert "average, N = 2 → 6: -4.5 ± 0.0 points" in fall.measured
    bad = findings(*made_up(0.05, -0.02), [2, 4])
    assert [finding.holds for finding in bad[:5]] == [False, False, True, False, False]
    steady = made_up(0.05, 0.01)
    for row in steady[0]:
        for found_by in row["methods"].values():
            found_by["test"] = dict.fromkeys(row["tasks"], 0.7)
    assert findings(*steady, [2, 4])[2].holds is False
    assert findings(*made_up(-0.01, 0.0), [2])[0].holds is False
    level = made_up(0.05, 0.01)
    for row in level[0]:
        if row["size"] == 2:  # CART is the average
            row["methods"]["average"] = row["methods"]["cart"]
    assert findings(*level, [2])[0].holds is False, "what is no better is not superior"
    assert notes(*good)[-1].startswith("How often an end of what was tried was taken")
    assert "TIES's scale with 4 tasks 100 %" in notes(*good)[-1]


@pytest.mark.parametrize("steadier", ["average", "task_arithmetic", "ties"])
def test_one_method_with_smaller_error_bars_refutes_that_carts_are_the_smallest(steadier: str) -> None:
    rows, plans, known = made_up(0.05, 0.01)
    for row in rows:
        if row["size"] == 4:
            row["methods"][steadier]["test"] = dict.fromkeys(row["tasks"], 0.7)
    (finding,) = [one for one in findings(rows, plans, known, [2]) if "smallest error bars" in one.claim]
    assert finding.holds is (steadier == "ties"), "with four tasks the paper excepts TIES"
    assert not finding.ours


def test_a_method_with_a_wider_grid_is_compared_in_a_claim_of_ours() -> None:
    rows, plans, known = made_up(0.05, 0.01)
    for row in rows:
        if row["size"] == 4:
            row["methods"]["task_arithmetic" + WIDER]["test"] = dict.fromkeys(row["tasks"], 0.7)
    paper, ours = [one for one in findings(rows, plans, known, [2]) if "standard deviation" in one.margin]
    assert (paper.holds, paper.ours, ours.holds, ours.ours) == (True, False, False, True)


def test_a_sample_too_small_and_a_value_outside_are_told() -> None:
    rows, plans, known = made_up(0.05, 0.01)
    narrow = [{**plan, "range": [0.6, 0.68]} for plan in plans]
    assert findings(rows, narrow, known, [2])[-1].holds is False
    strict = [{**plan, "margin": 0.0001} for plan in plans]
    assert [finding.holds for finding in findings(rows, strict, known, [2])][-2:] == [False, True]


def test_the_table_of_losses_has_the_slope() -> None:
    losses = tables(*made_up(0.05, 0.01), [2])[2]
    average = losses.rows[0]
    assert str(average["lost from N = 2 to 6"]).startswith("4.5")
    assert average["slope, points per task"] == "-1.13"


def test_bad_choices_are_told(io) -> None:  # type: ignore[no-untyped-def]
    options = subset_scaling.DECLARED.chosen(io).model_dump()
    with pytest.raises(ValueError, match="margin"):
        subset_scaling.Options.model_validate({**options, "margin": 0})
    assert replace(io).stage.systems == ("C7",)


NETS: dict[str, Any] = {
    **SMALL,
    "validation": 100,
    "test": 200,
    "grids": {**SMALL["grids"], "task_arithmetic": {"scale": [0.1, 0.3]}, "cart": {"rank_ratio": [0.08, 0.3]}},
    "wider": {"task_arithmetic": [0.5, 0.7]},
}


@pytest.mark.slow
def test_small_nets_show_what_the_paper_shows(toy_experts: Path, tmp_path: Path) -> None:
    """C7: a third task costs every merge accuracy, CART the least; at two tasks CART is the average."""
    result = StudyResult.read(run_study(toy_experts, "subset_scaling", tmp_path, **NETS))

    def reached(method: str, size: int, seed: int) -> float:
        """Normalised accuracy in %, from the raw rows alone."""
        own = [r for r in result.rows if (r["method"], r["size"], r["seed"]) == (method, size, seed)]
        return 100 * fmean(row["accuracy"] / row["expert"] for row in own)

    for seed in SEEDS:
        lost = {method: reached(method, 2, seed) - reached(method, 3, seed) for method in METHODS}
        assert lost["average"] > 3
        assert lost["cart"] < lost["average"] - 1
        assert abs(reached("cart", 2, seed) - reached("average", 2, seed)) < 0.5
        assert reached("cart", 3, seed) > reached("average", 3, seed) + 1
    told = {str(row["method"]): str(row["lost from N = 2 to 3"]) for row in result.tables[2].rows}
    first = {"average": "average", "CART": "cart", "TIES": "ties"}
    for name, method in first.items():
        assert float(told[name].split()[0]) == pytest.approx(reached(method, 2, 0) - reached(method, 3, 0), abs=0.06)
    leads = result.findings[0].measured
    mean = fmean(reached("cart", 3, seed) - reached("average", 3, seed) for seed in SEEDS)
    assert f"less average, N = 3: {mean:.1f} ±" in leads


def test_what_is_chosen_does_not_depend_on_test(toy_experts: Path, tmp_path: Path) -> None:
    """With every test label wrong the same candidates are taken, and their accuracy is the rest to 1."""
    io = study_io(toy_experts, "subset_scaling", tmp_path, **NETS)
    options = subset_scaling.DECLARED.chosen(io)
    found = []
    for inputs in (Laboratory(io), WrongTest(io)):
        splits = [inputs.examples(split) for split in ("validation", "test")]
        experts = inputs.run("experts").experts(0)
        found.append(subset_scaling.measure(inputs, options, splits, experts, list(experts))["methods"])
    right, wrong = found
    assert {name: one["args"] for name, one in right.items()} == {name: one["args"] for name, one in wrong.items()}
    for name, one in right.items():
        assert one["validation"] == wrong[name]["validation"]
        assert {task: 1 - value for task, value in wrong[name]["test"].items()} == pytest.approx(one["test"])
