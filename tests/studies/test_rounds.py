"""The studies of MIMA and of gradients, whole on small nets: what the papers show, and what the rows have."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

from mergeflow.modalities.classification import Classification
from mergeflow.modality import Network
from studies.alignment import last_round
from studies.gradients import vector_cosines
from studies.lab.inputs import Laboratory
from studies.lab.rows import per_seed, select
from studies.merge_frequency import tuned
from studies.mima import measure_average
from studies.theory.gradients import mean_gradient
from tests.studies.small_lab import rows_by_study, study_io
from tests.studies.toy_lab import NAMES

pytestmark = pytest.mark.slow

CHOICES: dict[str, dict[str, Any]] = {
    "mima": {"rounds": [1, 4, 16], "budgets": [16], "at": [1, 4], "kept": [4]},
    "one_epoch": {"epochs": [1, 3], "further": {"one_epoch": "mima_1"}},
    "merge_frequency": {"rounds": [1, 4], "multiples": [1, 2], "course": ["mima_4"]},
    "alignment": {"rounds": [1, 4, 16], "shown": [4], "compared": ["per_round_2_4"]},
    "gradients": {"runs": {"paper": "cold", "hot": "converged"}, "images": 100, "steps": [1e-5]},
    "cost": {
        "joint": ["joint"],
        "rates": ["joint_half"],
        "iterative": ["mima_4", "mima_16"],
        "one_shot": ["mima_1"],
        "rank_ratio": [0.1],
    },
}
Run = Callable[[str], pd.DataFrame]


@pytest.fixture(scope="module")
def run(toy_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return rows_by_study(toy_lab, tmp_path_factory.mktemp("rounds"), CHOICES)


def test_merging_while_tuning_closes_the_gap(run: Run) -> None:
    """M2, M4, M6: the merge rises, the gap closes, a fixed λ degrades."""
    rows = select(run("mima"), optimiser="reset", steps=64)
    means = rows.groupby(["model", "rounds"]).accuracy.mean()
    gap = means["experts"] - means["average"]
    assert means["average", 16] > means["average", 1] + 3
    assert gap[1] > 20
    assert abs(gap[16]) < 3
    lead = means["task_arithmetic λ=0.4"] - means["average"]
    assert lead[16] < lead[1]
    assert set(run("mima").dropna(subset="scale").model) == {"task_arithmetic", "ties"}
    assert list(select(run("mima"), model="zero_shot").task) == list(NAMES)


def test_experts_and_the_run_s_own_merge_are_judged_on_test(toy_lab: Path, tmp_path: Path) -> None:
    lab = Laboratory(study_io(toy_lab, "mima", tmp_path))
    rows = pd.DataFrame(measure_average(lab, "mima_4", 0)).set_index(["model", "task"]).accuracy / 100
    assert dict(rows["average"]) == pytest.approx(lab.accuracy(lab.run("mima_4").merged(0, 4), "test"))
    experts = lab.run("mima_4").experts(0)
    assert dict(rows["experts"]) == pytest.approx({t: lab.accuracy(experts[t], "test")[t] for t in NAMES})


def test_experts_improve_over_the_epochs(run: Run) -> None:
    rows = run("one_epoch")
    assert set(select(rows, run="converged").epoch) == {1, 3}
    lengths = select(rows, run="converged").groupby("epoch").length.mean()
    assert lengths[1] < lengths[3]
    assert len(select(rows, model="zero_shot")) == len(NAMES)


def test_alpha_is_chosen_on_validation(run: Run) -> None:
    rows = select(run("merge_frequency"), part="model")
    best = tuned(rows)
    scores = select(rows, model="validation").groupby(["schedule", "rounds", "seed", "multiple"]).accuracy.mean()
    for key, group in best.groupby(["schedule", "rounds", "seed"]):
        assert scores[(*key, group.multiple.iloc[0])] == scores[key].max()
    once = select(best, rounds=1).pivot_table(index=["seed", "task"], columns="schedule", values="accuracy")
    assert (once["whole"] == once["per_round"]).all(), "with one round there is one schedule"


def test_task_vectors_align_and_increments_do_not(run: Run) -> None:
    """M3: final task vectors align with N and from round to round."""
    rows = select(run("alignment"), part="pair")
    tau, delta = (rows.groupby(["run", "round"])[kind].mean() for kind in ("tau", "delta"))
    assert tau["mima_1", 1] < 0.3 < 0.9 < tau["mima_16", 16]
    assert tau["mima_4", 1] < tau["mima_4", 2] < tau["mima_4", 4]
    assert delta["mima_16", 8] < 0.5
    first = select(rows, run="mima_4", round=1)
    assert (first.tau == first.delta).all(), "the first round begins at the base"
    last = select(run("alignment"), part="last").set_index("run")
    assert (last.loc["mima_1"].shared == 0).all(), "and with one round nothing is shared"


def test_the_last_round_is_measured_from_where_it_began() -> None:
    values = {"base": [0.0, 0.0], "start": [3.0, 0.0], "north": [3.0, 4.0], "east": [7.0, 0.0]}
    states = {name: {"w": torch.tensor(value)} for name, value in values.items()}
    run = SimpleNamespace(start=lambda seed: states["start"], expert=lambda seed, task: states[task])
    lab: Any = SimpleNamespace(base=states["base"], tasks=["north", "east"], run=lambda name: run)
    assert last_round(lab, "mima_4", 0) == pytest.approx({"shared": 3, "increment": 4, "towards": 0.5})


def test_how_far_an_epoch_goes_decides_the_next_gradient(run: Run) -> None:
    """G6: how far an epoch goes decides which direction the next gradients have."""
    rows = run("gradients")
    sums = rows.groupby(["run", "kind", "seed", "task"]).share.sum()
    assert sums.to_numpy() == pytest.approx(1)
    assert select(rows, epoch=1).cosine.to_numpy() == pytest.approx(1)
    assert select(rows, kind="GD 1e-05").cosine.min() > 0.99
    cosine = per_seed(rows, "run", value="cosine", kind="all images", epoch=2).mean(axis=1)
    assert cosine["paper"] > 0.95
    assert cosine["hot"] < cosine["paper"] - 0.1
    steps = select(rows, kind="step", run="hot")
    assert select(steps, epoch=steps.epoch.max()).whole.to_numpy() == pytest.approx(1)


def test_many_rounds_come_near_to_joint_training(run: Run) -> None:
    """M7: with many rounds merging comes near to joint training, at the same budget; one merge does not."""
    rows = select(run("cost"), part="model")
    means = rows.groupby("run").accuracy.mean()
    assert means["mima_16"] > means["joint"] - 10
    assert means["mima_1"] < means["mima_16"]
    assert set(rows.task_steps) == {64 * 3}
    assert select(rows, run="mima_1").tried.min() > 10
    assert not select(rows, run="mima_1").chosen.str.startswith("average").any(), "it is the worst on validation"
    assert set(select(run("cost"), part="rate").run) == {"joint", "joint_half"}


def test_a_small_step_of_full_batch_descent_goes_down_the_gradient() -> None:
    base, gradient = {"w": torch.zeros(2)}, {"w": torch.tensor([3.0, 4.0])}
    states = [{"w": torch.tensor([-3.0, -4.0])}, {"w": torch.tensor([-4.0, 3.0])}]
    whole, descent = vector_cosines(base, states, gradient)
    assert whole == pytest.approx([0, 1])
    assert descent == pytest.approx([1, 0])


class Pixels(torch.nn.Module):
    """Class logits as a linear function of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(12, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.linear(images.flatten(1) / 255)
        return features


def test_the_gradient_in_chunks_is_that_of_the_mean_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (7, 2, 2, 3), generator=generator, dtype=torch.uint8)
    labels = torch.randint(0, 3, (7,), generator=generator)
    model = Pixels()
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    gradients = mean_gradient(Network(model), Classification("t", images, labels), batch_size=3)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)
    assert all(p.grad is None for p in model.parameters())
