"""The studies of the adviser on suites: on small nets that learn."""

from pathlib import Path
from typing import Any

import pytest

from mergeflow.errors import MergeflowError
from studies.adviser import SUITE_GRID, WAYS, open_suite
from studies.lab.inputs import Laboratory
from studies.lab.rows import select
from studies.lab.study import Result
from tests.studies.small_lab import run_result, study_io
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
def result(toy_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_result(toy_lab, "adviser_regimes", tmp_path_factory.mktemp("regimes"), **SMALL)


def test_every_way_is_chosen_on_validation_within_what_it_tried(result: Result) -> None:
    sets = select(result.rows, part="set")
    assert len(sets) == 2 * len(SEEDS) * 3  # runs, seeds, a suite and two pairs
    assert set(sets["size"]) == {2, 3}
    assert sets.scale_grid.isin(SUITE_GRID).all()
    assert (sets.validation_grid >= sets.validation_fixed).all()  # the grid has λ = 0.4
    tried = sets[[f"tried_{way}" for way in ("grid", "lengths", "optuna", "fixed")]]
    assert (tried == [20, 4, 4, 1]).all(axis=None)
    assert sets[[f"test_{way}" for way in WAYS]].apply(lambda column: column.between(0, 100)).all(axis=None)
    inside = (sets.low_lengths <= sets.scale_grid) & (sets.scale_grid <= sets.high_lengths)
    assert (sets.hit_lengths == inside).all()
    # short task vectors of one epoch point elsewhere, so that λ° of three is below that of two
    lows = select(sets, run="one_epoch").groupby("size").low_lengths
    assert lows.max()[3] < lows.min()[2]


def test_negating_a_task_unlearns_it(result: Result) -> None:
    edits = select(result.rows, part="edit")
    assert len(edits) == 2 * len(SEEDS) * 6  # ordered pairs of three tasks
    assert set(edits.forget) == set(NAMES)
    chosen = select(edits, run="one_epoch")
    assert chosen.left.mean() < chosen.left_out.mean() - 5
    assert edits.loss.mean() > 0, "at a cost to the others"
    assert len(result.findings) == 7 + 4
    assert set(result.draw()) == {"scales", "costs"}


def test_the_base_of_a_run_in_rounds_is_where_its_last_round_began(toy_lab: Path, tmp_path: Path) -> None:
    inputs = Laboratory(study_io(toy_lab, "adviser_regimes", tmp_path, **SMALL))
    rounds, epoch = (open_suite(inputs, run, 0) for run in ("mima_4", "one_epoch"))
    assert all((value == inputs.base[name]).all() for name, value in epoch.start.items())
    assert any((value != inputs.base[name]).any() for name, value in rounds.start.items())
    with pytest.raises(MergeflowError, match="where it must not"):
        rounds.inputs.blind().examples("test")
    merged = epoch.merged({"north": 1.0})
    assert all((merged[name] - value).abs().max() < 1e-6 for name, value in epoch.experts["north"].items())
