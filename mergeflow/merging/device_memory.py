"""What merging takes of a device's memory: the pieces of work in flight, by what each method holds of one.

The tensors of a unit's size that a method holds at once were counted on the device's own code path, once for each
method, with tests/card.py (tests/merging/test_device_memory.py counts them again): they are linear in the number of
experts. Matrices were square; Gram matrices of a long and narrow one are smaller.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mergeflow.errors import MergeflowError
from mergeflow.late import torch
from mergeflow.merging.catalog import Call
from mergeflow.merging.engine import BUFFER, default_workers, unit_bytes, units_of
from mergeflow.merging.files.inputs import Inputs
from mergeflow.merging.method import Model
from mergeflow.merging.stacks import Unit


class Copies(NamedTuple):
    """Tensors of a unit's size that a method holds at its peak.

    Attributes:
        each: for each expert.
        beside: beside those of experts.
        square: matrices [columns, columns], in tensors of that size.
    """

    each: float
    beside: float
    square: float = 0.0


COPIES = {
    "adamerging": Copies(1, 3),
    "arcee_fusion": Copies(0, 13),
    "average": Copies(1, 3),
    "breadcrumbs": Copies(2.25, 1.5),
    "breadcrumbs_ties": Copies(3, 4),
    "cart": Copies(1, 8),
    "consensus": Copies(4, 2),
    "core_space": Copies(11, 8),
    "dare": Copies(3.25, 1),
    "dare_ties": Copies(3, 4),
    "della": Copies(2, 10.5),
    "della_ties": Copies(2, 10.5),
    "fisher": Copies(4, 2),
    "iso_c": Copies(1, 8),
    "iso_cts": Copies(1, 13.4),
    "karcher": Copies(5, 4),
    "knots": Copies(6, 17),
    "lines": Copies(1, 7),
    "low_rank": Copies(1, 6),
    "magmax": Copies(2, 3),
    "model_stock": Copies(5, 2),
    "multislerp": Copies(5, 4),
    "nearswap": Copies(0, 3),
    "nuslerp": Copies(0, 14),
    "passthrough": Copies(0, 5.5),
    "pcb": Copies(5, 1),
    "ram": Copies(2.2, 5.25),
    "ram_plus": Copies(3.25, 5.5),
    "regmean": Copies(2, 1.5, 13.4),
    "sce": Copies(5, 1),
    "slerp": Copies(0, 11),
    "task_arithmetic": Copies(1, 2),
    "ties": Copies(2, 4),
    "tsv": Copies(1, 11.2),
    "wudi": Copies(1, 7, 2.33),
}
# Of a method that is not there: base, task vectors, result, and some copies of one of them.
_OTHER = Copies(2, 5)


def held_elements(method: str, experts: int, unit: Unit) -> int:
    """Return how many elements, of the arithmetic's type, a method holds while it merges a unit.

    Args:
        method: its name.
        experts: how many it merges.
        unit: a whole tensor, or a block of one.

    Example:
        >>> held_elements("slerp", 2, Unit("w", 0, 100, (100,)))
        1100
        >>> held_elements("wudi", 8, Unit("w", 0, 200, (10, 20)))
        3932
    """
    found = COPIES.get(method, _OTHER)
    square = unit.shape[1] ** 2 if len(unit.shape) == 2 else 0
    return round((found.each * experts + found.beside) * (unit.stop - unit.start) + found.square * square)


def device_bytes(call: Call[Any], model: Model, units: Iterable[Unit], workers: int, buffer: int) -> int:
    """Return the bytes of a device that work on units takes at its peak.

    Args:
        call: the configured method.
        model: what is known of the model.
        units: the pieces of work.
        workers: threads, each with a piece of work.
        buffer: bytes that may be in flight beyond the largest piece, in the processor's memory.
    """
    widest = sorted(units, key=lambda unit: unit.start - unit.stop)[:workers]
    held, taken, most = 0, 0, unit_bytes(call, model, widest[0]) if widest else 0
    for unit in widest:  # the largest ones at once, as far as the engine lets them
        taken += unit_bytes(call, model, unit)
        if held and taken > most + buffer:
            break
        held += held_elements(call.name, len(model.experts), unit)
    return held * model.dtype.itemsize


def check_room(inputs: Inputs, device: str) -> int:
    """Return the bytes of a device that a merge takes at its peak.

    Args:
        inputs: of the merge, opened.
        device: cuda, cuda:1 …

    Raises:
        MergeflowError: it cannot fit; the largest tensor is named.
    """
    method, model, infos = inputs.call.name, inputs.model, inputs.base.infos
    units = list(units_of(inputs.call, model, infos, infos))
    needed, free = device_bytes(inputs.call, model, units, default_workers(), BUFFER), free_bytes(device)
    if fits(needed, free):
        return needed
    widest = max(units, key=lambda unit: unit.stop - unit.start)
    raise MergeflowError(
        f"{method} of {len(model.experts)} experts needs about {in_bytes(with_torch(needed))} of {device}, where "
        f"{in_bytes(free)} are free: '{widest.name}' {list(widest.shape)} takes the most. Use device: cpu."
    )


# Beside the tensors: CUDA's context and cuBLAS's workspaces, and what the allocator loses between blocks.
_BESIDE, _LOSS = 0.75e9, 1.1


def with_torch(count: float) -> float:
    """Return the bytes that tensors of so many bytes take with torch's own share."""
    return count * _LOSS + _BESIDE


def fits(count: float, free: int) -> bool:
    """Return whether tensors of so many bytes have room where `free` bytes are free."""
    return with_torch(count) <= free


def free_bytes(device: str) -> int:
    """Return the bytes that this process may still take of a CUDA device; what torch keeps for reuse is among them.

    Args:
        device: cuda, cuda:1 …
    """
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + kept)


def in_bytes(count: float) -> str:
    """Return a number of bytes for people.

    Example:
        >>> in_bytes(1.5e9), in_bytes(2e6)
        ('1.50 GB', '2.0 MB')
    """
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
