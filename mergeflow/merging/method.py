"""What a merge method is: a pure function on the task vectors of one tensor, with typed arguments.

`function(stack, args) -> (anchor, direction)`: every result is anchor + scale · direction, so that a sweep over the
scale never recomputes a direction. The engine calls the function for each tensor, or for each block of one where the
method treats elements alone, in memory and streaming alike: one engine, one set of bits.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from mergeflow.checkpoints.header import DType
from mergeflow.merging.args import Args
from mergeflow.merging.passes import Pass
from mergeflow.merging.stack import Elementwise, Model, Stack
from mergeflow.merging.workspace import SOME_COPIES, TWO_TENSORS, Copies, Workspace

if TYPE_CHECKING:
    from torch import Tensor

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
        passes: The first passes it needs, from its arguments.
        anchor: The anchor, in words.
        weights: What per-expert weights are: factors, shares of their sum, or without a meaning.
        experts: Smallest and largest number of experts.
        given: The statistics of data it takes.
        linear: From its arguments: whether the result is θ0 + Σ c_t τ_t with factors that no weight plays a part in.
        workspace: (args, tensor's name, model) → bytes held beside base and task vectors of a tensor treated whole.
        on_device: What it holds on a device, base and task vectors among it.
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
    on_device: Copies = SOME_COPIES

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
    found, inside = [], not title
    for line in doc.splitlines()[1:]:
        if line.endswith(":") and line[:1].isupper() and line[:-1].isalpha():
            inside = line == f"{title}:"
        elif inside:
            found.append(line)
    return textwrap.dedent("\n".join(found)).strip()


def all_but_matrices(args: Any, name: str, model: Model) -> bool:
    """Whether a tensor is not treated as a matrix; `elementwise` of methods that average or sum such tensors.

    Args:
        args: The method's arguments, with `matrices`.
        name: The tensor.
        model: What is known of the model.
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
    on_device: Copies = SOME_COPIES,
) -> Callable[[Callable[[Stack, Any], Parts]], Method]:
    """Declare a function (stack, args) → (anchor, direction) as a method; the catalog finds it in its module.

    Args:
        name: What a recipe calls it.
        args: The type of its arguments.
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
            most; see `mergeflow.merging.workspace`. By default two tensors, the direction and one more.
        on_device: What it holds on a device, as `Copies`; by default more than most methods do.

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
        return Method(
            name, function, args, alone, first, anchor, weights, experts, data, of_factors, workspace, on_device
        )

    return declare
