"""Regimes of one loop: one_epoch, epochs, full_batch_gd, joint; each against plain torch and its paper's property."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, fine_tune, plan_batches
from tests.training.toy import Tiny, data, loss_of, order, plain, train, weights

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def gradient(examples, encoder: Tiny) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss_of(encoder, examples), list(encoder.parameters()))])


def full_batch(epochs: int, batch_size: int = 5, rate: float = 0.3) -> FineTuneSettings:
    return FineTuneSettings(regime="full_batch_gd", epochs=epochs, batch_size=batch_size, learning_rate=rate)


def test_one_epoch_sees_each_image_once(tmp_path: Path) -> None:
    seen, encoder = list[int](), Tiny()
    encoder.register_forward_pre_hook(lambda _, images: seen.append(len(images[0])))
    settings = FineTuneSettings(regime="one_epoch", batch_size=4, steps=99, epochs=99)
    tuned = fine_tune(Network(encoder), [data()], settings, 0, tmp_path / "s.pt", lambda: 0.0)
    assert seen == [4, 4, 4, 4, 2]
    assert [row.steps for row in tuned.trajectory.rows] == [5]
    batches = plan_batches([18], settings, seed=0)
    drawn = torch.cat([batches.parts(step)[0].indices for step in range(5)])
    assert drawn.sort().values.tolist() == list(range(18))


def test_epochs_are_that_many_passes_each_in_another_order(tmp_path: Path) -> None:
    settings = FineTuneSettings(regime="epochs", epochs=3, batch_size=4, learning_rate=1e-2)
    epochs: list[int] = []
    encoder, trajectory = train(tmp_path / "epochs", settings, each_epoch=epochs.append)
    assert epochs == [1, 2, 3]
    assert [row.steps for row in trajectory.rows] == [5, 10, 15]
    same, _ = train(tmp_path / "steps", settings.model_copy(update={"regime": "steps", "steps": 15}))
    assert torch.equal(weights(encoder), weights(same))
    batches = plan_batches([18], settings, seed=0)
    first, second = (torch.cat([batches.parts(e * 5 + s)[0].indices for s in range(5)]) for e in (0, 1))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("batch_size", [1, 5, 18, 100])
def test_full_batch_task_vector_is_the_gradient(tmp_path: Path, batch_size: int) -> None:
    encoder, trajectory = train(tmp_path, full_batch(1, batch_size), dtype=torch.float64)
    start = Tiny(torch.float64)
    expected = gradient(data(), start)
    torch.testing.assert_close(weights(encoder) - weights(start), -0.3 * expected, rtol=1e-12, atol=1e-12)
    row = trajectory.rows[0]
    assert row.gradient_norm == pytest.approx(float(expected.norm()), rel=1e-12)
    assert row.mean_gradient_norm == pytest.approx(row.gradient_norm, rel=1e-12)
    assert row.distance == pytest.approx(0.3 * row.gradient_norm, rel=1e-12)


def test_full_batch_is_plain_gradient_descent(tmp_path: Path) -> None:
    encoder, trajectory = train(tmp_path, full_batch(4), dtype=torch.float64)
    steps = [[(data(), torch.arange(18), 1.0)]] * 4
    expected = plain(steps, lambda ps: torch.optim.SGD(ps, lr=0.3), lambda step: 0.3, Tiny(torch.float64))
    torch.testing.assert_close(weights(encoder), weights(expected), **EXACT)
    assert [row.steps for row in trajectory.rows] == [1, 2, 3, 4]
    losses = [row.loss for row in trajectory.rows]
    assert losses == sorted(losses, reverse=True)
    assert trajectory.rows[0].cosine_to_first == pytest.approx(1.0)
    assert trajectory.rows[3].cosine_to_first < 1.0


def test_joint_sum_adds_the_tasks_losses(tmp_path: Path) -> None:
    tasks = [data(18, 0, "a"), data(10, 1, "b")]
    settings = FineTuneSettings(
        regime="joint", steps=5, batch_size=4, optimiser="sgd", learning_rate=0.1, weight_decay=0.0, warmup=0.0,
        schedule="constant", gradient_clip=0.0,
    )  # fmt: skip
    encoder, trajectory = train(tmp_path, settings, tasks)

    def batch(images: int, step: int) -> Tensor:
        epoch, index = divmod(step, -(-images // 4))
        return order(images, epoch)[index * 4 : index * 4 + 4]

    steps = [[(task, batch(len(task), step), 1.0) for task in tasks] for step in range(5)]
    expected = plain(steps, lambda ps: torch.optim.SGD(ps, lr=0.1), lambda step: 0.1)
    torch.testing.assert_close(weights(encoder), weights(expected), rtol=1e-5, atol=1e-6)
    assert [row.steps for row in trajectory.rows] == [5]  # the epochs are those of the largest task


def test_joint_proportional_counts_images_not_tasks(tmp_path: Path) -> None:
    tasks = [data(18, 0, "a"), data(6, 1, "b")]
    settings = FineTuneSettings(
        regime="joint", sampling="proportional", steps=1, batch_size=24, optimiser="sgd", learning_rate=0.1,
        weight_decay=0.0, warmup=0.0, gradient_clip=0.0,
    )  # fmt: skip
    encoder, _ = train(tmp_path, settings, tasks, dtype=torch.float64)
    start = Tiny(torch.float64)
    mean = (18 * gradient(tasks[0], start) + 6 * gradient(tasks[1], start)) / 24
    torch.testing.assert_close(weights(encoder) - weights(start), -0.1 * mean, **EXACT)
    batches = plan_batches([18, 6], settings.model_copy(update={"batch_size": 5}), seed=0)
    assert batches.steps_per_epoch == 5
    seen = [(part.task, int(i)) for step in range(5) for part in batches.parts(step) for i in part.indices]
    assert len(seen) == len(set(seen)) == 24


@pytest.mark.parametrize("scale", [0.25, 0.5, 1.0])
def test_one_epoch_task_arithmetic_is_one_joint_step(tmp_path: Path, scale: float) -> None:
    """Task Vectors and Gradients, Theorem 1: θ0 + α Σ τ_t = the joint model after one step of size αη."""
    tasks = [data(18, 0, "a"), data(10, 1, "b"), data(7, 2, "c")]
    start = weights(Tiny(torch.float64))
    experts = [weights(train(tmp_path / t.task, full_batch(1), [t], dtype=torch.float64)[0]) for t in tasks]
    merged = start + scale * sum(expert - start for expert in experts)
    settings = FineTuneSettings(
        regime="joint", steps=1, batch_size=18, optimiser="sgd", learning_rate=scale * 0.3, weight_decay=0.0,
        warmup=0.0, gradient_clip=0.0,
    )  # fmt: skip
    joint, _ = train(tmp_path / "joint", settings, tasks, dtype=torch.float64)
    torch.testing.assert_close(weights(joint), merged, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("settings", [
    FineTuneSettings(regime="steps", steps=5, batch_size=4),
    FineTuneSettings(regime="one_epoch", batch_size=4),
    FineTuneSettings(regime="epochs", epochs=2, batch_size=4),
    full_batch(3),
    FineTuneSettings(regime="joint", steps=5, batch_size=4),
    FineTuneSettings(regime="joint", steps=5, batch_size=4, sampling="proportional", accumulate=2),
], ids=lambda s: f"{s.regime}-{s.sampling}")  # fmt: skip
def test_deterministic_by_seed(tmp_path: Path, settings: FineTuneSettings) -> None:
    tasks = [data(18, 0, "a"), data(10, 1, "b")] if settings.regime == "joint" else None
    first, again, other = (train(tmp_path / str(i), settings, tasks, seed)[0] for i, seed in enumerate([3, 3, 4]))
    assert torch.equal(weights(first), weights(again))
    assert torch.equal(weights(first), weights(other)) == (settings.regime == "full_batch_gd")


@pytest.mark.nightly
@pytest.mark.slow
def test_compiled_is_the_same_but_for_rounding(tmp_path: Path) -> None:
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    settings = FineTuneSettings(steps=4, batch_size=8, learning_rate=1e-2)
    expected, _ = train(tmp_path / "plain", settings)
    encoder, _ = train(tmp_path / "compiled", settings.model_copy(update={"compile": True}))
    torch.testing.assert_close(weights(encoder), weights(expected), rtol=1e-5, atol=1e-6)
