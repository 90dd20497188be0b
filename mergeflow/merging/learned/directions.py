"""The directions that AdaMerging's coefficients multiply, read one expert and one tensor at a time.

Neither class holds an expert: task vectors are read from the experts' own files at every use, low-rank directions from
files that are made once. What is in memory is one tensor, its direction of one expert, and on CART the mean.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mergeflow.checkpoints.reader import LazyStateDict, open_safetensors
from mergeflow.checkpoints.writer import write_checkpoint
from mergeflow.merging.architectures.cuts import Form
from mergeflow.merging.execution.reader import Stacks
from mergeflow.merging.linalg.spectra import low_rank_factors
from mergeflow.merging.methods.informed import AdamergingArgs


class Directions(Protocol):
    """An anchor and one direction per expert, for every tensor."""

    def merged(self, name: str, values: Sequence[float]) -> Tensor:
        """Return anchor + Σ_t λ_t d_t of a tensor, new, [*shape]; `values` are λ in order of the experts' names."""
        ...

    def slopes(self, name: str, gradient: Tensor) -> list[float]:
        """Return ⟨gradient, d_t⟩ of a tensor for every expert; the gradient has the tensor's shape [*shape]."""
        ...


class TaskVectors:
    """τ_t = θ_t − θ0 on the base."""

    def __init__(self, stacks: Stacks) -> None:
        self._stacks = stacks

    def merged(self, name: str, values: Sequence[float]) -> Tensor:
        """Return θ0 + Σ_t λ_t τ_t, [*shape]."""
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
