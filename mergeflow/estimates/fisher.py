"""The diagonal Fisher information of a model's predictions, from per-sample gradients."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from mergeflow.modality import Model, Predictions

Labels = Literal["sampled", "all"]


def diagonal_fisher(
    model: Model,
    examples: Predictions,
    *,
    labels: Labels = "sampled",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    r"""Return the diagonal of the Fisher information of every parameter.

    F = 1/N Σ_i E_{y ~ p_i} [(∇_θ log p_i(y))²] over the N predictions of all examples

    The labels are the model's own, never the data's (that would be the empirical Fisher). `sampled` draws one y per
    prediction, as the paper does where classes are many; `all` sums over the classes weighted by p, exact and C times
    the work. One gradient per prediction: its square cannot be formed from the gradient of a batch, and one at a time
    keeps memory at three copies of the model for any architecture.

    Args:
        model: Its module's parameters are the θ. Put into evaluation mode, its weights untouched.
        examples: At least one; labels play no part.
        labels: `sampled` or `all`.
        seed: Of the drawn labels.
        progress: Called with examples done and in all.

    Returns:
        Fisher ≥ 0 by the module's parameter names, float32, summed in float64; zeros where no gradient flows.

    Source: Matena and Raffel, Merging models with Fisher-weighted averaging (NeurIPS 2022), section 3.
    """
    model.module.eval()
    parameters = {name: value for name, value in model.module.named_parameters() if value.is_floating_point()}
    totals = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    drawing = torch.Generator().manual_seed(seed) if labels == "sampled" else None
    predictions, wanted = 0, {name: value.requires_grad for name, value in parameters.items()}
    try:
        model.module.requires_grad_(True)
        for row in range(len(examples)):
            with torch.enable_grad():
                log_p = examples.log_p(model, torch.tensor([row]))
            for number, line in enumerate(log_p, start=1):
                _add_prediction(totals, parameters, line, drawing, keep=number < len(log_p))
            predictions += len(log_p)
            if progress is not None:
                progress(row + 1, len(examples))
    finally:
        for name, value in parameters.items():
            value.requires_grad_(wanted[name])
    return {name: (total / predictions).float().cpu() for name, total in totals.items()}


def _add_prediction(
    totals: dict[str, Tensor],
    parameters: dict[str, nn.Parameter],
    log_p: Tensor,
    generator: torch.Generator | None,
    keep: bool,
) -> None:
    """Add the squared gradient of one prediction's log p, for a drawn class or for all; `keep` the graph for more."""
    shares = log_p.detach().double().exp()
    if generator is not None:
        drawn = int(torch.multinomial(shares.cpu(), 1, generator=generator))
        _add_square(totals, parameters, log_p[drawn], 1.0, keep)
        return
    for y, share in enumerate(shares.tolist()):
        _add_square(totals, parameters, log_p[y], share, keep or y + 1 < len(shares))


def _add_square(
    totals: dict[str, Tensor], parameters: dict[str, nn.Parameter], log_p: Tensor, share: float, keep: bool
) -> None:
    found = torch.autograd.grad(log_p, list(parameters.values()), retain_graph=keep, allow_unused=True)
    for total, gradient in zip(totals.values(), found, strict=True):
        if gradient is not None:
            wide = gradient.double()
            total.addcmul_(wide, wide, value=share)
