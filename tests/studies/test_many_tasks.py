"""Study `many_tasks` on a small laboratory and on small nets, and its verdicts on made-up rows."""

from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from studies.lab.inputs import Laboratory
from studies.old.judging.cart import of_many_tasks
from studies.old.papers.many_tasks import study as many_tasks
from studies.old.papers.many_tasks.figures import loss_figure
from studies.old.papers.many_tasks.findings import findings
from studies.old.papers.many_tasks.results import notes, tables
from studies.old.results import StudyResult
from studies.old.rows import Row
from tests.studies.small_lab import run_study, study_io

SCALE = {"low": 0.5, "high": 1.0, "step": 0.5, "start": 0.5}
SMALL: dict[str, Any] = {
    "counts": [2, 3],
    "together": {"joint": {"label": "joint training", "counts": [2, 3]}},
    "adapted": {"directions": ["cart"], "counts": [3], "rates": [0.01, 0.02], "steps": 4},
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


@pytest.mark.slow
def test_the_table_has_every_model_at_every_count(result: StudyResult) -> None:
    absolute, relative, two, three, chosen, rates = result.tables
    models = ["zero-shot", "individual", "joint training", "average", "task arithmetic", "TIES", "Consensus TA", "CART"]
    assert [row["model"] for row in absolute.rows] == [*models, "AdaMerging + CART"]
    assert absolute.rows[0].keys() == {"model", "2 tasks", "3 tasks", "2 → 3"}
    assert relative.rows[1]["3 tasks"] == "100.0 ± 0.0"
    assert set(two.rows[0]) == {"model", "red", "blue"}
    assert set(three.rows[0]) == {"model", "red", "blue", "grey"}
    assert [row["tried"] for row in chosen.rows if row["method"] == "CART"] == ["4 (2 tasks); 4 (3 tasks)"]
    assert {row["tried"] for row in result.rows if row["model"] == "cart"} == {4}
    assert {finding.system for finding in result.findings} == {"C1", "C4", "C6"}, "C2 needs AdaMerging + TA"
    assert {row["rate"] for row in rates.rows} == {"0.01", "0.02"}
    assert [row["chosen"] for row in rates.rows] == ["×", ""]
    assert {row["model"] for row in result.rows if row["tasks"] == 3} >= {"cart", "adamerging_cart", "joint"}
    assert {row["rank_ratio"] for row in result.rows if row["model"] == "cart"} <= {0.04, 0.16}
    courses = [row for row in result.rows if row["rate"]]
    assert {(row["rate"], row["step"], row["task"]) for row in courses} == set(product((0.01, 0.02), range(5), [None]))
    assert of_many_tasks(result.rows, {"joint": "joint training"}) == result.findings


def test_a_merge_sees_the_first_tasks_alone(many_lab: Path, tmp_path: Path) -> None:
    io = study_io(many_lab, "many_tasks", tmp_path, **SMALL)
    options = many_tasks.Options.model_validate({**SMALL, "methods": {"average": {}}})
    inputs = Laboratory(io).first(2)
    rows = {row["model"]: row for row in many_tasks.measure(inputs, options, 2, 0)["rows"]}
    experts = inputs.run("experts").experts(0)
    mean = {name: sum(state[name] for state in experts.values()) / 2 for name in inputs.base}
    assert rows["average"]["test"] == inputs.accuracy(mean, "test")
    assert rows["joint"]["test"].keys() == {"red", "blue"}


def test_test_is_looked_at_with_the_chosen_candidate_alone(many_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(many_lab, "many_tasks", tmp_path, **SMALL))
    scorer = inputs.blind().scorer(inputs.run("experts").experts(0))
    row = many_tasks._merged(inputs, scorer, "cart", many_tasks.Sweep.model_validate(SMALL["methods"]["cart"]))
    assert row["tried"] == 4
    assert set(row["ends"]) == {"scale", "rank_ratio"}, "two values each: both are ends"
    assert len({digest for digest, split, _ in inputs._judged if split == "test"}) == 1


@pytest.mark.slow
def test_small_nets_show_what_the_paper_shows(toy_experts: Path, tmp_path: Path) -> None:
    """C1, C6: CART leads the baselines on small nets, and the experts lead all merges."""
    scale = {"low": 0.2, "high": 2.0, "step": 0.2, "start": 1.0}
    choices: dict[str, Any] = {
        "counts": [3],
        "together": {},
        "adapted": {"directions": [], "counts": [], "rates": [0.01], "steps": 1},
        "methods": {
            "average": {},
            "task_arithmetic": {"scale": scale},
            "ties": {"scale": scale},
            "cart": {"scale": scale, "args": {"rank_ratio": [0.04, 0.1, 0.2]}},
        },
    }
    rows = StudyResult.read(run_study(toy_experts, "many_tasks", tmp_path, **choices)).rows
    mean = {
        m: fmean(row["accuracy"] for row in rows if (row["model"], row["split"]) == (m, "test"))
        for m in {row["model"] for row in rows}
    }
    assert mean["zero_shot"] + 5 < mean["average"] < mean["cart"] < mean["individual"] - 5
    assert mean["cart"] > max(mean["task_arithmetic"], mean["ties"])


def made_up(count: int, **accuracy: float) -> list[Row]:
    return [
        {"tasks": count, "seed": seed, "model": name, "test": {"a": value}}
        for name, value in accuracy.items()
        for seed in range(3)
    ]


def test_findings_follow_the_numbers() -> None:
    good = {"zero_shot": 0.5, "individual": 0.9, "average": 0.6, "task_arithmetic": 0.7, "ties": 0.7, "cart": 0.8}
    good["consensus"] = 0.75
    worse = {**good, "average": 0.55, "task_arithmetic": 0.6, "ties": 0.6, "consensus": 0.7, "cart": 0.79}
    assert all(finding.holds is True for finding in findings([*made_up(8, **good), *made_up(20, **worse)], {}))
    behind = {**good, "cart": 0.4}
    refuted = {f.claim for f in findings([*made_up(8, **good), *made_up(20, **behind)], {}) if f.holds is False}
    assert len(refuted) == 6
    assert not [claim for claim in refuted if claim.startswith("Weight averaging")]
    near = {**good, "average": 0.84, "consensus": 0.78}
    refuted = {f.claim for f in findings([*made_up(8, **good), *made_up(20, **near)], {}) if f.holds is False}
    assert "Weight averaging is far below the individual experts." in refuted
    assert "Weight averaging generally performs worse than task arithmetic." in refuted
    assert "CART outperforms Consensus TA by a substantial margin, whatever the number of tasks." in refuted
    assert len(tables(made_up(8, **good), {})[0].rows) == 7


def adapted(count: int, start: float, end: float, name: str = "adamerging_ta") -> list[Row]:
    return [{**row, "start": {"a": start}} for row in made_up(count, **{name: end})]


def test_adapting_is_held_against_its_static_start_and_against_cart() -> None:
    merges = [row for count in (8, 20) for row in made_up(count, individual=0.9, average=0.5, cart=0.8)]

    def verdicts(*pieces: list[Row]) -> dict[str, object]:
        rows = [*merges, *(row for piece in pieces for row in piece)]
        return {
            one.claim: one.holds for one in findings(rows, {}) if "daMerging" in one.claim or "dapting" in one.claim
        }

    start = "Adapting is at least as good as its static start, task arithmetic (λ from validation)."
    ahead = "CART beats AdaMerging + TA, whatever the number of tasks."
    better = "AdaMerging on CART's directions is better than on task vectors."
    assert verdicts(adapted(8, 0.6, 0.7), adapted(20, 0.6, 0.7)) == {start: True, ahead: True}
    assert verdicts(adapted(8, 0.6, 0.7), adapted(20, 0.7, 0.6))[start] is False
    assert verdicts(adapted(8, 0.6, 0.7), adapted(20, 0.6, 0.85))[ahead] is False
    further = "Combined with test-time adaptation CART improves further."
    claims = [*merges, *adapted(8, 0.6, 0.81, "adamerging_cart")]
    assert [one.holds for one in findings(claims, {}) if one.claim == further] == [True]
    claims += adapted(20, 0.6, 0.79, "adamerging_cart")
    assert [one.holds for one in findings(claims, {}) if one.claim == further] == [False]
    both = adapted(8, 0.8, 0.85, "adamerging_cart")
    assert verdicts(adapted(8, 0.6, 0.7), both)[better] is True
    assert verdicts(adapted(8, 0.6, 0.87), both)[better] is False


@pytest.mark.parametrize("near", ["task_arithmetic", "ties", "adamerging_ta"])
def test_one_method_near_carts_peak_refutes_that_it_is_significantly_ahead(near: str) -> None:
    """At the fewest tasks alone: there the paper draws the curve."""
    levels = {"individual": 0.9, "average": 0.5, "task_arithmetic": 0.7, "ties": 0.7, "cart": 0.8}

    def peak(ahead: float, name: str, count: int) -> object:
        changed = {**levels, "adamerging_ta": 0.7, name: 0.8 - ahead}
        rows = [
            row for n in (8, 20) for row in made_up(n, **(changed if n == count else {**levels, "adamerging_ta": 0.7}))
        ]
        rows = [{**row, "start": {"a": 0.6}} for row in rows]
        (found,) = [one for one in findings(rows, {}) if one.system == "C2"]
        return found.holds

    assert peak(0.03, near, 8) is True
    assert peak(0.02, near, 8) is False
    assert peak(0.02, near, 20) is True


def test_a_merge_of_ours_that_loses_less_refutes_that_cart_loses_least() -> None:
    first, last = made_up(8, individual=0.9, cart=0.8, tsv=0.8), made_up(20, individual=0.9, cart=0.7, tsv=0.75)
    (finding,) = [one for one in findings([*first, *last], {}) if "loses least" in one.claim]
    assert finding.holds is False
    assert "TSV-M loses more by: -5.6" in finding.measured


def test_ends_of_what_was_tried_are_told() -> None:
    rows = [{**row, "ends": ["keep"]} for row in made_up(8, individual=0.9, ties=0.8)]
    assert notes(rows, {})[-1] == "At an end of what was tried stood keep of individual (8 tasks) for 3 seeds, " + (
        "keep of TIES (8 tasks) for 3 seeds."
    )


def test_a_model_that_some_counts_lack_leaves_its_cells_empty() -> None:
    rows = [*made_up(8, individual=0.9, cart=0.8), *made_up(20, individual=0.9, cart=0.8, mima=0.85)]
    (line,) = [row for row in tables(rows, {"mima": "MIMA"})[0].rows if row["model"] == "MIMA"]
    assert (line["8 tasks"], line["8 → 20"]) == (None, None)
    assert str(line["20 tasks"]).startswith("85.0")


def test_what_validation_chose_is_told_once_with_its_seeds() -> None:
    rows = made_up(8, individual=0.9, average=0.5, ties=0.6)
    for row in rows:
        chosen = {"keep": 0.1 if row["seed"] == 2 else 0.2, "scale": 0.8}
        if row["model"] != "individual":
            row |= {"args": chosen if row["model"] == "ties" else {}, "tried": 1}
    (table,) = [one for one in tables(rows, {}) if one.title.startswith("Chosen on validation")]
    assert {row["method"]: row["8 tasks"] for row in table.rows} == {
        "average": "–",
        "TIES": "keep 0.2, scale 0.8 (2 of 3); keep 0.1, scale 0.8 (1 of 3)",
    }


def test_every_number_of_tasks_has_a_tick_though_one_model_is_measured_with_the_largest_alone() -> None:
    figure = loss_figure({"CART": {8: [90.0], 20: [80.0]}, "MIMA, N = 20": {20: [85.0]}})
    assert list(figure.axes[0].get_xticks()) == [8, 20]
