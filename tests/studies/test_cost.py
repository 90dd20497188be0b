"""Study `cost` on small nets, and its verdicts on made-up rows."""

from pathlib import Path
from statistics import fmean

import pytest
from studies.old.judging.merging import of_cost

from mergeflow.evaluation.averages import mean
from mergeflow.merging import configure
from studies.lab.inputs import Laboratory
from studies.old.papers.cost import study as cost
from studies.old.papers.cost.rates import best_rate, rate_note, try_rates
from studies.old.results import StudyResult
from studies.old.rows import Row, picked
from tests.studies.small_lab import study_io
from tests.studies.toy_lab import SEEDS


def test_small_nets_stand_beside_their_cost(toy_lab: Path, tmp_path: Path) -> None:
    """M7: with many rounds merging comes near to joint training, at the same budget; one merge does not."""
    choices = {"joint": ["joint"], "iterative": ["mima_4", "mima_16"], "one_shot": ["mima_1"], "rank_ratio": [0.1]}
    choices["rates"] = ["joint_half"]
    io = study_io(toy_lab, "cost", tmp_path, **choices)
    cost.run(io)
    folder = tmp_path / "building/outputs/studies/cost"
    result = StudyResult.read(folder)
    table, chosen, rates = result.tables
    assert [(row["model"], row["seeds"], row["chosen"]) for row in rates.rows] == [
        ("joint training", 1, "×"),
        ("joint training, half the rate", 1, ""),
    ]
    assert [row["learning rate"] for row in rates.rows] == ["0.005", "1e-06"]
    assert "0.005, stands at the end of those tried, 1e-06, 0.005" in result.notes[-1]
    joint, four, many, once = table.rows
    names = ["joint training", "MIMA N = 4", "MIMA N = 16", "one-shot merge of mima_1"]
    assert [row["model"] for row in table.rows] == names
    assert joint["task steps"] == four["task steps"] == once["task steps"] == 64 * 3
    assert four["task steps per round"] == 16 * 3
    assert joint["examples"] == once["examples"]
    assert 4 * float(four["sent, MiB"]) == pytest.approx(float(many["sent, MiB"]), abs=2)  # type: ignore[arg-type]
    assert joint["sent, MiB"] == "the data"
    images = int(str(once["examples of the selection"])) / fmean(int(str(row["candidates"])) for row in chosen.rows)
    assert joint["examples of the selection"] == round(2 * images), "two rates, on the images that merges are chosen by"
    assert four["examples of the selection"] == 0
    assert [row["seed"] for row in chosen.rows] == SEEDS
    assert "seconds" not in (folder / "result.json").read_text(), "times differ from run to run"
    times, merges = io.costs["tables"]
    assert [row["model"] for row in times["rows"]] == names
    assert times["rows"][1]["a round"]
    assert [row["method"] for row in merges["rows"]] == ["average", "task_arithmetic", "ties", "cart", "tsv"]

    def mean(run: str) -> float:
        return fmean(row["accuracy"] for row in picked(result.rows, part="model", run=run))

    assert of_cost(result.rows) == result.findings, "the rows have all that the findings rest on"
    assert [row["run"] for row in picked(result.rows, part="rate")] == ["joint", "joint_half"]

    assert mean("mima_1") < mean("mima_16") < mean("joint")
    assert mean("mima_1") < mean("joint") - 3


def test_joint_training_takes_the_rate_that_is_best_on_validation(toy_lab: Path, tmp_path: Path) -> None:
    """Whichever run is named first: with the rate that learns nothing in its place, the other one is taken."""
    choices = {"joint": ["joint_half"], "rates": ["joint"], "iterative": ["mima_4"], "one_shot": ["mima_1"]}
    io = study_io(toy_lab, "cost", tmp_path, **choices, rank_ratio=[0.1])
    found = try_rates(Laboratory(io), ["joint_half", "joint"])
    assert [row["run"] for row in found] == ["joint_half", "joint"]
    assert found[1]["validation"][0] > found[0]["validation"][0] + 20
    cost.run(io)
    result = StudyResult.read(tmp_path / "building/outputs/studies/cost")
    assert result.tables[0].rows[0]["model"] == "joint training"
    looked_at = {row["run"] for row in picked(result.rows, part="model")}
    assert looked_at == {"joint", "mima_4", "mima_1"}, "no look at test with the others"


def test_the_one_shot_merge_is_the_best_on_validation(toy_lab: Path, tmp_path: Path) -> None:
    io = study_io(toy_lab, "cost", tmp_path, rank_ratio=[0.1])
    inputs, options = Laboratory(io), cost.DECLARED.chosen(io)
    experts = inputs.run("mima_1").experts(0)
    found = cost.best_merge(inputs, options, experts)
    average = inputs.scorer(experts).merge(configure("average"))
    assert found["validation"] > mean(inputs.accuracy(average, "validation"))


def test_every_family_competes(toy_lab: Path, tmp_path: Path) -> None:
    io = study_io(toy_lab, "cost", tmp_path)
    methods = [family.method for family in cost.families(cost.DECLARED.chosen(io))]
    assert methods == ["average", "task_arithmetic", "ties", "cart", "tsv"]


def made_up(run: str, accuracy: float, validation: float | None = None) -> list[Row]:
    rounds = int(run.removeprefix("mima_")) if run.startswith("mima") else 0
    known = {"run": run, "test": {"a": accuracy}, "tried": int("epoch" in run), "rounds": rounds, "budget": 240}
    known["validation"] = accuracy if validation is None else validation
    return [{**known, "seed": seed} for seed in range(3)]


def test_a_rate_inside_those_tried_is_told_from_one_at_their_end() -> None:
    rows: list[Row] = [
        {"run": str(rate), "rate": rate, "validation": [level, level + 1.0]}
        for rate, level in ((1.0, 70.0), (2.0, 80.0), (4.0, 79.0))
    ]
    assert best_rate(rows)["rate"] == 2.0
    assert "2, stands inside those tried, 1, 2, 4" in rate_note(rows)
    assert "4, stands at the end of" in rate_note([rows[0], rows[2]])
    assert "one learning rate" in rate_note(rows[:1])


def test_findings_follow_the_numbers() -> None:
    good = [*made_up("joint", 0.9), *made_up("mima_1", 0.5), *made_up("mima_16", 0.89), *made_up("one_epoch", 0.8)]
    assert [finding.holds for finding in cost.findings(good)] == [True, True]
    bad = [*made_up("joint", 0.9), *made_up("mima_1", 0.9), *made_up("mima_16", 0.7), *made_up("one_epoch", 0.8)]
    assert [finding.holds for finding in cost.findings(bad)] == [False, False]
    assert all(finding.ours for finding in cost.findings(bad))


def test_the_one_shot_row_that_is_compared_is_the_best_on_validation_not_on_test() -> None:
    others = [*made_up("joint", 0.9), *made_up("mima_1", 0.5), *made_up("mima_16", 0.85)]
    once = [*made_up("one_epoch", 0.8, validation=0.84), *made_up("epoch", 0.88, validation=0.83)]
    assert cost.findings([*others, *once])[1].holds is True
