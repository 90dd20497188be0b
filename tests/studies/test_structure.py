"""Studies `structure` with a small net and few steps, `structure_suite` on three small tasks of pictures."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from studies.lab.rows import select
from studies.lab.study import Result
from studies.structure import CONTROL, DARE, FULL, LORA, PRUNED, ROWS, SCORES, SVD, TIES, score
from tests.evaluation.small import TASKS
from tests.studies.small_lab import make_lab, run_result
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


def stored_by(rows: pd.DataFrame) -> dict[tuple[str, float | None], float]:
    """Read the size of each variant, in %, by kind and amount."""
    judged = select(rows, part=["case", "target"]).drop_duplicates(["kind", "amount"])
    return {
        (kind, None if pd.isna(amount) else amount): stored
        for kind, amount, stored in zip(judged.kind, judged.amount, judged.stored, strict=True)
    }


def test_it_runs_whole_and_everything_is_whole_at_full_rank(bare_root: Path, tmp_path: Path) -> None:
    result = run_result(bare_root, "structure", tmp_path / "scratch", **SMALL)
    stored = stored_by(result.rows)
    amounts = [(FULL, None), (SVD, 1), (SVD, 8), *((kind, keep) for keep in (0.1, 0.5) for kind in PRUNED), (LORA, 2)]
    assert list(stored) == amounts
    assert len(select(result.rows, part=["case", "target"])) == len(amounts) * (3 * 2 + 1)
    assert stored[FULL, None] == 100
    assert stored[SVD, 1] < stored[SVD, 8] <= 100
    assert stored[ROWS, 0.1] < stored[ROWS, 0.5] < 100
    assert stored[CONTROL, 0.5] == stored[ROWS, 0.5]
    assert stored[DARE, 0.5] < stored[TIES, 0.5]  # its places need no bits
    assert len(result.findings) == 3 + 3 + 2
    assert set(result.draw()) == {"rank", "pruned"}


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Result:
    root = tmp_path_factory.mktemp("structure_suite") / "lab"
    adapters = {"regime": "lora", "lora": {"rank": 2, "alpha": 4}}
    make_lab(root, {"plain": {"seeds": 1, "regime": "steps"}, "lora": {"seeds": 1} | adapters}, steps=2)
    options = {"whole": "plain", "lora": "lora", "ranks": [1, 64], "keeps": [0.5], "scales": [0.2, 0.4]}
    return run_result(root, "structure_suite", root.parent / "scratch", **options)


def test_every_task_is_unlearned_and_left_out_by_every_variant(suite: Result) -> None:
    stored = stored_by(suite.rows)
    assert set(stored) == {(FULL, None), (SVD, 1), (SVD, 64), *((kind, 0.5) for kind in PRUNED), (LORA, 2)}
    assert len(select(suite.rows, part=["case", "target"])) == len(stored) * len(TASKS) * 3
    assert (len(suite.findings), set(suite.draw())) == (8, {"rank", "pruned"})
    assert stored[LORA, 2] < stored[SVD, 1] < stored[ROWS, 0.5] < stored[FULL, None] == 100


def test_what_is_whole_does_what_whole_ones_do(suite: Result) -> None:
    whole, same = ([score(suite.rows, *variant, way)[0] for way in SCORES] for variant in ((FULL, None), (SVD, 64)))
    assert same == pytest.approx(whole)
    summed = select(suite.rows, way="addition", kind=FULL)
    assert summed.test_2.mean() == pytest.approx(whole[0])  # the mean over all tasks, whichever is f
