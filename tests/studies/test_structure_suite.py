"""Study `structure_suite` on three small tasks of pictures, with experts of all weights and of adapters."""

from statistics import fmean

import pytest

from studies.lab.reductions import FULL, LORA, PRUNED, ROWS, SVD
from studies.old.papers.structure.results import addition, third, unlearning
from studies.old.results import StudyResult
from tests.evaluation.small import TASKS
from tests.studies.small_lab import make_lab, run_study

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    root = tmp_path_factory.mktemp("structure_suite") / "lab"
    adapters = {"regime": "lora", "lora": {"rank": 2, "alpha": 4}}
    make_lab(root, {"plain": {"seeds": 1, "regime": "steps"}, "lora": {"seeds": 1} | adapters}, steps=2)
    options = {"whole": "plain", "lora": "lora", "ranks": [1, 64], "keeps": [0.5], "scales": [0.2, 0.4]}
    return StudyResult.read(run_study(root, "structure_suite", root.parent / "scratch", **options))


def test_every_task_is_unlearned_and_left_out_by_every_variant(result: StudyResult) -> None:
    judged = [row for row in result.rows if row["part"] != "rows"]
    kinds = {(FULL, None), (SVD, 1), (SVD, 64), *((kind, 0.5) for kind in PRUNED), (LORA, 2)}
    assert {(row["kind"], row["amount"]) for row in judged} == kinds
    assert len(judged) == len(kinds) * len(TASKS) * 3
    assert (len(result.findings), set(result.figures)) == (8, {"rank", "pruned"})
    stored = {(row["kind"], row["amount"]): row["stored"] for row in judged}
    assert stored[LORA, 2] < stored[SVD, 1] < stored[ROWS, 0.5] < stored[FULL, None] == 100


def test_what_is_whole_does_what_whole_ones_do(result: StudyResult) -> None:
    def scores(kind: str, amount: float | None) -> list[float]:
        own = [row for row in result.rows if (row["kind"], row["amount"]) == (kind, amount)]
        return [score(own) for score in (addition, unlearning, third)]

    whole = scores(FULL, None)
    assert scores(SVD, 64) == pytest.approx(whole)
    summed = [row for row in result.rows if row["way"] == "addition" and row["kind"] == FULL]
    assert fmean(row["test_2"] for row in summed) == pytest.approx(whole[0])  # the mean over all tasks, whichever is f
