"""What the layers of a module give while it computes."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from mergeflow.errors import unknown_name


def activations(module: nn.Module, layers: Sequence[str], compute: Callable[[], Any]) -> dict[str, Tensor]:
    """Return the outputs of named submodules during one computation.

    Args:
        module: The module.
        layers: Names as `module.named_modules` gives them; "" is the module itself.
        compute: Runs the module once.

    Returns:
        Layer → its output; of a submodule that returns several values the first.

    Raises:
        MergeflowError: The module has no submodule of such a name; the message has the nearest.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        >>> [value.shape for value in activations(net, ["0", ""], lambda: net(torch.zeros(5, 2))).values()]
        [torch.Size([5, 3]), torch.Size([5, 3])]
    """
    known = dict(module.named_modules())
    for layer in layers:
        if layer not in known:
            raise unknown_name("layer", layer, known)
    found: dict[str, Tensor] = {}

    def watch(layer: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            found[layer] = output if isinstance(output, Tensor) else output[0]

        return hook

    hooks = [known[layer].register_forward_hook(watch(layer)) for layer in layers]
    try:
        compute()
    finally:
        for hook in hooks:
            hook.remove()
    return found
