"""How many bytes a method holds beside the base and the task vectors of a tensor that it treats whole.

They are upper bounds: the engine lets no more tensors into memory than fit, and a plan tells the peak. LAPACK's
decomposition of a float64 Gram matrix takes three times the matrix; that is most of what spectral methods hold beside.
Task vectors that a method takes (`Stack.take`) are its own: it may put results in their place, or let go of them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from mergeflow.merging.stack import Model

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
        beside: Beside those of experts; base, result and some copies of one of them.
        square: Matrices [columns, columns], in tensors of that size.
        least: What it holds of few experts, whose task vectors it has let go of at its peak; `square` comes on top.
    """

    each: float
    beside: float
    square: float = 0.0
    least: float = 0.0


SOME_COPIES = Copies(2, 5)
"""What a method that does not say is taken to hold on a device."""


def tensors(count: Callable[[int], float], weighted: bool = False) -> Workspace:
    """Return the workspace of a method that holds some tensors of the treated one's size.

    Args:
        count: Number of experts → number of tensors.
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
    side, found = matrix.short, matrix.short if rank is None else rank
    kept = found if rank is not None and 4 * rank <= side else side  # the decomposition returns all vectors
    vectors = max(decomposition(matrix, rank), 8 * side * (kept + found))
    return max(vectors, 8 * (side + matrix.long) * found + matrix.strips())
