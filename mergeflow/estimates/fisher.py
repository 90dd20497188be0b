"""The diagonal Fisher information of an image encoder with its head, from per-sample gradients."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from mergeflow.modalities.vision.heads import Head

Labels = Literal["sampled", "all"]


def diagonal_fisher(
    encoder: nn.Module,
    head: Head,
    images: Tensor,
    *,
    labels: Labels = "sampled",
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    r"""Return the diagonal of the Fisher information of every parameter.

    F = 1/N Σ_i E_{y ~ p(y|x_i)} [(∇_θ log p(y|x_i))²], with p = softmax of the head's logits

    The labels are the model's own, never the data's (that would be the empirical Fisher). `sampled` draws one y per
    image, as the paper does where classes are many; `all` sums over the classes weighted by p, exact and C times the
    work. One gradient per image: its square cannot be formed from the gradient of a batch, and one at a time keeps
    memory at three copies of the model for any architecture.

    Args:
        encoder: Images to unit features; its parameters are the θ. Put into evaluation mode, its weights untouched.
        head: The task's frozen head, on the encoder's device.
        images: uint8 [N, S, S, 3], N ≥ 1.
        labels: `sampled` or `all`.
        seed: Of the drawn labels.
        progress: Called with images done and in all.

    Returns:
        Fisher ≥ 0 by the encoder's parameter names, float32, summed in float64; zeros where no gradient flows.

    Source: Matena and Raffel, Merging models with Fisher-weighted averaging (NeurIPS 2022), section 3.
    """
    encoder.eval()
    parameters = {name: value for name, value in encoder.named_parameters() if value.is_floating_point()}
    totals = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in parameters.items()}
    generator = torch.Generator().manual_seed(seed)
    wanted = {name: value.requires_grad for name, value in parameters.items()}
    try:
        encoder.requires_grad_(True)
        for done, image in enumerate(images.split(1), start=1):
            with torch.enable_grad():
                log_p = head.logits(encoder(image)).log_softmax(dim=1)[0]
            shares = log_p.detach().double().exp()
            if labels == "sampled":
                drawn = int(torch.multinomial(shares.cpu(), 1, generator=generator))
                _add_square(totals, parameters, log_p[drawn], 1.0, keep=False)
            else:
                for y, share in enumerate(shares.tolist()):
                    _add_square(totals, parameters, log_p[y], share, keep=y + 1 < len(shares))
            if progress is not None:
                progress(done, len(images))
    finally:
        for name, value in parameters.items():
            value.requires_grad_(wanted[name])
    return {name: (total / len(images)).float().cpu() for name, total in totals.items()}


def _add_square(
    totals: dict[str, Tensor], parameters: dict[str, nn.Parameter], log_p: Tensor, share: float, keep: bool
) -> None:
    found = torch.autograd.grad(log_p, list(parameters.values()), retain_graph=keep, allow_unused=True)
    for total, gradient in zip(totals.values(), found, strict=True):
        if gradient is not None:
            wide = gradient.double()
            total.addcmul_(wide, wide, value=share)
