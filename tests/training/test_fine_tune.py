"""The training loop: against plain torch, deterministic, useful, and resumable to the bit."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.training import FineTuneSettings, TrainingSet, Trajectory, fine_tune, learning_rate_factor

SETTINGS = FineTuneSettings(steps=12, batch_size=4, learning_rate=1e-2, warmup=0.25, save_every=5)


class Tiny(nn.Module):
    """A linear encoder of 4×4 images."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 5)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            nn.init.normal_(self.linear.weight, std=0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.linear(images.flatten(1).float() / 255)
        return features


def data(images: int = 18) -> TrainingSet:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % 3
    pixels = torch.randint(0, 60, (images, 4, 4, 3), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(images), labels] += 150
    return TrainingSet("toy", pixels, labels, logits)


def logits(features: Tensor) -> Tensor:
    return features[:, :3] * 4


def train(folder: Path, settings: FineTuneSettings = SETTINGS, seed: int = 0, **extra) -> tuple[Tiny, Trajectory]:  # type: ignore[no-untyped-def]
    encoder = Tiny()
    tasks = [extra.pop("data", data())]
    found = fine_tune(encoder, tasks, settings, seed, folder / "saved.pt", lambda: 0.5, **extra)
    return encoder, found.trajectory


def weights(encoder: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in encoder.parameters()])


def test_reference_plain_adamw(tmp_path: Path) -> None:
    encoder, _ = train(
        tmp_path, FineTuneSettings(steps=3, batch_size=18, learning_rate=1e-2, warmup=0.0, gradient_clip=0.0)
    )
    plain, whole = Tiny(), data()
    optimiser = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(3):
        optimiser.param_groups[0]["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / 3))
        optimiser.zero_grad()
        nn.functional.cross_entropy(logits(plain(whole.images)), whole.labels).backward()
        optimiser.step()
    torch.testing.assert_close(weights(encoder), weights(plain), rtol=1e-5, atol=1e-6)


def test_deterministic_by_seed(tmp_path: Path) -> None:
    first, again, other = (train(_folder(tmp_path / str(i)), seed=seed)[0] for i, seed in enumerate([3, 3, 4]))
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))


def test_purpose_it_learns(tmp_path: Path) -> None:
    encoder, trajectory = train(tmp_path, FineTuneSettings(steps=100, batch_size=6, learning_rate=1e-2))
    whole = data()
    assert (logits(encoder(whole.images)).argmax(1) == whole.labels).float().mean() == 1.0
    assert trajectory.rows[-1].loss < trajectory.rows[0].loss / 2
    assert trajectory.rows[-1].distance > 0


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 10, 11])
def test_interrupted_and_resumed_gives_the_same_bits(tmp_path: Path, stop: int) -> None:
    whole, rows = train(_folder(tmp_path / "whole"))

    class Killed(Exception):
        pass

    def kill(done: int, total: int) -> None:
        if done == stop:
            raise Killed

    folder = _folder(tmp_path / "killed")
    with pytest.raises(Killed):
        train(folder, report=kill)
    resumed, resumed_rows = train(folder)
    assert torch.equal(weights(whole), weights(resumed))
    assert rows.rows == resumed_rows.rows


def test_one_epoch_sees_each_image_once(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counting(Tiny):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(len(images))
            return super().forward(images)

    settings = FineTuneSettings(regime="one_epoch", batch_size=4)
    found = fine_tune(Counting(), [data()], settings, 0, tmp_path / "s.pt", lambda: 0.0)
    assert seen == [4, 4, 4, 4, 2]
    assert [row.steps for row in found.trajectory.rows] == [5]


def test_a_diverging_run_names_task_and_step(tmp_path: Path) -> None:
    settings = FineTuneSettings(steps=50, batch_size=4, learning_rate=1e30, gradient_clip=0.0, warmup=0.0)
    with pytest.raises(MergeflowError, match=r"task 'toy': the loss became .* at step \d+ of 50"):
        train(tmp_path, settings)


def test_an_empty_task_is_named(tmp_path: Path) -> None:
    empty = TrainingSet("toy", torch.zeros(0, 4, 4, 3, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), logits)
    with pytest.raises(MergeflowError, match="task 'toy' has no training images"):
        train(tmp_path, data=empty)


@given(st.floats(0, 0.999), st.floats(0, 0.9), st.sampled_from(["cosine", "constant"]))
def test_learning_rate_stays_within_its_peak(progress: float, warmup: float, schedule: str) -> None:
    settings = FineTuneSettings(warmup=warmup, schedule=schedule)  # type: ignore[arg-type]
    assert 0.0 <= learning_rate_factor(settings, progress) <= 1.0


def _folder(path: Path) -> Path:
    path.mkdir()
    return path
