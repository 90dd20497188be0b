"""Read numbers from a device later, so that the CPU does not wait for them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def read_later(values: Sequence[Tensor]) -> Callable[[], list[float]]:
    """Return a function that gives the values as numbers; call it when the device has more work to do.

    A CUDA device copies them in order of its queue; a plain `float(value)` would wait until the queue is empty.

    Example:
        >>> read_later([torch.tensor(0.5), torch.tensor([2.0])])()
        [0.5, 2.0]
    """
    together = torch.stack([value.detach().double().reshape(()) for value in values])
    if not together.is_cuda:
        return together.tolist
    here = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
    here.copy_(together, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(together.device))

    def read() -> list[float]:
        arrived.synchronize()
        numbers: list[float] = here.tolist()
        return numbers

    return read
