"""Merge methods: pure functions on the task vectors of one tensor, with typed arguments.

`function(stack, args) -> (anchor, direction)`: every result is anchor + scale · direction, so that a sweep over the
scale never recomputes a direction. The engine calls the function for each tensor, or for each block of one where the
method treats elements alone, in memory and streaming alike: one engine, one set of bits.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, PrivateAttr

from mergeflow.checkpoints.header import DType
from mergeflow.merging.matrices import Selection
from mergeflow.merging.stack import Elementwise, Model, Pass, Stack
from mergeflow.schema import Frozen

if TYPE_CHECKING:
    from torch import Tensor


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
        """Return the arguments with some that vary."""
        copy = self.model_copy()
        copy._varied = dict(varied)
        return copy

    def with_values(self, values: Mapping[str, Any], each: Mapping[str, tuple[float, ...]]) -> Self:
        """Return the arguments for one tensor, with values of its own and others for each expert."""
        copy = self.model_copy(update=dict(values))
        copy._each = dict(each)
        return copy

    def check_experts(self, count: int) -> None:
        """Check the arguments against the number of experts.

        Raises:
            MergeflowError: One that makes no sense with so many.
        """

    @property
    def needs_base(self) -> bool:
        """Whether the result depends on the base."""
        return True

    @property
    def selection(self) -> Selection | None:
        """Which matrices the method treats apart; None where it treats none."""
        selection: Selection | None = getattr(self, "matrices", None)
        return selection

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
    """A matrix that a tensor is cut into, and how many experts have one.

    Attributes:
        rows: m.
        columns: n.
        experts: T.
        itemsize: Bytes of a number in the type of arithmetic.
        whole: Whether it is all of the tensor, so that nothing else needs the tensor's task vectors.
    """

    rows: int
    columns: int
    experts: int
    itemsize: int
    whole: bool = False

    @property
    def short(self) -> int:
        """The smaller side."""
        return min(self.rows, self.columns)

    @property
    def long(self) -> int:
        """The larger side."""
        return max(self.rows, self.columns)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in the type of arithmetic."""
        return self.rows * self.columns * self.itemsize

    @property
    def wide(self) -> int:
        """Bytes of the matrix in float64."""
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
    """Return the workspace of a method that holds some tensors of the treated one's size.

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
    """Return the workspace of a method that treats the matrices of a tensor one after the other.

    Args:
        of_one: (args, matrix) → bytes that one matrix takes.
    """

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
    """Return the bytes of finding the leading eigenvectors of a Gram matrix: the matrix, its rows, LAPACK's work.

    Args:
        matrix: What the Gram matrix, of its shorter side, is made of.
        rank: How many vectors; all by default, which take the place of the Gram matrix.
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
        name: What a recipe calls it.
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
    """One entry of the catalog.

    Attributes:
        name: What a recipe says.
        function: (stack, args) → (anchor, direction).
        args: The type of its arguments.
        elementwise: (args, tensor's name, model) → whether the tensor's elements are treated alone, so that its blocks
            may be treated apart.
        by_rows: Whether it treats the rows of other tensors alone, along the first axis, so that some may be read at a
            time; a vector is one row.
        passes: The first passes it needs, from its arguments.
        anchor: The anchor, in words.
        weights: What per-expert weights are: factors, shares of their sum, or without a meaning.
        experts: Smallest and largest number of experts.
        given: The statistics of data it takes.
        linear: From its arguments: whether the result is θ0 + Σ c_t τ_t with factors that no weight plays a part in.
        workspace: (args, tensor's name, model) → bytes held beside base and task vectors of a tensor treated whole.
        on_device: From its arguments: what it holds on a device, base and task vectors among it.
    """

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
        """Apply the method to one stack."""
        return self.function(stack, args)

    @property
    def home(self) -> str:
        """The module that declares it."""
        return self.function.__module__

    @property
    def doc(self) -> str:
        """Its docstring: line, formula, arguments, source."""
        return inspect.getdoc(self.function) or ""

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
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
    """Whether a tensor is not treated as a matrix; `elementwise` of methods that average or sum such tensors.

    Args:
        args: The method's arguments, with `matrices`.
    """
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
            (args, tensor's name, model) → whether it is so for a tensor. Such tensors come in flat blocks, which keeps
            memory small; others come whole.
        passes: (args, type of arithmetic) → first passes over the whole model.
        anchor: The anchor, in words; "–" for methods whose result is the same for every base.
        weights: What per-expert weights are: "factors", "shares" of their sum (which then must not be 0), or "none".
        experts: Smallest and largest number of experts; None for any number.
        data: The statistics of data it takes.
        linear: Whether (for some arguments) the result is θ0 + Σ c_t τ_t with factors c_t that depend on no weight of
            the models; then adapters are merged by algebra of their factors.
        workspace: (args, tensor's name, model) → bytes held beside base and task vectors of a tensor treated whole, at
            most; see `mergeflow.merging.method`. By default two tensors, the direction and one more.
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
