"""Study `merge_frequency` on small nets, and its verdicts on made-up rows."""

from pathlib import Path
from statistics import fmean

import pytest
from studies.old.judging.merging import of_merge_frequency

from mergeflow.merging import configure
from studies.lab.inputs import Laboratory
from studies.old.papers.merge_frequency import study as merge_frequency
from studies.old.results import StudyResult
from studies.old.rows import Row, by_seed, picked
from tests.studies.small_lab import run_study, study_io


def test_small_nets_show_what_the_paper_shows(toy_lab: Path, tmp_path: Path) -> None:
    """G7: at the same budget four merges are better than one, for both schedules."""
    folder = run_study(toy_lab, "merge_frequency", tmp_path, rounds=[1, 4], multiples=[1, 2], course=["per_round_2_4"])
    result = StudyResult.read(folder)
    cells, tuned, course = result.tables
    assert [(row["schedule"], row["α"]) for row in cells.rows] == [
        (words, f"{multiple}/T") for words in ("one schedule", "a schedule per round") for multiple in (1, 2)
    ]
    assert [(row["N"], row["steps between merges"]) for row in tuned.rows] == [(1, 64), (4, 16)] * 2
    assert [row["steps"] for row in course.rows] == [16, 32, 48, 64]
    assert (folder / "frequency.svg").exists()
    assert of_merge_frequency(result.rows) == result.findings, "the rows have all that the findings rest on"
    way = picked(result.rows, part="course")
    assert [row["steps"] for row in way] == [16, 32, 48, 64] * len({row["seed"] for row in way})
    last = [row["accuracy"] for row in way if row["steps"] == 64]
    ends = picked(result.rows, schedule="per_round", multiple=2, rounds=4, model="validation")
    merged = by_seed(ends, lambda own: fmean(row["accuracy"] for row in own))
    assert last == pytest.approx(merged), "a course ends at the merged model of its run"
    for schedule in merge_frequency.SCHEDULES:
        own = [row for row in result.rows if row["schedule"] == schedule and row["model"] == "merged"]
        mean = {n: fmean(r["accuracy"] for r in own if (r["rounds"], r["multiple"]) == (n, 1)) for n in (1, 4)}
        assert mean[4] > mean[1] + 2, schedule


def test_one_merge_with_one_over_t_is_the_average(toy_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(toy_lab, "merge_frequency", tmp_path))
    average = inputs.scorer(inputs.run("mima_1").experts(0)).merge(configure("average"))
    found = merge_frequency.measure(inputs, "whole", 1, 1, 0)
    assert found["merged"] == pytest.approx(inputs.accuracy(average, "test"), abs=0.01)  # another order of the sum


def made_up(schedule: str, multiple: int, rounds: int, validation: float, test: float) -> list[Row]:
    known = {"schedule": schedule, "multiple": multiple, "rounds": rounds, "steps": 4}
    return [{**known, "seed": n, "validation": {"a": validation}, "merged": {"a": test}} for n in range(3)]


def test_alpha_is_chosen_on_validation_and_judged_on_test() -> None:
    rows = [
        *made_up("whole", 1, 1, 0.5, 0.6),
        *made_up("whole", 1, 16, 0.7, 0.8),
        *made_up("whole", 2, 16, 0.6, 0.9),  # better on test, which must not matter
        *made_up("per_round", 1, 1, 0.7, 0.6),
        *made_up("per_round", 1, 16, 0.7, 0.5),
    ]
    best = merge_frequency.tuned(rows)
    assert merge_frequency.values(best, "whole") == {1: [60.0] * 3, 16: [80.0] * 3}
    found = merge_frequency.findings(best)
    assert [finding.holds for finding in found] == [True, False, False]
    assert found[2].measured == "per round less whole, N = 16: -30.0 ± 0.0 points"
    assert "the largest tried, 2/T, in 0 of 6 cases" in merge_frequency.edge_note(best, [1, 2])
    assert "1/T, in 6 of 6 cases" in merge_frequency.edge_note(best, [1])


def test_of_equally_good_alpha_the_smallest_is_taken_whatever_the_last_bits_say() -> None:
    one, two = {"a": 0.1, "b": 0.2, "c": 0.3}, {"a": 0.3, "b": 0.2, "c": 0.1}  # their sums differ by rounding
    rows = [
        {"schedule": "whole", "multiple": multiple, "rounds": 4, "seed": 0, "validation": found}
        for multiple, found in ((2, one), (3, two))
    ]
    for own in (rows, [{**row, "validation": other} for row, other in zip(rows, (two, one), strict=True)]):
        assert [row["multiple"] for row in merge_frequency.tuned(own)] == [2]


def test_only_seeds_that_every_cell_has_are_compared() -> None:
    rows = [*made_up("whole", 1, 1, 0.5, 0.6), *made_up("whole", 2, 1, 0.5, 0.6)[:2]]
    assert {row["seed"] for row in merge_frequency.common_seeds(rows)} == {0, 1}
