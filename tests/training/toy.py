"""A toy to train: a linear encoder of 4×4 images, tasks whose class is the brightest pixel, and a plain loop."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.modalities.classification import Classification
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, Trajectory, fine_tune


class Tiny(nn.Module):
    """A linear encoder of 4×4 images, its weights always the same."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 5, dtype=dtype)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            nn.init.normal_(self.linear.weight, std=0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.linear(images.flatten(1).to(self.linear.weight.dtype) / 255)
        return features


class Fixed(nn.Module):
    """A head without weights."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, features: Tensor) -> Tensor:
        return self.logits(features)


def logits(features: Tensor) -> Tensor:
    return features[:, :3] * 4


def data(images: int = 18, seed: int = 0, task: str = "toy") -> Classification:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(images) % 3
    pixels = torch.randint(0, 60, (images, 4, 4, 3), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(images), labels] += 150
    return Classification(task, pixels, labels, Fixed(logits))


def train(
    folder: Path,
    settings: FineTuneSettings,
    tasks: list[Classification] | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **extra: Any,
) -> tuple[Tiny, Trajectory]:
    folder.mkdir(parents=True, exist_ok=True)
    encoder = Tiny(dtype)
    tuned = fine_tune(Network(encoder), tasks or [data()], settings, seed, folder / "saved.pt", lambda: 0.5, **extra)
    return encoder, tuned.trajectory


def weights(encoder: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in encoder.parameters()])


def loss_of(encoder: nn.Module, examples: Classification) -> Tensor:
    return plain_loss(encoder, examples, torch.arange(len(examples)))


def plain_loss(encoder: nn.Module, examples: Classification, chosen: Tensor) -> Tensor:
    assert examples.head is not None
    return nn.functional.cross_entropy(examples.head(encoder(examples.inputs[chosen])), examples.labels[chosen])


def plain(
    steps: list[list[tuple[Classification, Tensor, float]]],
    make: Callable[[Any], torch.optim.Optimizer],
    rate: Callable[[int], float],
    encoder: nn.Module | None = None,
) -> nn.Module:
    """Train in plain torch: each step a list of (task, indices, weight)."""
    encoder = encoder or Tiny()
    optimiser = make(encoder.parameters())
    for number, parts in enumerate(steps):
        optimiser.param_groups[0]["lr"] = rate(number)
        optimiser.zero_grad()
        total = sum(weight * plain_loss(encoder, examples, chosen) for examples, chosen, weight in parts)
        total.backward()
        optimiser.step()
    return encoder


def order(images: int, epoch: int, seed: int = 0) -> Tensor:
    return torch.randperm(images, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
