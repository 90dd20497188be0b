"""The studies of the adviser on suites: on small nets that learn, and their verdicts on made-up rows."""

from pathlib import Path
from typing import Any

import pytest

from mergeflow.errors import MergeflowError
from studies.lab.inputs import Laboratory
from studies.old.papers.adviser_suites.measuring import GRID, WAYS, Options, open_suite
from studies.old.papers.adviser_suites.results import findings, tables
from studies.old.results import StudyResult
from studies.old.rows import Row
from tests.studies.small_lab import run_study, study_io
from tests.studies.toy_lab import NAMES, SEEDS

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "runs": ["one_epoch", "mima_4"],
    "counts": [3],
    "pairs": 2,
    "triples": 0,
    "samples": 60,
    "validation": 100,
    "test": 200,
    "edited": 200,
}


@pytest.fixture(scope="module")
def result(toy_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    return StudyResult.read(run_study(toy_lab, "adviser_regimes", tmp_path_factory.mktemp("regimes"), **SMALL))


def test_every_way_is_chosen_on_validation_within_what_it_tried(result: StudyResult) -> None:
    sets = [row for row in result.rows if row["part"] == "set"]
    assert len(sets) == 2 * len(SEEDS) * 3  # runs, seeds, a suite and two pairs
    assert {row["size"] for row in sets} == {2, 3}
    for row in sets:
        assert row["scale_grid"] in GRID
        assert row["validation_grid"] >= row["validation_fixed"]  # the grid has λ = 0.4
        assert [row[f"tried_{way}"] for way in ("grid", "lengths", "optuna", "fixed")] == [20, 4, 4, 1]
        assert all(0 <= row[f"test_{way}"] <= 100 for way in WAYS)
        assert row["hit_lengths"] == (row["low_lengths"] <= row["scale_grid"] <= row["high_lengths"])
    # short task vectors of one epoch point elsewhere, so that λ° of three is below that of two
    one_epoch = {
        size: [r["low_lengths"] for r in sets if (r["run"], r["size"]) == ("one_epoch", size)] for size in (2, 3)
    }
    assert max(one_epoch[3]) < min(one_epoch[2])


def test_negating_a_task_unlearns_it(result: StudyResult) -> None:
    edits = [row for row in result.rows if row["part"] == "edit"]
    assert len(edits) == 2 * len(SEEDS) * 6  # ordered pairs of three tasks
    assert {row["forget"] for row in edits} == set(NAMES)
    own = [row for row in edits if row["run"] == "one_epoch"]
    assert sum(row["left"] for row in own) < sum(row["left_out"] for row in own) - 5 * len(own)
    assert len(result.findings) == 7 + 4
    assert set(result.figures) == {"scales", "costs"}


def test_the_base_of_a_run_in_rounds_is_where_its_last_round_began(toy_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(toy_lab, "adviser_regimes", tmp_path, **SMALL))
    rounds, epoch = (open_suite(inputs, run, 0) for run in ("mima_4", "one_epoch"))
    assert all((value == inputs.base[name]).all() for name, value in epoch.start.items())
    assert any((value != inputs.base[name]).any() for name, value in rounds.start.items())
    with pytest.raises(MergeflowError, match="where it must not"):
        rounds.inputs.blind().examples("test")
    merged = epoch.merged({"north": 1.0})
    assert all((merged[name] - value).abs().max() < 1e-6 for name, value in epoch.experts["north"].items())


def test_experts_that_somebody_published_were_tuned_from_the_base(toy_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(toy_lab, "adviser_regimes", tmp_path, **{**SMALL, "runs": ["published"]}))
    suite = open_suite(inputs, "published", 0)
    assert all((value == inputs.base[name]).all() for name, value in suite.start.items())
    ours = inputs.run("mima_1").experts(0)
    assert all((value == ours[task][name]).all() for task, one in suite.experts.items() for name, value in one.items())


def made_up(seed: int, size: int, test: dict[str, float], **changes: Any) -> Row:
    row: Row = {"part": "set", "run": "a", "seed": seed, "tasks": "", "size": size}
    for way in WAYS:
        row |= {f"tried_{way}": 4, f"scale_{way}": 0.5, f"validation_{way}": test[way], f"test_{way}": test[way]}
    return row | {"tried_grid": 20, "hit_theory": False, "hit_lengths": True} | changes


def edit(seed: int, number: int, cosine: float) -> Row:
    told = {"eq11": -cosine, "changes": cosine, "response": 0.0, "cosine": cosine}
    row = {"part": "edit", "run": "a", "seed": seed, "keep": f"{number}", "forget": "f", **told}
    return row | {"loss": 10 * cosine, "left_out": 80.0, "left": 20.0 + seed}


def test_findings_follow_the_numbers() -> None:
    test = {"grid": 90.0, "theory": 80.0, "lengths": 89.9, "optuna": 85.0, "fixed": 89.9}
    rows = [made_up(seed, size, test) for seed in range(3) for size in (2, 8)]
    rows += [edit(seed, number, 0.1 * number) for seed in range(3) for number in range(4)]
    found = findings(rows)
    for group in (found[:7], found[7:14]):  # few tasks, whole suites
        assert [one.holds for one in group] == [False, True, False, True, True, True, True]
    assert [one.holds for one in found[14:]] == [False, True, False, True]
    assert "8 × fewer" not in found[3].measured
    assert "5.0 × fewer candidates" in found[3].measured
    many = [row | {"tried_lengths": 5} for row in rows]
    assert findings(many)[3].holds is False, "four times fewer are not five"
    assert [len(table.rows) for table in tables(rows)] == [2 * len(WAYS), 1]


def test_choices_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1 item"):
        Options.model_validate({"runs": [], "counts": [8]})
