"""Study `one_epoch` on small nets, and its verdicts on made-up rows."""

from pathlib import Path
from statistics import fmean
from typing import Any

from studies.old.judging.merging import of_one_epoch

from studies.old.papers.one_epoch import study as one_epoch
from studies.old.results import StudyResult
from studies.old.rows import Row
from tests.studies.small_lab import run_study
from tests.studies.toy_lab import NAMES, SEEDS

CHOICES: dict[str, Any] = {"epochs": [1, 2, 3], "further": {"one_epoch": "mima_1"}}


def test_small_nets_show_what_the_paper_shows(toy_lab: Path, tmp_path: Path) -> None:
    """G5, G9: one epoch is nearly enough for merging; experts go on getting better, their merge does not as much."""
    folder = run_study(toy_lab, "one_epoch", tmp_path, **CHOICES)
    result = StudyResult.read(folder)
    tasks, curve, pairs = result.tables
    assert [row["task"] for row in tasks.rows] == [*NAMES, "mean"]
    assert [row["trained"] for row in curve.rows][1:] == [f"epoch {number} of 3" for number in (1, 2, 3)]
    assert [row["steps"] for row in curve.rows] == [38, 38, 76, 114]
    assert [row["steps of one epoch"] for row in pairs.rows] == [38, 38]
    assert all(str(row["λ"]).count(",") == len(SEEDS) - 1 for row in curve.rows)
    assert {path.stem for path in folder.glob("*.svg")} == {"tasks", "curve"}

    def mean(run: str, epoch: int | None, model: str) -> float:
        wanted = (run, epoch, model)
        return fmean(r["accuracy"] for r in result.rows if (r["run"], r["epoch"], r["model"]) == wanted)

    assert mean("converged", 3, "experts") > mean("converged", 1, "experts") + 2
    assert mean("one_epoch", None, "merged") > mean("converged", 3, "merged") - 5
    assert {row["seed"] for row in result.rows} == {*SEEDS, None}
    assert of_one_epoch(result.rows, one_epoch.Options.model_validate(CHOICES)) == result.findings


def made_up(epoch: int | None, experts: float, merged: float, other: float | None = None) -> list[Row]:
    """Three seeds of two tasks; `other` is the merge's accuracy on the second one."""
    merges = {"a": merged, "b": merged if other is None else other}
    return [
        {
            "seed": n,
            "run": "made up",
            "steps": 46.0,
            "epoch": epoch,
            "length": float(epoch or 1),
            "experts": {"a": experts},
            "merged": merges,
        }
        for n in range(3)
    ]


def verdicts(short: list[Row], curve: list[Row], *further: one_epoch.Pair) -> list[bool | None]:
    found = one_epoch.findings({"one epoch": short, "converged": curve[-3:]}, curve, further)
    assert [finding.ours for finding in found] == [True, False, False, *(True for _ in further), True, False]
    return [finding.holds for finding in found]


def test_findings_follow_the_numbers() -> None:
    short = made_up(None, 0.9, 0.8)
    saturating = [*made_up(1, 0.9, 0.79), *made_up(2, 0.95, 0.82), *made_up(3, 0.97, 0.79)]
    assert verdicts(short, saturating) == [True, True, True, True, True]
    rising = [*made_up(1, 0.97, 0.5), *made_up(2, 0.95, 0.6), *made_up(3, 0.95, 0.9)]
    assert verdicts(short, rising) == [False, False, False, False, False]
    assert verdicts(short, saturating, (short, rising[-3:])) == [True, True, True, False, True, True]


def test_one_task_that_loses_more_refutes_that_it_is_so_across_all_tasks() -> None:
    curve = [*made_up(1, 0.9, 0.79), *made_up(2, 0.95, 0.82), *made_up(3, 0.97, 0.8)]
    assert verdicts(made_up(None, 0.9, 0.84, 0.75), curve)[:3] == [True, False, True]
    assert verdicts(made_up(None, 0.9, 0.79), curve)[:3] == [True, True, False]


def test_the_limits_of_rising_and_saturating_are_those_that_the_rule_prints() -> None:
    """Experts gain ≥ 0 points; the merge gains ≤ 2 points, both from the first epoch to the last."""
    short = made_up(None, 0.9, 0.8)
    for gain, rise, holds in ((0.001, 0.019, True), (-0.001, 0.019, False), (0.001, 0.021, False)):
        curve = [*made_up(1, 0.9, 0.7), *made_up(2, 0.5, 0.1), *made_up(3, 0.9 + gain, 0.7 + rise)]
        assert verdicts(short, curve)[-2] is holds
