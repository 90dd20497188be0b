"""Learn AdaMerging's coefficients from a loss without labels, with the experts left on disk.

The gradient of the loss with respect to λ_t^l is the inner product of its gradient with respect to the weights of
tensor l and the direction d_t^l. So one model and its gradient are in memory, and directions pass by one tensor of one
expert at a time: task vectors are read from the experts' own files at every use, low-rank directions from files that
are made once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from mergeflow.checkpoints.checks import check_compatible
from mergeflow.checkpoints.reader import LazyStateDict, open_safetensors
from mergeflow.checkpoints.writer import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging.architectures.architecture import Form
from mergeflow.merging.catalog import MethodCall
from mergeflow.merging.execution.device import check_device
from mergeflow.merging.execution.reader import Stacks, model_of
from mergeflow.merging.files.plan import check_origin
from mergeflow.merging.linalg.spectra import low_rank_factors
from mergeflow.merging.matrices import survey
from mergeflow.merging.methods.informed import AdamergingArgs

State = Mapping[str, Tensor]
Loss = Callable[[dict[str, Tensor], int], tuple[float, Mapping[str, Tensor]]]
"""(state dict, step) → (loss, its gradient per tensor); tensors without a gradient may be missing."""

_BETA1, _BETA2, _EPSILON = 0.9, 0.999, 1e-8


class TaskVectors:
    """τ_t = θ_t − θ0 on the base."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks

    def merged(self, name: str, values: Sequence[float]) -> Tensor:
        """Return θ0 + Σ_t λ_t τ_t of a tensor, new, [*shape]; `values` are λ in order of the experts' names."""
        total, taus = self._stacks.one_by_one(name)
        total = total.clone()  # the task vectors are differences from what was read
        for value, tau in zip(values, taus, strict=True):
            total += tau.mul_(value)
        return total

    def slopes(self, name: str, gradient: Tensor) -> list[float]:
        """Return ⟨gradient, τ_t⟩ for every expert; the gradient is [*shape]."""
        _, taus = self._stacks.one_by_one(name)
        return [_inner(gradient.to(tau), tau) for tau in taus]


class LowRank:
    """SVD_k(θ_t − θ̄) on the mean θ̄, as factors in one file per expert; tensors that are not matrices have none.

    Args:
        folder: For the files; it must last as long as this object.
    """

    def __init__(self, stacks: Stacks, args: AdamergingArgs, folder: Path) -> None:
        self._stacks = stacks
        self._means = {name: _mean(stacks, name) for name in stacks.model.shapes}
        self._files: list[LazyStateDict] = []
        family, ties = stacks.model.architecture, stacks.model.tied
        ways = {name: args.form(family, ties.get(name, name), shape) for name, shape in stacks.model.shapes.items()}
        self._forms = {name: form for name, form in ways.items() if form is not None}
        for number, expert in enumerate(stacks.model.experts):
            factors: dict[str, Tensor] = {}
            for name, form in self._forms.items():
                _, (tau,) = stacks.one_by_one(name, [expert])
                for index, part in enumerate(form.split(tau.sub_(self._means[name]))):
                    pair = _factors(part, args.rank(part.shape))
                    factors.update({f"{name}/{index}/{side}": factor for side, factor in pair.items()})
            write_checkpoint(folder / f"{number}.safetensors", factors)
            self._files.append(open_safetensors(folder / f"{number}.safetensors"))

    def merged(self, name: str, values: Sequence[float]) -> Tensor:
        """Return θ̄ + Σ_t λ_t SVD_k(θ_t − θ̄), [*shape]."""
        base, _ = self._stacks.one_by_one(name, [])
        total = base + self._means[name]
        form = self._forms.get(name, Form())
        parts = form.split(total)
        for value, file in zip(values, self._files, strict=True):
            for part, left, right in self._factored(name, file, parts):
                part.addmm_(left, right, alpha=value)
        return form.join(parts)

    def slopes(self, name: str, gradient: Tensor) -> list[float]:
        """Return ⟨G, L R⟩ = ⟨G Rᵀ, L⟩ for every expert; the gradient G is [*shape]."""
        parts = self._forms.get(name, Form()).split(gradient.to(self._means[name]))
        return [
            sum(_inner(part @ right.T, left) for part, left, right in self._factored(name, file, parts))
            for file in self._files
        ]

    @staticmethod
    def _factored(name: str, file: LazyStateDict, parts: list[Tensor]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each part of a tensor that has a direction with the direction's factors."""
        if f"{name}/0/left" not in file:
            return
        for index, part in enumerate(parts):
            left, right = (file[f"{name}/{index}/{side}"].to(part.device) for side in ("left", "right"))
            yield part, left, right


def _mean(stacks: Stacks, name: str) -> Tensor:
    base, taus = stacks.one_by_one(name)
    total = torch.zeros_like(base)
    for tau in taus:
        total += tau
    return total.div_(len(stacks.model.experts))


def _factors(part: Tensor, rank: int) -> dict[str, Tensor]:
    """Return L and R of SVD_k(A) = L R; at full rank A and the identity."""
    if rank >= min(part.shape):
        left, right = part, torch.eye(part.shape[1], dtype=part.dtype)
    else:
        left, right = low_rank_factors(part, rank)
    return {"left": left.contiguous().cpu(), "right": right.contiguous().cpu()}


def _inner(first: Tensor, other: Tensor) -> float:
    return float((first * other).sum(dtype=torch.float64))


Directions = TaskVectors | LowRank
"""An anchor and one direction per expert, for every tensor."""


@dataclass(frozen=True)
class Learned:
    """Learned λ by expert and tensor, ready to be given as `data={"coefficients": …}`; losses and mean λ by step."""

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
    copied = {name: stacks.base[name] for name in stacks.infos if name not in stacks.model.shapes}
    for step in range(args.steps):
        merged = {name: directions.merged(name, row) for name, row in zip(names, values.T.tolist(), strict=True)}
        value, gradients = loss(copied | merged, step)
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


def _slopes(directions: Directions, names: list[str], gradients: Mapping[str, Tensor], like: Tensor) -> Tensor:
    """⟨gradient, direction⟩ per expert and tensor, [T, L]."""
    slopes = torch.zeros_like(like)
    for column, name in enumerate(names):
        if name in gradients:
            slopes[:, column] = torch.tensor(directions.slopes(name, gradients[name]), dtype=slopes.dtype)
    return slopes
