"""Batches that go from the processor's memory to a CUDA device while it computes what comes before them."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

_copying: dict[torch.device, Any] = {}  # one stream a device

Gather = Callable[[Tensor], tuple[Tensor, ...]]


class Ahead:
    """What was asked for before it is needed: rows, gathered by a thread of their own.

    Args:
        gather: Rows to tensors; it runs in another thread.
    """

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._coming: list[tuple[Tensor, Future[tuple[Tensor, ...]]]] = []

    def expect(self, rows: Tensor) -> None:
        """Begin to gather rows, int64 [n]. The same tensor object has to be taken later; the two last ones are kept."""
        self._coming = [*self._coming[-1:], (rows, _gatherer().submit(self._gather, rows))]

    def take(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return what was gathered for these rows, int64 [n], or gather it now; each tensor is [n, ...]."""
        for place, (known, coming) in enumerate(self._coming):
            if known is rows:
                del self._coming[: place + 1]
                return coming.result()
        return self._gather(rows)


@cache
def _gatherer() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "gather")


def pinned_rows(values: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows [n, ...] of a tensor and their numbers [n] in memory that a device reads without another copy."""
    found = torch.empty((len(rows), *values.shape[1:]), dtype=values.dtype, pin_memory=True)
    numbers = torch.empty(len(rows), dtype=rows.dtype, pin_memory=True)
    return torch.index_select(values, 0, rows, out=found), numbers.copy_(rows)


def carry(batch: Tensor, device: torch.device) -> Tensor:
    """Copy pinned memory [n, ...] to a CUDA device on a stream of its own; what computes with it waits for it."""
    if device not in _copying:
        _copying[device] = torch.cuda.Stream(device)
    copies, computes = _copying[device], torch.cuda.current_stream(device)
    with torch.cuda.stream(copies):
        there = batch.to(device, non_blocking=True)
    computes.wait_stream(copies)
    there.record_stream(computes)  # its memory belongs to the stream of copies, which must not reuse it too early
    return there
