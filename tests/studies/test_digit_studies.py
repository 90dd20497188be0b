"""Studies `analogy` and `unseen_tasks` with a small net and few steps, and their arithmetic against references."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification
from mergeflow.modality import Network
from studies import unseen_tasks
from studies.analogy import ATTRIBUTES, SCALES, accuracy_of_sum
from studies.lab.analogies import ANALOGY, NEAREST, SINGLE, SUM, UNLABELLED, target_rows
from studies.lab.digits import Adapting, ColouredWorld, Digits, Look, Pretrained, open_digits, shown
from studies.lab.rows import select
from studies.unseen_tasks import (
    EXPERTS,
    FEW,
    TARGETS,
    TUNED,
    Answered,
    Group,
    by_ridge,
    by_theory,
    few,
    left_out_error,
    left_out_loss,
    similarities,
    solve,
)
from tests.studies.small_lab import ROOT, run_result
from tests.studies.test_coloured import WORLD

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"seeds": [0], "world": {**WORLD, "validation": 24, "test": 24}, "steps": 6}


@pytest.fixture(scope="module")
def digits() -> Digits:
    return open_digits(ColouredWorld.model_validate(WORLD), ROOT)["train"]


def test_looks_show_what_they_say(digits: Digits) -> None:
    looks = (Look(), Look(angle=90), Look(dark=True), Look(outlined=True))
    upright, turned, dark, outlined = (shown(digits, look, "a", (0, 1)) for look in looks)
    assert set(upright.labels.tolist()) == {0, 1}
    images = [np.asarray(rows.inputs) for rows in (upright, turned, dark, outlined)]
    assert (np.rot90(images[0], axes=(1, 2)) == images[1]).all()
    assert (images[2][..., 0] == 255 - images[0][..., 0]).all()
    assert not images[2][..., 2].any()
    around = np.lib.stride_tricks.sliding_window_view(images[0][..., 0], (3, 3), axis=(1, 2)).astype(int)
    assert (images[3][:, 1:-1, 1:-1, 0] == around.max((3, 4)) - around.min((3, 4))).all()
    chosen = few(upright, 5, 0)
    assert len(chosen) == 5
    assert (few(upright, 5, 0).labels == chosen.labels).all()


def test_every_task_is_reached_from_the_other_three(bare_root: Path, tmp_path: Path) -> None:
    result = run_result(bare_root, "analogy", tmp_path, **SMALL)
    rows = result.rows
    assert len(rows.drop_duplicates(["attributes", "target"])) == 12
    ways = select(rows, target="0 to 4 upright").set_index("way")
    assert len(ways) == len(rows) / 12 == 9
    assert ways.validation[NEAREST] == ways.validation[list(SINGLE)].max()
    assert ways.scale[[*SINGLE, SUM, ANALOGY]].isin(SCALES).all()
    assert ways.validation[ANALOGY] >= ways.validation[UNLABELLED]  # 1 is among the λ
    assert (len(result.tables), len(result.findings), list(result.draw())) == (3, 12, ["targets"])
    assert all(sorted(sum(attribute.splits.values(), ())) == list(range(10)) for attribute in ATTRIBUTES.values())


def test_an_analogy_takes_the_third_vector_away() -> None:
    """Each expert knows one direction of the inputs, and the target's labels are the sign of x_a + x_b − x_c."""
    inputs = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    data = Classification("d", inputs, (inputs @ torch.tensor([1.0, 1.0, -1.0]) > 0).long())
    base = Pretrained(Network(torch.nn.Linear(3, 2, bias=False)), {"weight": torch.zeros(2, 3)})
    vectors = {
        task: {"weight": torch.stack([torch.zeros(3), row])} for task, row in zip("abc", torch.eye(3), strict=True)
    }
    vectors["d"] = vectors["a"]
    reached = partial(accuracy_of_sum, base, vectors, dict.fromkeys(("validation", "test"), data))
    test = {row["way"]: row["test"] for row in target_rows(reached, SCALES, "d", "abc")}
    assert test[UNLABELLED] == test[ANALOGY] == 100
    assert test[SUM] < 90


def test_samples_give_coefficients_in_every_way(bare_root: Path, tmp_path: Path) -> None:
    result = run_result(bare_root, "unseen_tasks", tmp_path, **SMALL, short=[2, 4], factors=[1.0], counts=[8, 16])
    rows = result.rows
    assert len(rows) == sum(map(len, TARGETS.values())) * (3 + 2 * 5)
    scales = rows[[f"scale_{number}" for number in range(1, 5)]]
    assert (scales[rows.way == NEAREST].apply(sorted, axis=1, result_type="expand") == [0, 0, 0, 1]).all(axis=None)
    with_scales = rows.way.isin(set(FEW) - {TUNED})
    assert (scales.notna().all(axis=1) == with_scales).all()
    assert scales[~with_scales].isna().all(axis=None)
    assert (len(result.tables), len(result.findings), list(result.draw())) == (2, 10, ["samples"])
    assert all(len(values) == 4 for values in EXPERTS.values())


def pictures(examples: Classification) -> set[bytes]:
    return {picture.tobytes() for picture in np.asarray(examples.inputs)}


def test_tuning_is_judged_on_samples_that_it_left_out(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[bytes]] = []
    samples = few(shown(digits, Look(), "a"), 9, 0)

    def learn(model: Any, start: Any, data: Classification, tuning: Adapting, seed: int) -> Any:
        seen.append(pictures(data))
        if tuning.learning_rate > 1:
            raise MergeflowError("diverged")
        return {}

    def answer(model: Any, state: Any, held: Classification) -> torch.Tensor:
        assert not seen[-1] & pictures(held)
        return torch.zeros(len(held), 10)

    monkeypatch.setattr(unseen_tasks, "trained", learn)
    monkeypatch.setattr(unseen_tasks, "logits_of", answer)
    nothing: Any = None
    group = Group(Pretrained(nothing, {}), {}, Adapting(steps=1, learning_rate=1.0))
    assert left_out_loss(group, samples, group.adapting, 0) == pytest.approx(np.log(10))
    assert [len(batch) for batch in seen] == [6, 6, 6]
    assert set.union(*(pictures(samples) - batch for batch in seen)) == pictures(samples), "each is left out once"
    assert left_out_loss(group, samples, Adapting(steps=1, learning_rate=2.0), 0) == np.inf


@pytest.fixture
def answered() -> Answered:
    """Two experts, of which the labels follow the first and are the opposite of the second's answers in part."""
    draw = torch.Generator().manual_seed(0)
    base, first, noise = (torch.randn(24, 3, generator=draw) for _ in range(3))
    return Answered(base, [base + 3 * first, base - first + noise], (base + 3 * first).argmax(1))


def test_ridge_leaves_out_as_if_it_solved_again(answered: Answered) -> None:
    draw = np.random.default_rng(0)
    features, wanted = draw.normal(size=(24, 2)), draw.normal(size=24)
    again = 0.0
    for start in range(0, 24, 3):
        rows = np.r_[:start, start + 3 : 24]
        scales = solve(features[rows], wanted[rows], 0.7)
        again += float(((wanted - features @ scales)[start : start + 3] ** 2).sum())
    assert left_out_error(features, wanted, 0.7, 3) == pytest.approx(again)
    first, second = by_ridge(answered)
    assert first > 0.3
    assert abs(second) < first


def test_the_theory_takes_labels_for_the_missing_expert(answered: Answered) -> None:
    gammas = similarities(answered)
    assert gammas[0] > 0.5 > gammas[1]
    scales = by_theory(answered)
    assert scales is not None
    assert scales @ np.array(gammas) >= 1.02 - 1e-9
    alike = Answered(answered.base, [torch.ones(24, 3)] * 2, answered.labels)
    assert by_theory(alike) is None  # all γ are 0
