"""Fine-tuning in the tangent space: a module replaced by its first-order Taylor expansion at the base."""

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from mergeflow.errors import MergeflowError
from mergeflow.modality import Model, State, check_fit


class LinearisedModule(nn.Module):
    """f_lin(x; θ) = f(x; θ0) + ∇_θ f(x; θ0)ᵀ (θ − θ0), linear in θ − θ0.

    θ are the trained parameters; they start at θ0, where f_lin = f.

    Args:
        module: f with the weights θ0; they are frozen, and stay as they are.

    Source: Ortiz-Jimenez et al. 2023, equation 4.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        with warnings.catch_warnings():  # the first jvp of a process loads torch code that raises warnings
            warnings.simplefilter("ignore", FutureWarning)
            jvp(torch.sin, (torch.zeros(()),), (torch.zeros(()),))
        self.original = module.requires_grad_(False)
        self.names = [name for name, _ in module.named_parameters()]
        self.weights = nn.ParameterList([nn.Parameter(p.detach().clone()) for p in module.parameters()])
        self.train(module.training)

    def train(self, mode: bool = True) -> "LinearisedModule":
        """Set the mode of all but two kinds of modules.

        Attention stays in training mode, whose code has a forward-mode derivative (no dropout); batch norms in that of
        evaluation, because the expansion is at the statistics of θ0.
        """
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention | _BatchNorm):
                module.training = isinstance(module, nn.MultiheadAttention)
        return self

    def forward(self, *inputs: Any) -> Any:
        """Return the expansion at the module's inputs."""

        def original(weights: dict[str, Tensor]) -> Any:
            return functional_call(self.original, weights, inputs)

        origin = {name: weight.detach() for name, weight in self.original.named_parameters()}
        change = {name: w - origin[name] for name, w in self.trained().items()}
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no forward-mode derivative
            value, slope = jvp(original, (origin,), (change,))[:2]
        return value + slope

    def trained(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.weights, strict=True))


@dataclass(frozen=True)
class LinearisedModel:
    """A model with a part of its module linearised in the weights.

    Attributes:
        base: The model with the weights θ0.
        module: Its module with the linearised part instead of the part.
        tower: The part's name; "" where the whole module is linearised.
    """

    base: Model
    module: nn.Module
    tower: str
    part: LinearisedModule

    @classmethod
    def of(cls, base: Model, tower: str = "") -> "LinearisedModel":
        """Return the model with a direct part of its module linearised; what follows it, such as a norm, stays exact.

        Args:
            base: The model; its weights are frozen, and stay as they are.
            tower: Name of the part, which holds all the parameters; "" for the whole module.
        """
        outside = [name for name, _ in base.module.named_parameters() if not name.startswith(f"{tower}." * bool(tower))]
        if outside:
            raise MergeflowError(
                f"regime linearised: '{outside[0]}' is outside '{tower}', the part that is linearised: all trained "
                "weights must be in it."
            )
        if not tower:
            part = LinearisedModule(base.module)
            return cls(base, part, tower, part)
        module = copy.copy(base.module)
        module._modules = dict(base.module._modules)  # its own table of parts; the parts are shared
        part = LinearisedModule(base.module.get_submodule(tower))
        setattr(module, tower, part)
        return cls(base, module, tower, part)

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Return θ by the base's names: what the expert of this regime holds."""
        return {**self.base.state(), **{self._named(name): w.detach() for name, w in self.part.trained().items()}}

    @torch.no_grad()
    def load(self, state: State) -> None:
        """Copy θ; the expansion stays the one at θ0."""
        check_fit("the state", state, self.base.state())
        for name, weight in self.part.trained().items():
            weight.copy_(state[self._named(name)])

    def _named(self, name: str) -> str:
        return f"{self.tower}.{name}" if self.tower else name
