"""Choose the examples of step k by seed and step alone, so that a resumed run sees the same order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mergeflow.training.settings import FineTuneSettings


@dataclass(frozen=True)
class Part:
    """A share of one step's loss: `weight` × the mean loss over the examples `indices`, int64 [n], of one task."""

    task: int
    indices: Tensor
    weight: float


@dataclass(frozen=True)
class Batches:
    """The steps of a run.

    Attributes:
        steps_per_epoch: steps of one pass over the examples; with several tasks, over those of the largest.
        parts: step (from 0) → the parts of its loss.
    """

    steps_per_epoch: int
    parts: Callable[[int], list[Part]]


def plan_batches(sizes: Sequence[int], settings: FineTuneSettings, seed: int) -> Batches:
    """Return the batches of a run on tasks with `sizes` examples.

    One task: shuffled batches, the order a function of (seed, epoch). `full_batch_gd`: all examples in their order,
    each part weighted by its share, so that the sum is the exact mean. `joint`: one batch of every task with weight 1
    (`sum`), or shuffled batches of all examples together, whose parts weigh their share (`proportional`).

    Example:
        >>> [part.indices.tolist() for part in plan_batches([3], FineTuneSettings(batch_size=2), seed=0).parts(0)]
        [[2, 0]]
    """
    if settings.regime == "full_batch_gd":
        return _full_batch(sizes, settings.batch_size)
    if settings.regime == "joint" and settings.sampling == "proportional":
        return _mixed(sizes, settings, seed)
    orders = [_shuffled(size, settings.batch_size, seed) for size in sizes]
    longest = max(-(-size // settings.batch_size) for size in sizes)

    def parts(step: int) -> list[Part]:
        whole = [Part(task, order(step), 1.0) for task, order in enumerate(orders)]
        return _split(whole, settings.accumulate)

    return Batches(longest, parts)


def _full_batch(sizes: Sequence[int], batch_size: int) -> Batches:
    chunks = [
        Part(task, indices, len(indices) / size)
        for task, size in enumerate(sizes)
        for indices in torch.arange(size).split(batch_size)
    ]
    return Batches(1, lambda step: chunks)


def _mixed(sizes: Sequence[int], settings: FineTuneSettings, seed: int) -> Batches:
    owner = torch.cat([torch.full((size,), task) for task, size in enumerate(sizes)])
    place = torch.cat([torch.arange(size) for size in sizes])
    order = _shuffled(len(owner), settings.batch_size, seed)

    def parts(step: int) -> list[Part]:
        chosen = order(step)
        shares = [(task, place[chosen[owner[chosen] == task]]) for task in range(len(sizes))]
        whole = [Part(task, indices, len(indices) / len(chosen)) for task, indices in shares if len(indices)]
        return _split(whole, settings.accumulate)

    return Batches(-(-len(owner) // settings.batch_size), parts)


def _shuffled(examples: int, size: int, seed: int) -> Callable[[int], Tensor]:
    per_epoch = -(-examples // size)

    @lru_cache(maxsize=2)
    def order(epoch: int) -> Tensor:
        return torch.randperm(examples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))

    def batch(step: int) -> Tensor:
        epoch, index = divmod(step, per_epoch)
        return order(epoch)[index * size : (index + 1) * size]

    return batch


def _split(parts: list[Part], pieces: int) -> list[Part]:
    if pieces == 1:
        return parts
    return [
        Part(part.task, piece, part.weight * len(piece) / len(part.indices))
        for part in parts
        for piece in part.indices.chunk(min(pieces, len(part.indices)))
    ]
