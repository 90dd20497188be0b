"""Models stitched without a layer to learn: the back half of one on a weighted sum of others' features."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.linearity.affine import apart, borrowed
from mergeflow.linearity.layers import check_layers
from mergeflow.modality import Examples, Model, State


@contextmanager
def replaced(module: nn.Module, layer: str, value: Tensor) -> Iterator[None]:
    """Let a submodule give `value` whatever it computes; of several outputs the first is replaced.

    Args:
        module: The model; it is as before on leaving.
        layer: The submodule's dotted name.
        value: What it gives: [B, …], of the shape that it computes.
    """

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return value if isinstance(output, Tensor) else (value, *output[1:])

    handle = module.get_submodule(layer).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def front(
    model: Model, examples: Examples, state: State, layers: Sequence[str], *, batch_size: int = 128
) -> dict[str, Tensor]:
    """Return f(θ), what layers give for every example: layer → [n, …], in one pass.

    Args:
        model: What the weights are loaded into; it has its own weights back at the end.
        examples: A split of a task.
        state: θ.
        layers: Names of submodules.
        batch_size: Examples in memory at a time.

    Raises:
        MergeflowError: the module has no such layer.
    """
    check_layers(model.module, layers)
    state = apart(state, model)
    with borrowed(model):
        model.load(state)
        parts = [examples.features(model, rows, layers) for rows in torch.arange(len(examples)).split(batch_size)]
    return {layer: torch.cat([part[layer] for part in parts]) for layer in layers}


@torch.no_grad()
def stitch(
    model: Model,
    examples: Examples,
    back: State,
    layer: str,
    terms: Sequence[tuple[float, Tensor]],
    read: Callable[[Model, Tensor], Tensor] | None = None,
    *,
    batch_size: int = 128,
) -> Tensor:
    """Run the layers after `layer` of one model on h = Σ c f(θ_c) of others, with nothing learned between.

    Args:
        model: What the weights are loaded into; it has its own weights back at the end.
        examples: A split of a task with its head.
        back: Weights of the back half.
        layer: Name of the submodule whose output h replaces.
        terms: (c, f(θ_c)), the features as `front` gives them; Σ c need not be 1.
        read: What is read of the model: a function of it and of some examples' numbers, int64 [b], such as
            `examples.log_p`; `examples.scores` if none is given.
        batch_size: Examples in memory at a time.

    Returns:
        What `read` gives for all examples, [n, …].

    Raises:
        MergeflowError: the module has no such layer.

    Source:
        Zhou et al. 2024, Cross-Task Linearity, Section 4.3, footnote 5.
    """
    assert terms, "a stitch needs at least one term"
    check_layers(model.module, [layer])
    read, back, found = read or examples.scores, apart(back, model), []
    with borrowed(model):
        model.load(back)
        for rows in torch.arange(len(examples)).split(batch_size):
            total = sum(factor * features[rows] for factor, features in terms)
            assert isinstance(total, Tensor)
            with replaced(model.module, layer, total):
                found.append(read(model, rows))
    return torch.cat(found)
