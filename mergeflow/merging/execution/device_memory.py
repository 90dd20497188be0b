"""Memory that merging takes of a device: the pieces of work at once, by the copies that each method declares.

tests/merging/test_device_memory.py counts what methods say again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mergeflow.checkpoints.header import TensorInfo
from mergeflow.errors import MergeflowError
from mergeflow.merging.catalog import Call
from mergeflow.merging.execution.device import fits, free_bytes, in_bytes, with_torch
from mergeflow.merging.execution.engine import BUFFER, default_workers, unit_bytes, units_of
from mergeflow.merging.execution.reader import Unit
from mergeflow.merging.method import Copies
from mergeflow.merging.stack import Model


def held_elements(copies: Copies, experts: int, unit: Unit) -> int:
    """Count the elements, of the arithmetic's type, that a method holds while it merges a unit.

    Args:
        unit: a whole tensor, or a block of one.

    Example:
        >>> held_elements(Copies(0, 11), 2, Unit("w", 0, 100, (100,)))
        1100
        >>> held_elements(Copies(1, 3, square=2, least=6), 8, Unit("w", 0, 200, (10, 20)))
        3000
    """
    tensors = max(copies.each * experts + copies.fixed, copies.least)
    held = tensors * (unit.stop - unit.start)
    if len(unit.shape) > 1:
        rows, columns = unit.shape[-2:]
        joint = copies.joint * (2.2 if rows > columns * experts else 1)
        held += copies.square * columns**2 + joint * min(rows, columns * experts) ** 2
    return round(held)


def device_bytes(call: Call[Any], model: Model, units: Iterable[Unit], workers: int, buffer: int) -> int:
    """Return the bytes of a device that work on units takes at its peak.

    Args:
        workers: threads, each with a piece of work.
        buffer: bytes that may be in flight beyond the largest piece, in the processor's memory.
    """
    widest = sorted(units, key=lambda unit: unit.start - unit.stop)[:workers]
    held, taken, most = 0, 0, unit_bytes(call, model, widest[0]) if widest else 0
    for unit in widest:  # the largest ones at once, as far as the engine lets them
        taken += unit_bytes(call, model, unit)
        if held and taken > most + buffer:
            break
        held += held_elements(call.method.on_device(call.arguments), len(model.experts), unit)
    return held * model.dtype.itemsize


def check_room(call: Call[Any], model: Model, infos: Mapping[str, TensorInfo], device: str) -> int:
    """Return the bytes of a device that a merge takes at its peak.

    Args:
        infos: shape and type of the base's tensors.

    Raises:
        MergeflowError: it cannot fit; the largest tensor is named.
    """
    units = list(units_of(call, model, infos, infos))
    needed, free = device_bytes(call, model, units, default_workers(), BUFFER), free_bytes(device)
    if fits(needed, free):
        return needed
    widest = max(units, key=lambda unit: unit.stop - unit.start)
    raise MergeflowError(
        f"{call.name} of {len(model.experts)} experts needs about {in_bytes(with_torch(needed))} of {device}, where "
        f"{in_bytes(free)} are free: '{widest.name}' {list(widest.shape)} takes the most. Use device: cpu."
    )
