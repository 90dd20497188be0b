"""Helpers for any torch module: seeding its random numbers, reading its answers and the outputs of its layers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.errors import unknown_name

# torch has one global generator, which all models with dropout share.
_HOLDING = RLock()


@contextmanager
def own_generator(seed: int, device: torch.device | None = None, alone: bool = True) -> Iterator[None]:
    """Seed the global generators inside the block, and restore them afterwards.

    Args:
        alone: whether other threads that ask for it alone wait until it is over: on the processor all threads draw
            from one generator. If not, the processor's generator is left as it is, because others may draw from it.
    """
    devices = [device] if device is not None and device.type == "cuda" else []
    if alone:
        with _HOLDING, torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            yield
        return
    states = [torch.cuda.get_rng_state(cuda) for cuda in devices]
    if devices:
        with _HOLDING, torch.random.fork_rng(devices=[]):  # gives back the processor's generator alone
            torch.manual_seed(seed)
    try:
        yield
    finally:
        for cuda, state in zip(devices, states, strict=True):
            torch.cuda.set_rng_state(state, cuda)


def likeliest(logits: Tensor) -> Tensor:
    """Return where the largest of the logits [..., C] is, [...]; −1, which is no class, where one is NaN.

    Example:
        >>> likeliest(torch.tensor([[0.1, 0.9], [torch.nan, 1.0]]))
        tensor([ 1, -1])
    """
    answers = logits.argmax(dim=-1, keepdim=True)  # NaN counts as the largest
    return answers.masked_fill(logits.gather(-1, answers).isnan(), -1).squeeze(-1)


def draws(module: nn.Module) -> bool:
    """Return whether a module draws random numbers while it is trained: whether it has dropout."""
    return any(
        (isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0)
        or (isinstance(part, nn.MultiheadAttention) and part.dropout > 0)
        for part in module.modules()
    )


def activations(module: nn.Module, layers: Sequence[str], compute: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the outputs [...] of named submodules during one computation, of several values the first.

    Args:
        layers: Names as `module.named_modules` gives them; "" is the module itself.
    """
    parts = dict(module.named_modules())
    for layer in layers:
        if layer not in parts:
            raise unknown_name("layer", layer, parts)
    outputs: dict[str, Tensor] = {}

    def watch(layer: str, _: nn.Module, __: Any, output: Any) -> None:
        outputs[layer] = output if isinstance(output, Tensor) else output[0]

    hooks = [parts[layer].register_forward_hook(partial(watch, layer)) for layer in layers]
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    return outputs
