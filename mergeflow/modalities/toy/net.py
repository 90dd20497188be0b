"""Feed-forward nets: weight matrices and one activation, no biases."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "linear": nn.Identity}


class FeedForward(nn.Module):
    r"""f(x) = φ(W_L φ(W_{L−1} ... φ(W_1 x))), or W_L φ(W_{L−1} ... φ(W_1 x)) for logits.

    Args:
        widths: D_0 (input), ..., D_L (features); layer l has the weight W_l of shape [D_l, D_{l−1}].
        activation: φ, a name of `ACTIVATIONS`.
        seed: of the weights, whose entries are N(0, 2 / fan-in).
        logits: whether the last layer has no activation.

    Example:
        >>> FeedForward([3, 4, 2], "tanh")(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        widths: Sequence[int],
        activation: str,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        logits: bool = False,
    ) -> None:
        super().__init__()
        names = [activation] * (len(widths) - 2) + ["linear" if logits else activation]
        self.active = nn.ModuleList([ACTIVATIONS[name]() for name in names])
        generator = torch.Generator().manual_seed(seed)
        shapes = zip(widths[1:], widths[:-1], strict=True)
        drawn = [(2 / d) ** 0.5 * torch.randn(n, d, generator=generator, dtype=torch.float64) for n, d in shapes]
        self.layers = nn.ModuleList([nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=dtype) for w in drawn])
        for layer, weight in zip(self.layers, drawn, strict=True):
            layer.load_state_dict({"weight": weight})

    def forward(self, inputs: Tensor) -> Tensor:
        """Return features [n, D_L] of inputs [n, D_0]."""
        hidden = inputs.to(next(self.parameters()))
        for layer, activation in zip(self.layers, self.active, strict=True):
            hidden = activation(layer(hidden))
        return hidden
