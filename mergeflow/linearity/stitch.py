"""Models stitched without a layer to learn: the back half of one on a weighted sum of others' features."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.linearity.affine import apart, borrowed
from mergeflow.linearity.layers import check_layers
from mergeflow.modality import Examples, Model, State

Terms = Sequence[tuple[float, State]]  # (c, front)


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
def stitch(
    model: Model, examples: Examples, back: State, layer: str, terms: Terms, *, batch_size: int = 128
) -> tuple[Tensor, Tensor]:
    """Run the layers after `layer` of one model on h = Σ c f(θ_c) of others, with nothing learned between.

    Args:
        model: What the weights are loaded into; it has its own weights back at the end.
        examples: A split of a task with its head.
        back: Weights of the back half.
        layer: Name of the submodule whose output h replaces.
        terms: (c, θ_c); Σ c need not be 1.
        batch_size: Examples in memory at a time.

    Returns:
        The score of each example, [n], and the log-probabilities, [m, C].

    Raises:
        MergeflowError: the module has no such layer.

    Source:
        Zhou et al. 2024, Cross-Task Linearity, Section 4.3, footnote 5.
    """
    check_layers(model.module, [layer])
    back, terms = apart(back, model), [(factor, apart(front, model)) for factor, front in terms]
    scores, log_p = [], []
    with borrowed(model):
        for rows in torch.arange(len(examples)).split(batch_size):
            total: Tensor | None = None
            for factor, front in terms:
                model.load(front)
                part = factor * examples.features(model, rows, [layer])[layer]
                total = part if total is None else total + part
            assert total is not None, "a stitch needs at least one term"
            model.load(back)
            with replaced(model.module, layer, total):
                scores.append(examples.scores(model, rows))
                log_p.append(examples.log_p(model, rows))
    return torch.cat(scores), torch.cat(log_p)
