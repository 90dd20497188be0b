"""Fine-tuning in the tangent space: the encoder replaced by its first-order Taylor expansion at the base."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from mergeflow.modalities.vision.models import ImageEncoder


class LinearisedEncoder(nn.Module):
    """f_lin(x; θ) = f(x; θ0) + ∇_θ f(x; θ0)ᵀ (θ − θ0), normalised like the encoder's own features.

    The image tower f is linearised before the normalisation to unit length. θ are the trained parameters; they start
    at θ0, where f_lin = f.

    Args:
        encoder: the encoder whose weights are θ0; they are frozen, and stay as they are.

    Source: Ortiz-Jimenez et al. 2023, equation 4.
    """

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        with warnings.catch_warnings():  # the first jvp of a process loads code of torch's that torch warns of
            warnings.simplefilter("ignore", FutureWarning)
            jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))
        self.encoder = encoder.requires_grad_(False)
        self.names = [name for name, _ in encoder.visual.named_parameters()]
        self.weights = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in encoder.visual.parameters()])
        self.train(encoder.training)

    def train(self, mode: bool = True) -> "LinearisedEncoder":
        """Set the mode; attention stays in training mode, whose code has a forward-mode derivative (no dropout)."""
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.training = True
        return self

    def forward(self, images: Tensor) -> Tensor:
        """Return unit features [B, D] of uint8 images [B, S, S, 3]."""
        return nn.functional.normalize(self.tower(self.encoder.normalised_pixels(images)).float(), dim=-1)

    def tower(self, pixels: Tensor) -> Tensor:
        """Return the linearised tower's output [B, D] for normalised pixels [B, 3, S, S]: linear in θ − θ0."""
        visual: Any = self.encoder.visual

        def original(weights: dict[str, Tensor]) -> Tensor:
            features: Tensor = functional_call(visual, weights, (pixels,))
            return features

        origin = {name: weight.detach() for name, weight in visual.named_parameters()}
        change = {name: w - origin[name] for name, w in zip(self.names, self.weights, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode derivative
            value, slope = jvp(original, (origin,), (change,))[:2]
        return value + slope

    @torch.no_grad()
    def encoder_state(self) -> dict[str, Tensor]:
        """Return θ by the encoder's names: what the expert of this regime holds."""
        state = dict(self.encoder.encoder_state())
        state.update({f"visual.{name}": w.detach() for name, w in zip(self.names, self.weights, strict=True)})
        return state
