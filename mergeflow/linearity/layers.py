"""Which layers of a module are looked at where nobody names any: blocks, or activations of a plain net."""

from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from torch import nn

from mergeflow.errors import MergeflowError, unknown_name

_ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU)


def find_layers(module: nn.Module) -> list[str]:
    """Return the names of the module's blocks in the order in which they are declared.

    Blocks are the outermost members of lists and sequences that are modules of several parts: residual blocks,
    transformer blocks. A net without any has its activations instead.

    Example:
        >>> find_layers(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)))
        ['1', '3']
    """
    layers = list(_blocks(module, ""))
    layers = layers or [name for name, part in module.named_modules() if isinstance(part, _ACTIVATIONS)]
    if not layers:
        raise MergeflowError(
            f"{type(module).__name__} has no blocks and no activations as submodules: name the layers to look at."
        )
    return layers


def check_layers(module: nn.Module, layers: Sequence[str]) -> None:
    """Refuse layers that the module does not have."""
    names = [name for name, _ in module.named_modules() if name]
    for layer in layers:
        if layer not in names:  # all of them would fill a page
            near = get_close_matches(layer, names, n=1)
            raise unknown_name("layer", layer, {*near, *list(_blocks(module, ""))[:24]})


def short_names(layers: Sequence[str]) -> list[str]:
    """Return names of layers without what all of them begin with.

    Example:
        >>> short_names(["visual.resblocks.0", "visual.resblocks.1"])
        ['0', '1']
    """
    parts = [layer.split(".") for layer in layers]
    common = 0
    while all(len(part) > common + 1 for part in parts) and len({part[common] for part in parts}) == 1:
        common += 1
    return [".".join(part[common:]) for part in parts]


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    listed = isinstance(module, nn.ModuleList | nn.Sequential)
    for name, child in module.named_children():
        composed = bool(list(child.children())) and not isinstance(child, nn.ModuleList | nn.Sequential)
        if listed and composed and any(True for _ in child.parameters()):
            yield prefix + name
        else:
            yield from _blocks(child, f"{prefix}{name}.")
