"""Torch's global generator for one thread at a time: models with dropout draw from it, whoever else does."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

import torch
from torch import nn

_HOLDING = RLock()


@contextmanager
def own_generator(seed: int, device: torch.device | None = None, alone: bool = True) -> Iterator[None]:
    """Seed the global generators for what this thread draws, and give them back as they were.

    Args:
        seed: of the processor's generator and the device's.
        device: a CUDA device that is drawn on as well.
        alone: whether other threads that ask for it alone wait until it is over: on the processor all threads draw
            from one generator. If not, the processor's generator is left as it is, because others may draw from it.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    if alone:
        with _HOLDING, torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield
        return
    states = [torch.cuda.get_rng_state(one) for one in devices]
    if devices:
        with _HOLDING, torch.random.fork_rng(devices=[]):  # gives back the processor's generator alone
            torch.manual_seed(seed)
    try:
        yield
    finally:
        for one, state in zip(devices, states, strict=True):
            torch.cuda.set_rng_state(state, one)


def draws(module: nn.Module) -> bool:
    """Return whether a module draws random numbers while it is trained: whether it has dropout.

    Example:
        >>> draws(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))), draws(nn.Dropout(0.0))
        (True, False)
    """
    return any(getattr(part, "p", 0.0) > 0 for part in module.modules() if _is_dropout(part)) or any(
        part.dropout > 0 for part in module.modules() if isinstance(part, nn.MultiheadAttention)
    )


def _is_dropout(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.dropout._DropoutNd)
