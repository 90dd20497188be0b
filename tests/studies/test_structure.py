"""Study `structure` with a small net and few steps, and its verdicts on made-up rows."""

from pathlib import Path
from typing import Any

import pytest

from studies.lab.reductions import CONTROL, DARE, FULL, LORA, PRUNED, ROWS, SVD, TIES
from studies.old.papers.structure.results import Scores, findings, tables
from studies.old.results import StudyResult
from studies.old.rows import Row
from tests.studies.small_lab import ROOT, run_study
from tests.studies.test_coloured import WORLD

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "seeds": [0],
    "world": {**WORLD, "validation": 24, "test": 24},
    "steps": 10,
    "ranks": [1, 8],
    "lora": [2],
    "lora_rate": 0.01,
    "keeps": [0.1, 0.5],
}
AMOUNTS = [(FULL, None), (SVD, 1), (SVD, 8), *((kind, keep) for keep in (0.1, 0.5) for kind in PRUNED), (LORA, 2)]


def test_it_runs_whole_and_everything_is_whole_at_full_rank(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    for name in ("params.yaml", "studies"):
        (tmp_path / "root" / name).symlink_to(ROOT / name)
    found = StudyResult.read(run_study(tmp_path / "root", "structure", tmp_path / "scratch", **SMALL))
    judged = [row for row in found.rows if row["part"] in ("case", "target")]
    assert list(dict.fromkeys((row["kind"], row["amount"]) for row in judged)) == AMOUNTS
    assert len(judged) == len(AMOUNTS) * (3 * 2 + 1)
    stored = {(row["kind"], row["amount"]): row["stored"] for row in judged}
    assert stored[FULL, None] == 100
    assert stored[SVD, 1] < stored[SVD, 8] <= 100
    assert stored[ROWS, 0.1] < stored[ROWS, 0.5] < 100
    assert stored[DARE, 0.5] < stored[TIES, 0.5]  # its places need no bits
    memory = {row["kind"]: row["bytes"] for row in found.rows if row["part"] == "memory"}
    assert memory[LORA] < memory[FULL]
    assert len(found.findings) == 3 + 3 + 2
    assert set(found.figures) == {"rank", "pruned"}


def made_up(scores: dict[tuple[str, float | None], float], coefficient: float) -> list[Row]:
    rows: list[Row] = []
    for seed in range(3):
        for (kind, amount), height in scores.items():
            told = {"seed": seed, "kind": kind, "amount": amount, "stored": 50.0, "test_1": height}
            for case in ("irrelevant", "aligned", "contradictory"):
                rows += [
                    told | {"part": "case", "case": case, "way": way, "test_2": two}
                    for way, two in (("addition", height), ("unlearning", 10.0 if case != "aligned" else 90.0))
                ]
            rows.append(told | {"part": "target", "way": "a third task"})
        rows.append({"seed": seed, "part": "rows", "task": "a", "bimodality": coefficient})
    return rows


@pytest.mark.parametrize("good", [True, False])
def test_findings_follow_the_numbers(good: bool) -> None:
    heights = dict.fromkeys(AMOUNTS, 90.0) | {(CONTROL, 0.5): 70.0, (TIES, 0.1): 89.0}
    if not good:
        heights |= {(SVD, 1): 80.0, (LORA, 2): 80.0, (ROWS, 0.5): 80.0, (CONTROL, 0.5): 88.0, (ROWS, 0.1): 80.0}
    rows = made_up(heights, 0.8 if good else 0.4)
    scores = Scores(rows)
    assert scores.of(FULL, None, "addition") == [90.0] * 3
    assert scores.of(FULL, None, "unlearning") == [80.0] * 3
    assert scores.lost(CONTROL, 0.5)["a third task"] == [20.0 if good else 2.0] * 3
    found = [finding.holds for finding in findings(rows)]
    assert found == ([True] * 8 if good else [False, True, False, False, False, False, False, False])
    assert len(tables(rows)[0].rows) == len(AMOUNTS)
