"""How much memory tensors take while something runs, counted by the allocator and not by the system."""

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.profiler import ProfilerActivity, profile


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
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(str(Path(folder) / "trace.json"))
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    changes.sort(key=lambda event: event["args"]["Ev Idx"])
    return max(accumulate((event["args"]["Bytes"] for event in changes), initial=0))
