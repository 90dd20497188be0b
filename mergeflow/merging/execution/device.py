"""Where arithmetic happens: the processor, or a CUDA device that is there and has room."""

from __future__ import annotations

from mergeflow.errors import MergeflowError
from mergeflow.late import torch


def check_device(device: str) -> None:
    """Check that a device (cpu, cuda, cuda:1 …) is there."""
    if not device.startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise MergeflowError(f"device '{device}' was asked for, but torch sees no CUDA device: use device: cpu.")
    count = torch.cuda.device_count()
    if (torch.device(device).index or 0) >= count:
        raise MergeflowError(f"device '{device}' was asked for, but torch sees {count} CUDA devices, from cuda:0 on.")


def start_linear_algebra(device: str) -> None:
    """Load CUDA's linear algebra once: torch fails when several threads do so at the same time."""
    if device.startswith("cuda"):
        torch.linalg.eigh(torch.eye(2, dtype=torch.float64, device=device))


# Beside the tensors: CUDA's context and cuBLAS's workspaces, and what the allocator loses between blocks.
_BESIDE, _LOSS = 0.75e9, 1.1


def with_torch(count: float) -> float:
    """Return the bytes that tensors of so many bytes take with torch's own share."""
    return count * _LOSS + _BESIDE


def fits(count: float, free: int) -> bool:
    """Return whether tensors of so many bytes have room where `free` bytes are free."""
    return with_torch(count) <= free


def has_room(device: torch.device, count: float) -> bool:
    """Return whether a device is a CUDA one with room for tensors of so many bytes beside all that torch has taken."""
    return device.type == "cuda" and fits(count, torch.cuda.mem_get_info(device)[0])


def free_bytes(device: str) -> int:
    """Return the bytes that this process may still take of a CUDA device; what torch keeps for reuse is among them."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + cached)


def in_bytes(count: float) -> str:
    """Return a number of bytes for people.

    Example:
        >>> in_bytes(1.5e9), in_bytes(2e6)
        ('1.50 GB', '2.0 MB')
    """
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
