"""Study `mima`, on a small laboratory and on made-up rows."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tasks.studies.inputs import StudyInputs
from tasks.studies.papers.mima import results as mima
from tasks.studies.papers.mima.findings import findings, further_findings
from tasks.studies.papers.mima.study import measure
from tasks.studies.pieces import grid
from tasks.studies.results import StudyResult
from tasks.studies.rows import Row
from tests.studies.small_lab import run_study, study_io
from tests.studies.toy_lab import NAMES

CHOICES: dict[str, Any] = {"rounds": [1, 4, 16], "budgets": [16], "at": [1, 4], "kept": [4]}


@pytest.fixture(scope="module")
def result(toy_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    folder = run_study(toy_lab, "mima", tmp_path_factory.mktemp("mima"), **CHOICES)
    assert {path.name for path in folder.glob("*.svg")} == {"accuracy.svg", "gap.svg", "tasks.svg"}
    return StudyResult.read(folder)


@pytest.mark.slow
def test_the_study_covers_every_n_task_and_method(result: StudyResult) -> None:
    accuracy, fixed, scales, experts, merged, further = result.tables
    assert [row["N"] for row in accuracy.rows] == [row["N"] for row in scales.rows] == [1, 4, 16]
    assert {"average", "task arithmetic", "TIES"} <= accuracy.rows[0].keys()
    assert {"task_arithmetic λ=0.4", "ties λ=1"} <= fixed.rows[0].keys()
    assert [row["task"] for row in experts.rows] == [row["task"] for row in merged.rows] == list(NAMES)
    assert [(row["S"], row["N"], row["optimiser"]) for row in further.rows][:2] == [(16, 1, "reset"), (16, 4, "reset")]
    assert {finding.system for finding in result.findings} == {"M1", "M2", "M4", "M6"}
    assert all(finding.margin for finding in result.findings)


def mean(result: StudyResult, model: str, **wanted: Any) -> float:
    wanted = {"steps": 64, "optimiser": "reset", "model": model} | wanted
    return fmean(r["accuracy"] for r in result.rows if all(r[key] == value for key, value in wanted.items()))


def test_small_nets_show_what_the_paper_shows(result: StudyResult) -> None:
    """M2, M4, M6 on small nets: the merge rises, the gap closes, the methods converge, a fixed λ degrades."""
    gap = {n: mean(result, "experts", rounds=n) - mean(result, "average", rounds=n) for n in (1, 16)}
    assert mean(result, "average", rounds=16) > mean(result, "average", rounds=1) + 3
    assert gap[1] > 20
    assert abs(gap[16]) < 3
    lead = {
        n: mean(result, mima.FIXED["task_arithmetic"], rounds=n) - mean(result, "average", rounds=n) for n in (1, 16)
    }
    assert lead[16] < lead[1]
    kept = [row["accuracy"] for row in result.rows if row["optimiser"] == "kept"]
    assert len(kept) == 2 * 3 * 2  # seeds, tasks, experts and average
    chosen = {row["model"] for row in result.rows if row["scale"] is not None}
    assert chosen == {"task_arithmetic", "ties"}
    assert [row["task"] for row in result.rows if row["model"] == "zero_shot"] == list(NAMES)


def test_experts_and_the_run_s_own_merge_are_judged_on_test(toy_lab: Path, tmp_path: Path) -> None:
    io = study_io(toy_lab, "mima", tmp_path)
    inputs = StudyInputs(io)
    row = measure(inputs, 4, 0, 0.2)
    assert row["average"] == inputs.accuracy(inputs.run("mima_4").merged(0, 4), "test")
    experts = inputs.run("mima_4").experts(0)
    assert row["experts"] == {task: inputs.accuracy(experts[task], "test")[task] for task in NAMES}


FIXED_TA, FIXED_TIES = mima.FIXED.values()


def made_up(rounds: int, **accuracy: float) -> list[Row]:
    """Return three seeds of one N on one task; of models that are not named, what `average` has."""
    models = dict.fromkeys(mima.MODELS, accuracy["average"]) | accuracy
    return [
        {"rounds": rounds, "seed": seed, **{name: {"a": value} for name, value in models.items()}} for seed in range(3)
    ]


GOOD = (
    {"average": 0.7, "ties": 0.9, "task_arithmetic": 0.8, FIXED_TA: 0.8, "experts": 0.97},
    {"average": 0.95, "ties": 0.955, "task_arithmetic": 0.955, FIXED_TA: 0.6, FIXED_TIES: 0.9, "experts": 0.96},
)
BAD = (
    {"average": 0.9, "ties": 0.9, "task_arithmetic": 0.89, FIXED_TA: 0.6, "experts": 0.97},
    {"average": 0.8, "ties": 0.83, "task_arithmetic": 0.83, FIXED_TA: 0.85, FIXED_TIES: 0.86, "experts": 0.9},
)


def rows_of(first: dict[str, float], last: dict[str, float]) -> list[Row]:
    return [*made_up(1, **first), *made_up(16, **last)]


def test_findings_follow_the_numbers() -> None:
    assert all(finding.holds is True for finding in findings(rows_of(*GOOD)))
    assert all(finding.holds is False for finding in findings(rows_of(*BAD)))
    (changed,) = [one for one in findings(rows_of(*GOOD)) if "accuracy of the experts." in one.claim]
    assert changed.measured == "N = 1 → 16: -1.0 ± 0.0 points", "what they lose is told as a loss"
    assert mima.gaps(rows_of(*GOOD), 1) == pytest.approx([27.0] * 3)
    disagreeing = rows_of(*GOOD)
    disagreeing[3]["average"] = {"a": 0.4}
    assert findings(disagreeing)[0].holds is None, "seeds that disagree decide nothing"


def test_one_step_one_task_or_one_n_is_enough_to_refute_a_claim() -> None:
    def verdicts(rows: list[Row]) -> dict[str, bool | None]:
        return {finding.claim: finding.holds for finding in findings(rows)}

    with_four = [*rows_of(*GOOD), *made_up(4, **GOOD[0] | {"average": 0.69})]
    assert verdicts(with_four)["The average and task arithmetic improve monotonically with N."] is False
    (uniform,) = [finding for finding in findings(with_four) if "uniformly" in finding.claim]
    assert uniform.holds is False
    assert "a, N = 1 → 4: -1.0 ± 0.0 points; from N = 1 to 16: a 25.0 ± 0.0" in uniform.measured

    def on_two_tasks() -> list[Row]:
        rows = rows_of(*GOOD)
        for row in rows:
            for name in mima.MODELS:
                row[name]["b"] = row[name]["a"]
        return rows

    two_tasks = on_two_tasks()
    for row in two_tasks[3:]:
        row["average"] = {"a": 0.97, "b": 0.69}
    assert verdicts(two_tasks)["The average improves uniformly on all tasks as N grows."] is False

    one_lost = on_two_tasks()
    for row in one_lost:
        row["experts"]["b"] = 0.9 if row["rounds"] == 16 else 0.94
    told = verdicts(one_lost)
    assert told["More rounds do not significantly change the accuracy of the experts."] is True
    assert told["More rounds do not significantly change the accuracy of the expert of any given task."] is False
    regained = [{**row, "rounds": 20, "experts": {"a": 0.96, "b": 0.94}} for row in one_lost if row["rounds"] == 16]
    told = verdicts([*one_lost, *regained])
    assert told["More rounds do not significantly change the accuracy of the expert of any given task."] is False

    below = verdicts(rows_of(GOOD[0] | {"task_arithmetic": 0.69}, GOOD[1]))
    assert below["With λ from validation task arithmetic and TIES are more accurate than the average."] is False


def test_a_fixed_scale_that_leads_at_one_large_n_does_not_lead_consistently() -> None:
    rows = [*rows_of(*GOOD), *made_up(20, **GOOD[1] | {FIXED_TIES: 0.97})]
    (found,) = [finding for finding in findings(rows) if "consistently" in finding.claim]
    assert (found.holds, "TIES, N = 16: -5.0" in found.measured) == (True, True)


def brief(rounds: int, steps: int, expert: float, seeds: int, optimiser: str = "reset") -> list[Row]:
    known = {"rounds": rounds, "steps": steps, "optimiser": optimiser, "experts": {"a": expert}, "average": {"a": 0.9}}
    return [{**known, "seed": seed} for seed in range(seeds)]


def test_budgets_and_kept_moments_are_compared_over_the_seeds_that_both_sides_have() -> None:
    once = [*brief(1, 240, 0.97, 3), *brief(16, 240, 0.9, 3)]
    good = [*once, *brief(1, 480, 0.97, 2), *brief(16, 480, 0.93, 2), *brief(16, 240, 0.905, 2, "kept")]
    found = further_findings(good, [1, 16], [16])
    assert [finding.holds for finding in found] == [True, True]
    assert "S = 240 → 480: 3.0 ± 0.0 points; at S = 240: -7.0 ± 0.0; at S = 480: -4.0 ± 0.0" in found[0].measured
    assert "experts, kept less reset: 0.5 ± 0.0 points" in found[1].measured
    bad = [*once, *brief(1, 480, 0.97, 2), *brief(16, 480, 0.9, 2), *brief(16, 240, 0.88, 2, "kept")]
    assert [finding.holds for finding in further_findings(bad, [1, 16], [16])] == [False, False]
    assert further_findings(once, [1, 16], []) == [], "one budget has nothing to be compared with"


def test_grid_is_the_paper_s() -> None:
    assert len(grid(0, 1, 0.05)) == len(grid(0.8, 1.8, 0.05)) == 21
    assert grid(0.8, 1.8, 0.05)[-1] == 1.8
