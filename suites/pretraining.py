"""What the pre-training of the shipped bases has in common: the loop, batches in halves, AdamW, one schedule."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Progress = Callable[[int, int], None]
SHARDS = 2  # halves of a batch, each on its own thread: faster on two cores than two threads inside every operation


@contextmanager
def one_thread() -> Iterator[None]:
    """Let every operation run on one thread: the shards are the parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def adamw(model: nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW (.9, .98) over a model's parameters; matrices but embeddings decay."""
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (free if parameter.ndim < 2 or "embedding" in name else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.98))


def rate_factor(step: int, steps: int, warmup: float) -> float:
    """Return the factor on the peak learning rate: linear warm-up, then cosine to 0.

    Args:
        step: from 0.
        warmup: share of the steps with rising rate.

    Example:
        >>> [round(rate_factor(step, 10, 0.2), 2) for step in (0, 1, 2, 6)]
        [0.5, 1.0, 1.0, 0.5]
    """
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def descend_all(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Iterable[Sequence[Callable[[], Tensor]]],
    steps: int,
    warmup: float,
    progress: Progress | None = None,
    after: Callable[[], object] = lambda: None,
) -> float:
    """Train a model on all batches; return the mean loss of the last fiftieth of the steps.

    Args:
        optimizers: of its parameters, at their peak rates.
        batches: of each step the functions that compute its shards' losses, whose sum is the batch's loss.
        warmup: share of the steps with rising learning rates; then they follow a cosine to 0.
    """
    parameters, tail = list(model.parameters()), list[float]()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    with one_thread(), ThreadPoolExecutor(SHARDS) as pool:
        for step, losses in enumerate(batches):
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * rate_factor(step, steps, warmup)
            shards = [pool.submit(_gradients, loss, parameters) for loss in losses]
            tail = [*tail[-max(1, steps // 50) + 1 :], _step(shards, parameters, optimizers)]
            after()
            if progress and (step % 20 == 0 or step + 1 == steps):
                progress(step + 1, steps)
    return sum(tail) / len(tail)


def _gradients(loss: Callable[[], Tensor], parameters: Sequence[nn.Parameter]) -> tuple[Tensor, ...]:
    value = loss()
    return (value.detach(), *torch.autograd.grad(value, parameters))


def _step(
    shards: Iterable["Future[tuple[Tensor, ...]]"],
    parameters: Sequence[nn.Parameter],
    optimizers: Iterable[torch.optim.Optimizer],
) -> float:
    """Take one step along the sum of the shards' gradients, clipped at norm 1, and return the sum of their losses.

    Args:
        shards: each gives (loss, *gradients); they are added in this order, so the bits do not depend on the threads.
    """
    value, *gradients = (sum(parts) for parts in zip(*(shard.result() for shard in shards), strict=True))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    nn.utils.clip_grad_norm_(parameters, 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(value)
