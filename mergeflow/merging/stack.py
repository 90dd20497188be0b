"""The input of a merge method: a tensor of the base, all task vectors, and facts about the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.checks import all_finite, not_finite
from mergeflow.checkpoints.header import DType
from mergeflow.late import torch
from mergeflow.merging.architectures.architecture import Architecture
from mergeflow.merging.architectures.cuts import Form
from mergeflow.merging.linalg.cache import FactorCache
from mergeflow.merging.matrices import Selection

if TYPE_CHECKING:
    from torch import Tensor


_LEAST = 1e-8  # a sum of weights below it is taken for 0


@dataclass(frozen=True)
class Model:
    """The whole model as a method sees it: names, experts, and results of first passes.

    Attributes:
        experts: Expert names, sorted: the order of the stacks.
        listed: The same names in the order of the recipe.
        weights: One per expert, in sorted order.
        shapes: Shape of every floating-point tensor that is merged.
        dtype: The type of all arithmetic: float32, or float64 where any input is.
        results: Results of the method's first passes, by name.
        data: Given statistics of data, by kind, then expert.
        tied: Names that share storage, each with the first name of its group.
        cache: Kept factorisations.
        varied: Weights that vary over the model, by expert, as they were given.
        architecture: What its tensors are.
        extra_tensors: The most tensors of a unit's size held while it is read, for steps that are computed meanwhile.
    """

    experts: tuple[str, ...]
    listed: tuple[str, ...]
    weights: tuple[float, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: DType
    results: dict[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    tied: Mapping[str, str] = field(default_factory=dict)
    cache: FactorCache | None = None
    varied: Mapping[str, Any] = field(default_factory=dict)
    architecture: Architecture = field(default_factory=Architecture)
    extra_tensors: int = 0

    @property
    def numel(self) -> int:
        """Number of floating-point elements of the whole model."""
        return sum(prod(shape) for shape in self.shapes.values())

    @property
    def has_weights(self) -> bool:
        """Whether a weight is not 1, or may differ from 1 in some tensor."""
        return bool(self.varied) or any(weight != 1 for weight in self.weights)


Elementwise = Callable[[Any, str, Model], bool]
"""(args, tensor's name, model) → whether the tensor's elements are treated alone."""


@dataclass
class Stack:
    """One tensor (or a flat block of one) of the base and of the task vectors of all experts.

    Attributes:
        name: The tensor's name; tied tensors all go by the first name of their group, so that they stay equal.
        base: θ0, in the type of arithmetic; flat for methods that treat elements alone.
        taus: τ_t = θ_t − θ0 of all experts, [T, *base.shape].
        start: Index of the first element in the flattened tensor (0 for a whole tensor).
        model: Facts about the whole model.
        factors: Gives A and B of each task vector as a matrix [out, in] (None for one that is zero), where all experts
            are LoRA adapters; else None.
        copied: Whether base and experts share infinities and differ nowhere: the result is the base's, and what is read
            of it here is 0.
    """

    name: str
    base: Tensor
    taus: Tensor
    start: int
    model: Model
    factors: Callable[[], list[tuple[Tensor, Tensor] | None] | None] = lambda: None
    copied: bool = False

    @property
    def weighted(self) -> Tensor:
        """w_t · τ_t, [T, *base.shape], for formulas that sum task vectors."""
        return self.taus * self.weight_column if self.model.has_weights else self.taus

    def total(self, weighted: Tensor, normalize: bool) -> Tensor:
        """Return the sum [*base.shape] of weighted task vectors [T, *base.shape].

        Args:
            normalize: Whether it is divided by the sum of the weights, where this is not 0.
        """
        divisor = sum(self.model.weights) if normalize else 1.0
        total = weighted.sum(0)
        return total.div_(divisor) if divisor != 1 and abs(divisor) >= _LEAST else total

    def take(self, weighted: bool = True) -> Tensor:
        """Return w_t · τ_t (or τ_t), [T, *base.shape], for the caller alone, to overwrite or to let go of.

        The stack has none afterwards: to read them is an `AttributeError`. So a method that takes its
        task vectors needs no copy of them beside.
        """
        taus = self.taus
        del self.taus
        if weighted and self.model.has_weights:
            taus.mul_(self.weight_column)
        return taus

    def merged(self, merge: Callable[[Tensor, Any], Tensor], args: Any) -> Tensor:
        """Return the tensor [*base.shape] of its matrices, each merged by ([T, m, n], args) → [m, n].

        Args:
            merge: Takes w_t · τ_t of one matrix, and holds it alone: what it lets go of is free.
            args: The method's, with `split_qkv`.
        """
        form, taus = self.form(args.split_qkv), self.take()
        parts = form.split(taus)
        del taus
        return form.join([merge(parts.pop(0), args) for _ in range(len(parts))])

    @property
    def weight_column(self) -> Tensor:
        """The weights as [T, 1, …], shaped to multiply the stack."""
        column = torch.tensor(self.model.weights, dtype=self.base.dtype, device=self.base.device)
        return column.reshape(-1, *[1] * self.base.ndim)

    def datum(self, kind: str, expert: str) -> Tensor | None:
        """Return a statistic of data for this tensor, or None; the block [*base.shape] if it has the tensor's size.

        Raises:
            MergeflowError: It holds NaN or infinity.
        """
        given = self.model.data[kind][expert]
        datum: Tensor | None = given.get(self.name)
        if datum is None:
            return None
        if datum.numel() == self.shape.numel():
            datum = datum.reshape(-1)[self.start : self.start + self.base.numel()].reshape(self.base.shape)
        if not all_finite(datum):
            raise not_finite(f"{kind} of {expert}", self.name)
        return datum.to(self.base.device, self.base.dtype)

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self.model.shapes[self.name])

    def is_matrix(self, selection: Selection) -> bool:
        """Whether a selection takes the tensor as a matrix, or a stack of matrices of experts."""
        return self.model.architecture.treats(self.name, self.base.shape, selection)

    def form(self, splits: bool) -> Form:
        """Return how the tensor is made of matrices."""
        return self.model.architecture.form(self.name, self.base.shape, splits)


@dataclass(frozen=True)
class Pass:
    """A first pass over the whole model, for methods that need a fact about all of it.

    Each worker folds what it sees into an accumulator of its own; accumulators are merged at the end, so both steps
    must give the same result in any order (integers, or pieces that `finish` sums exactly).

    Attributes:
        name: Key of the result in `Model.results`.
        start: Makes an empty accumulator.
        observe: Folds one stack into the accumulator and returns it.
        merge: Joins two accumulators.
        finish: Turns the whole into the result.
        sampled: Whether runs of elements spread over the model are enough; their stacks are flat.
        finds: Names of further results that `finish` adds to `Model.results`, where it can.
        unless: Name of a result that makes the pass needless if it is there already.
        only: (args, tensor's name, model) → whether a tensor is read; all are by default.
        within: Whether it finds something of each tensor by itself: then a tensor is read for it right before it is
            merged, and `Model.results` has one for each tensor, by name.
        held: (model, elements that are read of each expert, workers) → bytes that its accumulators hold at most.
    """

    name: str
    start: Callable[[Model, Any], Any]
    observe: Callable[[Any, Stack, Any], Any]
    merge: Callable[[Any, Any], Any]
    finish: Callable[[Any, Model, Any], Any]
    sampled: bool = False
    finds: tuple[str, ...] = ()
    unless: str = ""
    only: Elementwise | None = None
    within: bool = False
    held: Callable[[Model, int, int], int] = lambda _model, _elements, _workers: 0

    def with_arguments(self, inner: Callable[[Any], Any]) -> Pass:
        """Return the same pass for a method that wraps another: it sees `inner(args)` instead of args."""
        only = self.only
        return replace(
            self,
            only=only and (lambda args, name, model: only(inner(args), name, model)),
            start=lambda model, args: self.start(model, inner(args)),
            observe=lambda total, stack, args: self.observe(total, stack, inner(args)),
            finish=lambda total, model, args: self.finish(total, model, inner(args)),
        )
