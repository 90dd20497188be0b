"""Where arithmetic happens: the processor, or a CUDA device that is there."""

from __future__ import annotations

from mergeflow.errors import MergeflowError
from mergeflow.late import torch


def check_device(device: str) -> None:
    """Check that a device can be used.

    Args:
        device: cpu, cuda, cuda:1 …

    Raises:
        MergeflowError: torch sees no CUDA device, or fewer than the number asks for.
    """
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
