"""Learn AdaMerging's coefficients from a loss without labels, with the experts left on disk.

The gradient of the loss with respect to λ_t^l is the inner product of its gradient with respect to the weights of
tensor l and the direction d_t^l. So one model and its gradient are in memory, and directions pass by one tensor of one
expert at a time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from mergeflow.checkpoints.checks import check_compatible
from mergeflow.errors import MergeflowError
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.execution.device import check_device
from mergeflow.merging.execution.reader import Stacks, model_of
from mergeflow.merging.files.plan import check_origin
from mergeflow.merging.learned.directions import Directions, LowRank, TaskVectors
from mergeflow.merging.matrices import survey
from mergeflow.merging.methods.informed import AdamergingArgs

State = Mapping[str, Tensor]
Loss = Callable[[dict[str, Tensor], int], tuple[float, Mapping[str, Tensor]]]
"""(state dict, step) → (loss, its gradient per tensor); tensors without a gradient may be missing."""

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class Learned:
    """Learned coefficients.

    Attributes:
        coefficients: λ by expert and tensor, ready to be given as `data={"coefficients": …}`.
        losses: The loss at every step.
        history: Mean λ per expert at every step.
    """

    coefficients: dict[str, dict[str, float]]
    losses: list[float] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)


def learn(
    call: MethodCall,
    base: State,
    experts: Mapping[str, State],
    loss: Loss,
    progress: Callable[[int, int], None] | None = None,
    device: str = "cpu",
    scratch: str | Path | None = None,
) -> Learned:
    """Minimise a loss over the coefficients λ by Adam.

    θ = anchor + Σ_t λ_t^l d_t^l;  λ ← Adam(λ, ⟨∇_{θ^l} loss, d_t^l⟩)

    Args:
        call: `configure("adamerging", …)`: granularity, directions, first value, steps, learning rate.
        base: θ0, in memory or lazy.
        experts: State dicts by name, in memory or lazy; each tensor is read anew at every step, so memory does not
            depend on their number. On `cart` the low-rank directions lie in files while learning.
        loss: Entropy of the merged model on unlabelled examples, with its gradient: (state, step) → (loss, gradients).
        device: "cpu" or a CUDA device, where the states given to the loss are made.
        scratch: Folder for the files of `cart`, empty again afterwards; by default the system's temporary one.

    Raises:
        MergeflowError: Another method, experts or task vectors that do not fit, or a loss that is not finite.
    """
    args = call.arguments
    if not isinstance(args, AdamergingArgs):
        raise MergeflowError(f"only 'adamerging' learns coefficients, not '{call.name}'.")
    check_compatible(base, experts)
    check_origin(base, experts)
    check_device(device)
    stacks = Stacks(base, experts, model_of(base, experts), device)
    model = stacks.model
    survey(f"method '{call.name}'", args.selection, args.splits, stacks.infos, model.tied, model.architecture)
    with TemporaryDirectory(prefix="directions-", dir=scratch) as folder:
        directions = TaskVectors(stacks) if args.on == "task_vectors" else LowRank(stacks, args, Path(folder))
        return _descend(args, stacks, directions, loss, progress or (lambda done, total: None))


def _descend(
    args: AdamergingArgs, stacks: Stacks, directions: Directions, loss: Loss, progress: Callable[[int, int], None]
) -> Learned:
    names = list(stacks.model.shapes)
    values = torch.full((len(stacks.model.experts), len(names)), args.init, dtype=torch.float64)
    mean, square = torch.zeros_like(values), torch.zeros_like(values)
    learned = Learned({})
    # A gradient is that of one name of tied weights, and the model reads them by one, too.
    tied = torch.tensor([names.index(stacks.model.tied.get(name, name)) for name in names])
    for step in range(args.steps):
        value, gradients = loss(_merged(stacks, directions, names, values), step)
        if not torch.isfinite(torch.tensor(value)):
            raise MergeflowError(f"the loss is {value} at step {step}: lower lr ({args.lr}) or init ({args.init}).")
        slope = _slopes(directions, names, gradients, values)
        if args.granularity == "task":
            slope = slope.sum(1, keepdim=True).expand_as(slope)
        else:
            slope = torch.zeros_like(slope).index_add_(1, tied, slope)[:, tied]
        mean.mul_(_BETA1).add_(slope, alpha=1 - _BETA1)
        square.mul_(_BETA2).addcmul_(slope, slope, value=1 - _BETA2)
        correction = (square / (1 - _BETA2 ** (step + 1))).sqrt().add_(_EPSILON)
        values.addcdiv_(mean / (1 - _BETA1 ** (step + 1)), correction, value=-args.lr)
        if args.clamp:
            values.clamp_(0, 1)
        learned.losses.append(float(value))
        learned.history.append(
            {name: float(row.mean()) for name, row in zip(stacks.model.experts, values, strict=True)}
        )
        progress(step + 1, args.steps)
    if args.steps and not square.any():
        raise MergeflowError(
            "no coefficient changes the loss: experts are as the base, or every task has one class, whose predictions "
            "are certain. Give tasks of several classes, and experts that were trained."
        )
    for name, row in zip(stacks.model.experts, values.tolist(), strict=True):
        learned.coefficients[name] = dict(zip(names, row, strict=True))
    return learned


def _merged(stacks: Stacks, directions: Directions, names: list[str], values: Tensor) -> dict[str, Tensor]:
    """θ at the present coefficients, in the type of arithmetic; integer tensors are the base's."""
    state = {name: stacks.base[name] for name in stacks.infos if name not in stacks.model.shapes}
    for column, name in enumerate(names):
        state[name] = directions.merged(name, values[:, column].tolist())
    return state


def _slopes(directions: Directions, names: list[str], gradients: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """⟨gradient, direction⟩ per expert and tensor, [T, L]."""
    slopes = torch.zeros_like(like)
    for column, name in enumerate(names):
        if name in gradients:
            slopes[:, column] = torch.tensor(directions.slopes(name, gradients[name]), dtype=slopes.dtype)
    return slopes
