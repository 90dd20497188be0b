"""Study `mergeability_suites` on a small CLIP; by which prediction the command answers, on made-up rows."""

from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from flows.linearity_answer import ANSWER, predicted, sentence
from studies.old.papers.mergeability.choosing import chosen
from studies.old.papers.mergeability.results import LAST, PREDICTIONS, across_runs, within_runs
from studies.old.papers.mergeability.study import of_weights
from studies.old.papers.mergeability_suites.results import findings, pairs_of, tables
from studies.old.results import StudyResult
from tests.studies.small_lab import ROOT, run_study

RUNS = {"experts": "200 steps"}
NAMES = "abcde"


@pytest.mark.slow
def test_every_pair_of_the_largest_suite_is_merged_once(many_lab: Path, tmp_path: Path) -> None:
    runs = {**RUNS, "mima_3": "MIMA, N = 2"}
    folder = run_study(many_lab, "mergeability_suites", tmp_path, runs=runs, counts=[2, 3], images=32)
    result = StudyResult.read(folder)
    assert len(result.rows) == 2 * 2 * 3, "runs, seeds, pairs of three tasks"
    assert {f"block_{n}" for n in range(1, 5)} < set(result.rows[0])
    assert {path.stem for path in folder.glob("*.svg")} == {"predictions"}
    assert [(row["tasks"], row["pairs"]) for row in result.tables[1].rows] == [(2, 1), (3, 3)] * 2
    assert all(finding.ours and finding.system == "L1" for finding in result.findings)


def made_up(sign: int) -> list[dict[str, Any]]:
    """Rows whose loss rises with the CTL error; the cosine follows it (sign 1) or has nothing to do with it (0)."""
    pairs = [f"{a} – {b}" for n, a in enumerate(NAMES) for b in NAMES[n + 1 :]]
    return [
        {"seed": seed, "run": "experts", "pair": pair, "loss": float(number), "distance": 1.0}
        | {"cosine": -sign * number / 10, "sign_conflict": number % 3, "block_1": number % 2, "block_2": number / 100}
        for seed in range(3)
        for number, pair in enumerate(pairs)
    ]


def test_findings_are_of_each_suite() -> None:
    suites = {3: NAMES[:3], 5: NAMES}
    assert len(pairs_of(made_up(0), suites[3])) == 3 * 3
    found = findings(made_up(0), suites, RUNS)
    assert [one.holds for one in found] == [True] * 5
    assert "3 tasks: 1.00 ± 0.00; 5 tasks: 1.00 ± 0.00" in found[0].measured
    assert [one.holds for one in findings(made_up(1), suites, RUNS)][:2] == [True, False], "no better than the cosine"
    backwards = [row | {"loss": -row["loss"]} for row in made_up(0)]
    assert findings(backwards, suites, RUNS)[0].holds is False
    assert [len(table.rows) for table in tables(made_up(0), suites, RUNS)] == [6, 2]


def test_the_command_answers_by_weights_alone_where_features_rank_no_better() -> None:
    assert chosen(made_up(0), RUNS) == LAST
    assert chosen(made_up(1), RUNS) == "cosine of task vectors"


def test_the_commands_answer_is_what_the_record_chose() -> None:
    rows = pq.read_table(ROOT / "studies/records/mergeability.parquet").to_pylist()
    judged = yaml.safe_load((ROOT / "studies/params.yaml").read_text())["studies"]["mergeability"]["runs"]
    name = chosen(rows, judged)
    assert name == ANSWER.prediction
    assert round(fmean(within_runs(rows, judged, PREDICTIONS[name])), 2) == ANSWER.within
    assert round(fmean(across_runs(rows, judged, PREDICTIONS[name])), 2) == ANSWER.across
    page = (ROOT / "docs/linearity.md").read_text()
    assert f"the {name}" in page
    assert f"{ANSWER.within:.2f}" in page
    assert f"{ANSWER.across:.2f}" in page


def test_the_prediction_is_the_one_of_the_study() -> None:
    base, first, second = ({"w": torch.tensor(values)} for values in ([0.0, 1.0], [3.0, 2.0], [0.0, 5.0]))
    vectors = [{"w": one["w"] - base["w"]} for one in (first, second)]
    assert predicted(first, second) == pytest.approx(PREDICTIONS[ANSWER.prediction](of_weights(*vectors)))


def test_one_pair_is_not_told_that_it_loses_most() -> None:
    assert sentence({"a – b": 1.0, "a – c": 2.0}).startswith("a – c will lose most")
    assert "will lose most" not in sentence({"a – b": 1.0})
