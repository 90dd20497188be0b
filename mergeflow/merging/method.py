"""Merge methods: pure functions on the task vectors of one tensor, with typed arguments.

`function(stack, args) -> (anchor, direction)`: every result is anchor + scale · direction, so that a sweep over the
scale never recomputes a direction. The engine calls the function for each tensor, or for each block of one where the
method treats elements alone, in memory and streaming alike: one engine, one set of bits.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

from pydantic import Field, PrivateAttr

from mergeflow.checkpoints.checks import all_finite, not_finite
from mergeflow.checkpoints.header import DType
from mergeflow.late import torch
from mergeflow.merging.architectures.architecture import Architecture, Form
from mergeflow.merging.matrices import Selection
from mergeflow.schema import Frozen

if TYPE_CHECKING:
    from torch import Tensor

    from mergeflow.merging.linalg.spectra import FactorCache


_LEAST = 1e-8  # a sum of weights below it is taken for 0
RUNNING = ("running_mean", "running_var")  # the ends of the names of BatchNorm's statistics


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
        varied: Weights that vary over the model, by expert, as they were given.
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
        """Return the sum [*base.shape] of weighted task vectors [T, *base.shape], over the weights' sum if not 0."""
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

        `merge` takes w_t · τ_t of one matrix, and holds it alone: what it lets go of is free.
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
        """Return a statistic of data for this tensor, or None; the block [*base.shape] if it has the tensor's size."""
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
        return torch.Size(self.model.shapes[self.name])

    def is_matrix(self, selection: Selection) -> bool:
        """Whether a selection takes the tensor as a matrix, or a stack of matrices of experts."""
        return self.model.architecture.treats(self.name, self.base.shape, selection)

    def form(self, splits: bool) -> Form:
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


V = TypeVar("V")
ByUnit = dict[tuple[str, int], V]
"""A value of each unit that was read, by its tensor and first element."""


def gathering(
    name: str, value: Callable[[Stack, Any], V], finish: Callable[[ByUnit[V], Model, Any], Any], **more: Any
) -> Pass:
    """Return a pass that gathers (stack, args) → a value of each unit, for `finish`; `more` are fields of `Pass`."""

    def observe(values: ByUnit[V], stack: Stack, args: Any) -> ByUnit[V]:
        values[stack.name, stack.start] = value(stack, args)
        return values

    return Pass(name, lambda model, args: {}, observe, lambda a, b: {**a, **b}, finish, **more)


NORMALIZE = "divide the sum by that of the weights, where this is not 0"


class Args(Frozen):
    """Arguments of a method; `scale` multiplies the direction, any real number (negative unlearns)."""

    scale: float = Field(1.0, description="factor of the direction; any real number")
    per_expert: ClassVar[tuple[str, ...]] = ()  # arguments that may have a value for each expert
    _varied: dict[str, Any] = PrivateAttr(default_factory=dict)
    _each: dict[str, tuple[float, ...]] = PrivateAttr(default_factory=dict)

    @property
    def varied(self) -> Mapping[str, Any]:
        """Arguments whose values vary over the model or the experts, as they were given."""
        return self._varied

    def each(self, key: str, count: int) -> tuple[float, ...]:
        """Return an argument's value for each of `count` experts, in sorted order."""
        return self._each.get(key) or (getattr(self, key),) * count

    def with_varied(self, varied: Mapping[str, Any]) -> Self:
        copy = self.model_copy()
        copy._varied = dict(varied)
        return copy

    def with_values(self, values: Mapping[str, Any], each: Mapping[str, tuple[float, ...]]) -> Self:
        """Return the arguments for one tensor, with values of its own and others for each expert."""
        copy = self.model_copy(update=dict(values))
        copy._each = dict(each)
        return copy

    def check_experts(self, count: int) -> None:
        """Check that the arguments make sense with so many experts."""

    @property
    def needs_base(self) -> bool:
        """Whether the result depends on the base."""
        return True

    @property
    def selection(self) -> Selection | None:
        """Which matrices the method treats apart; None where it treats none."""
        return getattr(self, "matrices", None)

    @property
    def uses(self) -> tuple[str, ...]:
        """Names of other methods that the method calls."""
        return ()

    @property
    def splits(self) -> bool:
        """Whether fused weights are cut into the matrices they hold."""
        return bool(getattr(self, "split_qkv", False))


Workspace = Callable[[Any, str, Model], int]
"""(args, tensor's name, model) → bytes."""

_STRIP = 1024  # rows that are turned into float64 at a time


class Matrix(NamedTuple):
    """A matrix that a tensor is cut into, how many experts have one, and the size of a number of the arithmetic.

    `whole` says whether it is all of the tensor, so that nothing else needs the tensor's task vectors.
    """

    rows: int
    columns: int
    experts: int
    itemsize: int
    whole: bool = False

    @property
    def short(self) -> int:
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        return max(self.rows, self.columns)

    @property
    def nbytes(self) -> int:
        return self.rows * self.columns * self.itemsize

    @property
    def wide(self) -> int:
        return 8 * self.rows * self.columns

    @property
    def freed(self) -> int:
        """Bytes that are free once a method has let go of the task vectors."""
        return self.whole * self.experts * self.nbytes

    def strips(self, count: int = 1) -> int:
        """Bytes of the rows of the taller form that are in float64 at a time."""
        return 8 * count * min(_STRIP, self.long) * self.short


class Copies(NamedTuple):
    """Tensors of a unit's size that a method holds on a device at its peak; a unit is a tensor, or a block of one.

    They were counted on the device's own code path, with tests/card.py: from some number of experts on they are linear
    in it. Matrices were square; Gram matrices of a long and narrow one are smaller.

    Attributes:
        each: For each expert.
        fixed: However many the experts: base, result and some copies of one task vector.
        square: Matrices [columns, columns], in tensors of that size.
        least: What it holds of few experts, whose task vectors it has let go of at its peak; `square` comes on top.
        joint: Matrices [side, side], where side is the shorter one of all experts' matrices beside each other; twice as
            many, and a bit, where their columns are fewer than rows.
    """

    each: float
    fixed: float
    square: float = 0.0
    least: float = 0.0
    joint: float = 0.0


SOME_COPIES = Copies(2, 5)
"""What a method that does not say is taken to hold on a device."""


def tensors(count: Callable[[int], float], weighted: bool = False) -> Workspace:
    """Return the workspace of a method that holds some tensors of the treated one's size, from the number of experts.

    Args:
        weighted: Whether the task vectors are multiplied by their weights first, where these are not 1.
    """

    def workspace(args: Any, name: str, model: Model) -> int:
        experts = len(model.experts)
        copies = count(experts) + experts * (weighted and model.has_weights)
        return int(copies * prod(model.shapes[name]) * model.dtype.itemsize)

    return workspace


TWO_TENSORS = tensors(lambda experts: 2)
"""The workspace of methods that do not say: the direction, and one more tensor of its size."""


def matrices(of_one: Callable[[Any, Matrix], int]) -> Workspace:
    """Return the workspace of a method that treats a tensor's matrices one after the other, of what each takes."""

    def workspace(args: Any, name: str, model: Model) -> int:
        shape, count, itemsize = model.shapes[name], len(model.experts), model.dtype.itemsize
        form = model.architecture.form(name, shape, args.splits)
        parts = form.shapes(shape)
        whole, copies = len(parts) == 1 and not form.stacked, int(form.transposed)
        if not whole:  # results of the parts, and what they are joined to
            copies += 2 + count * (form.cut is not None and form.cut.groups > 1)
        most = max(of_one(args, Matrix(*part, count, itemsize, whole)) for part in parts)
        return most + copies * prod(shape) * itemsize

    return workspace


def decomposition(matrix: Matrix, rank: int | None = None) -> int:
    """Return the bytes of finding the leading eigenvectors (or all) of a matrix's Gram matrix, of its shorter side.

    They are those of the Gram matrix, of the rows it is made of, and of LAPACK's work.
    """
    side = matrix.short
    few = rank is not None and 4 * rank <= side
    return 8 * side * side + max(matrix.strips(), 8 * side * ((rank or 0) + 70 if few else 2 * side + 6))


def svd(matrix: Matrix, rank: int | None = None) -> int:
    """Return the bytes of `linalg.spectra.svd` of a matrix, with what it returns."""
    side, count = matrix.short, matrix.short if rank is None else rank
    vectors_kept = count if rank is not None and 4 * rank <= side else side  # the decomposition returns all vectors
    vectors = max(decomposition(matrix, rank), 8 * side * (vectors_kept + count))
    return max(vectors, 8 * (side + matrix.long) * count + matrix.strips())


Parts = tuple["Tensor", "Tensor"]
Shape = tuple[int, ...]
Weights = Literal["factors", "shares", "none"]


@dataclass(frozen=True)
class Datum:
    """A statistic of data that a method is given per expert and tensor.

    Attributes:
        shape: The statistic's shape, from the tensor's.
        everywhere: Whether every floating-point tensor needs it; else a tensor may be without it in all experts alike.
        needed: Whether the method cannot do without.
    """

    name: str
    shape: Callable[[Shape], Shape]
    everywhere: bool = False
    needed: bool = True


@dataclass(frozen=True)
class Method:
    """One entry of the catalog, as `method` declares it."""

    name: str
    function: Callable[[Stack, Any], Parts]
    args: type[Args]
    elementwise: Elementwise
    passes: Callable[[Any, DType], tuple[Pass, ...]]
    anchor: str
    weights: Weights
    experts: tuple[int, int | None]
    given: tuple[Datum, ...]
    linear: Callable[[Any], bool] = lambda _args: False
    workspace: Workspace = TWO_TENSORS
    on_device: Callable[[Any], Copies] = lambda _args: SOME_COPIES
    by_rows: bool = False

    @property
    def data(self) -> tuple[str, ...]:
        """Names of the statistics of data it must be given, per expert."""
        return tuple(datum.name for datum in self.given if datum.needed)

    def __call__(self, stack: Stack, args: Any) -> Parts:
        return self.function(stack, args)

    @property
    def home(self) -> str:
        return self.function.__module__

    @property
    def doc(self) -> str:
        """Its docstring: line, formula, arguments, source."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        return self.doc.partition("\n")[0]

    def section(self, title: str) -> str:
        """Return the text of one section of the docstring ("Source", "Property"); the formula is section ""."""
        return section_of(self.doc, title)


def section_of(doc: str, title: str) -> str:
    """Return one section of a docstring, without its indent; what stands before the first is section ""."""
    lines, inside = [], not title
    for line in doc.splitlines()[1:]:
        if line.endswith(":") and line[:1].isupper() and line[:-1].isalpha():
            inside = line == f"{title}:"
        elif inside:
            lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip()


def all_but_matrices(args: Any, name: str, model: Model) -> bool:
    """Whether a tensor is not treated as a matrix; `elementwise` of methods that average or sum such tensors."""
    return not model.architecture.treats(name, model.shapes[name], args.matrices)


def method(
    name: str,
    args: type[Args],
    *,
    elementwise: bool | Elementwise = False,
    passes: Callable[[Any, DType], tuple[Pass, ...]] | None = None,
    anchor: str = "θ0",
    weights: Weights = "factors",
    experts: tuple[int, int | None] = (1, None),
    data: tuple[Datum, ...] = (),
    linear: bool | Callable[[Any], bool] = False,
    workspace: Workspace = TWO_TENSORS,
    on_device: Copies | Callable[[Any], Copies] = SOME_COPIES,
    by_rows: bool = False,
) -> Callable[[Callable[[Stack, Any], Parts]], Method]:
    """Declare a function (stack, args) → (anchor, direction) as a method; the catalog finds it in its module.

    Args:
        name: What a recipe calls it.
        elementwise: Whether each element of the result depends on the same element of base and task vectors alone; or
            (args, tensor's name, model) → whether it is so. Such tensors come in flat blocks, others whole.
        passes: (args, type of arithmetic) → first passes over the whole model.
        anchor: The anchor, in words; "–" for methods whose result is the same for every base.
        weights: What per-expert weights are: "factors", "shares" of their sum (which then must not be 0), or "none".
        experts: Smallest and largest number of experts; None for any number.
        data: The statistics of data it takes.
        linear: Whether (for some arguments) the result is θ0 + Σ c_t τ_t with factors c_t that depend on no weight of
            the models; then adapters are merged by algebra of their factors.
        workspace: (args, tensor's name, model) → bytes held beside base and task vectors of a tensor treated whole, at
            most; by default two tensors, the direction and one more.
        on_device: What it holds on a device, as `Copies`, or args → that; by default more than most methods do.
        by_rows: Whether rows along the first axis are treated alone; such tensors come in some rows at a time.

    Example:
        >>> @method("halved", Args, elementwise=True)
        ... def halved(stack, args):
        ...     return stack.base, stack.taus.sum(0) / 2
        >>> halved.name
        'halved'
    """

    def declare(function: Callable[[Stack, Any], Parts]) -> Method:
        alone = elementwise if callable(elementwise) else lambda _args, _name, _model: bool(elementwise)
        of_factors = linear if callable(linear) else lambda _args: bool(linear)
        first = passes or (lambda _args, _dtype: ())
        held = on_device if callable(on_device) else lambda _args: on_device
        return Method(
            name, function, args, alone, first, anchor, weights, experts, data, of_factors, workspace, held, by_rows
        )

    return declare
