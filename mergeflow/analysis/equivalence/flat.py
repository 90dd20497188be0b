"""Models and examples as losses of one flat float64 vector, and their training by the training loop."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from mergeflow.analysis.equivalence.gradient_descent import Loss
from mergeflow.modalities.classification import Classification
from mergeflow.modality import Network
from mergeflow.training import FineTuneSettings, fine_tune

_PARTS = 4  # micro-batches per epoch
_DESCENT = {
    "regime": "joint",
    "optimiser": "sgd",
    "weight_decay": 0.0,
    "warmup": 0.0,
    "schedule": "constant",
    "gradient_clip": 0.0,
}


def flat_weights(module: nn.Module) -> Tensor:
    """Return a module's parameters as one vector [P]."""
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def weights_at(module: nn.Module, point: Tensor) -> dict[str, Tensor]:
    """Return the parts of a flat vector [P] in the shapes and by the names of a module's parameters."""
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    parts = point.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def flat_loss(module: nn.Module, examples: Classification) -> Loss:
    """Return the mean loss over all examples as a function of the module's flat weights.

    Attention takes the plain kernel, the only one with a second derivative.

    Args:
        module: whose weights vary; it stays as it is.
        examples: of one task, in the module's type.

    Example:
        >>> module = nn.Linear(2, 3, bias=False)
        >>> loss = flat_loss(module, Classification("pets", torch.ones(4, 2), torch.tensor([0, 1, 2, 0])))
        >>> round(float(loss(torch.zeros(6))), 4)
        1.0986
    """
    rows = torch.arange(len(examples))

    def loss(point: Tensor) -> Tensor:
        weights = weights_at(module, point)
        here = replace(examples, encode=lambda called, inputs: functional_call(called, weights, (inputs,)))
        with sdpa_kernel(SDPBackend.MATH):
            return here.loss(Network(module), rows)

    return loss


def trained(module: nn.Module, tasks: Sequence[Classification], step: float, epochs: int) -> Tensor:
    """Return the flat weights θ^(k) after k epochs of full-batch descent on the sum of the tasks' losses, [P].

    The training loop makes them, as it makes a project's experts: SGD in place, gradients summed over micro-batches.
    `descend` computes the same in another way; that the two agree is measured, not assumed.

    Args:
        module: θ0; it stays as it is.
        tasks: one for an expert, several for a joint run.
        step: η > 0.
        epochs: k ≥ 1.
    """
    whole = max(len(task) for task in tasks)
    settings = FineTuneSettings.model_validate(
        {**_DESCENT, "steps": epochs, "batch_size": whole, "accumulate": _PARTS, "learning_rate": step}
    )
    model = Network(deepcopy(module).requires_grad_())
    with TemporaryDirectory() as folder, sdpa_kernel(SDPBackend.MATH):
        fine_tune(model, tasks, settings, 0, Path(folder) / "state.pt", lambda: 0.0)
    return flat_weights(model.module)
