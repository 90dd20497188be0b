"""The one training loop: fine-tune an image encoder under a frozen zero-shot head, resumable to the bit."""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mergeflow.errors import MergeflowError
from mergeflow.training.settings import FineTuneSettings
from mergeflow.training.trajectory import Trajectory, distance_between

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TrainingSet:
    """A task's training images, decoded once and kept on the device.

    Attributes:
        task: the task's name, for messages.
        images: uint8 [N, S, S, 3].
        labels: int64 [N], each below the head's number of classes.
    """

    task: str
    images: Tensor
    labels: Tensor


def fine_tune(
    encoder: nn.Module,
    logits: Logits,
    data: TrainingSet,
    settings: FineTuneSettings,
    seed: int,
    saved: Path,
    validate: Callable[[], float],
    report: Callable[[int, int], None] = lambda done, total: None,
) -> Trajectory:
    """Fine-tune `encoder` in place by AdamW on mean cross-entropy.

    Minimises (1/B) Σ_i −log softmax(logits(encoder(x_i)))[y_i] over shuffled batches; batch order is a pure function
    of (seed, epoch). The optimiser's state is saved to `saved` every `settings.save_every` steps; when the file
    exists the run continues from it and ends with the same bits as an uninterrupted one on the same machine.

    Args:
        encoder: maps uint8 images [B, S, S, 3] to features [B, D]; its parameters with `requires_grad` are trained.
        logits: maps features [B, D] to class logits [B, C]; not trained.
        data: the training set, on the encoder's device.
        settings: optimiser, schedule and length.
        seed: seed of the batch order, at least 0.
        saved: file for the resumable state.
        validate: returns the validation accuracy of the encoder as it stands; called once an epoch.
        report: called as `report(done, total)` after each step.

    Returns:
        The trajectory, one row per (possibly partial) epoch.

    Raises:
        MergeflowError: the task has no images, or the loss is no longer finite.
    """
    if len(data.labels) == 0:
        raise MergeflowError(f"task '{data.task}' has no training images: check its source in params.yaml.")
    origin = {name: p.detach().clone() for name, p in encoder.named_parameters() if p.requires_grad}
    trained = [p for p in encoder.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    total = settings.total_steps(len(data.labels))
    step, trajectory = _resume(saved, encoder, optimiser)
    encoder.train()
    for epoch, batch in _batches(len(data.labels), settings.batch_size, seed, step, total):
        loss, norm = _step(encoder, logits, data, batch, optimiser, settings, step / total)
        if not math.isfinite(loss):
            raise MergeflowError(
                f"task '{data.task}': the loss became {loss} at step {step + 1} of {total} (epoch {epoch + 1}). "
                f"Lower finetune.learning_rate (now {settings.learning_rate}) or raise finetune.warmup."
            )
        step += 1
        trajectory.add_step(loss, norm)
        if step == total or step % _steps_per_epoch(data, settings) == 0:
            encoder.eval()
            distance = distance_between(dict(encoder.named_parameters()), origin)
            trajectory.close_epoch(step, distance, validate())
            encoder.train()
        if step % settings.save_every == 0 and step < total:
            _save(saved, step, encoder, optimiser, trajectory)
        report(step, total)
    encoder.eval()
    return trajectory


def learning_rate_factor(settings: FineTuneSettings, progress: float) -> float:
    """Return the learning rate at `progress` ∈ [0, 1) as a fraction of its peak.

    With warm-up share w: p/w while p < w, then (1 + cos(π (p − w)/(1 − w)))/2 for `cosine`, or 1 for `constant`.

    Example:
        >>> learning_rate_factor(FineTuneSettings(warmup=0.5), 0.25)
        0.5
    """
    if progress < settings.warmup:
        return progress / settings.warmup
    if settings.schedule == "constant":
        return 1.0
    return 0.5 * (1.0 + math.cos(math.pi * (progress - settings.warmup) / (1.0 - settings.warmup)))


def _step(
    encoder: nn.Module,
    logits: Logits,
    data: TrainingSet,
    batch: Tensor,
    optimiser: torch.optim.Optimizer,
    settings: FineTuneSettings,
    progress: float,
) -> tuple[float, float]:
    device = data.images.device
    images, labels = data.images[batch.to(device)], data.labels[batch.to(device)]
    with torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bfloat16"):
        loss = cross_entropy(logits(encoder(images)).float(), labels)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    trained = [p for group in optimiser.param_groups for p in group["params"]]
    norm = nn.utils.clip_grad_norm_(trained, settings.gradient_clip or math.inf)
    for group in optimiser.param_groups:
        group["lr"] = settings.learning_rate * learning_rate_factor(settings, progress)
    optimiser.step()
    return float(loss.detach()), float(norm)


def _batches(images: int, size: int, seed: int, done: int, total: int) -> Iterator[tuple[int, Tensor]]:
    """Yield (epoch, indices) for the steps `done` .. `total` − 1."""
    per_epoch = -(-images // size)
    for epoch in range(done // per_epoch, -(-total // per_epoch)):
        order = torch.randperm(images, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        first = max(done - epoch * per_epoch, 0)
        last = min(total - epoch * per_epoch, per_epoch)
        for index in range(first, last):
            yield epoch, order[index * size : (index + 1) * size]


def _steps_per_epoch(data: TrainingSet, settings: FineTuneSettings) -> int:
    return -(-len(data.labels) // settings.batch_size)


def _save(saved: Path, step: int, encoder: nn.Module, optimiser: torch.optim.Optimizer, trajectory: Trajectory) -> None:
    state = {
        "step": step,
        "encoder": encoder.state_dict(),
        "optimiser": optimiser.state_dict(),
        "trajectory": trajectory.as_json(),
    }
    temporary = saved.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(saved)


def _resume(saved: Path, encoder: nn.Module, optimiser: torch.optim.Optimizer) -> tuple[int, Trajectory]:
    if not saved.exists():
        return 0, Trajectory()
    state = torch.load(saved, weights_only=True, map_location="cpu")
    encoder.load_state_dict(state["encoder"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"]), Trajectory.from_json(state["trajectory"])
