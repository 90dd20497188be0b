"""How much memory tensors take while something runs, counted by the allocator and not by the system."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile

_CHANGE = "[memory]"


def peak_tensor_bytes(work: Callable[[], object]) -> int:
    """Return the most bytes of CPU tensors that were alive at once, beyond those alive before.

    max over time of Σ (allocated − freed)

    Args:
        work: What to run; it must not free tensors that were there before.

    Example:
        >>> import torch
        >>> peak_tensor_bytes(lambda: torch.ones(1000) + torch.ones(1000))
        12000
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    # The raw events: as a trace in JSON those of a few steps of training take gigabytes.
    events: Any = profiler.profiler
    changes = [
        (event.start_ns(), event.nbytes()) for event in events.kineto_results.events() if event.name() == _CHANGE
    ]
    return max(accumulate((size for _, size in sorted(changes, key=lambda change: change[0])), initial=0))
