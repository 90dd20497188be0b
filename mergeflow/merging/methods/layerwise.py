"""Layer-wise scaling of another method's direction."""

from __future__ import annotations

from math import fsum, prod, sqrt
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, field_validator, model_validator

from mergeflow.checkpoints.header import DType
from mergeflow.merging.architectures.blocks import depth
from mergeflow.merging.matrices import Selection
from mergeflow.merging.method import Args, ByUnit, Copies, Method, Model, Parts, Pass, Stack, gathering, method
from mergeflow.schema import frozen, thawed

if TYPE_CHECKING:
    from torch import Tensor

Frozen = Annotated[tuple[tuple[str, Any], ...], BeforeValidator(frozen), PlainSerializer(thawed)]


class LinesArgs(Args):
    of: str = Field("task_arithmetic", description="method whose direction is scaled; one anchored at θ0")
    of_args: Frozen = Field((), description="arguments of that method")
    alpha: float | None = Field(None, description="factor of the first block; by default ‖Στ‖ / (T ‖direction‖)")
    beta: float = Field(0.5, description="what is added to it until the last block")

    @field_validator("of")
    @classmethod
    def _anchored_at_base(cls, name: str) -> str:
        from mergeflow.merging.catalog import get

        method = get(name)
        if name == "lines" or method.anchor != "θ0" or method.data:
            raise ValueError(f"LiNeS scales methods anchored at θ0 that need no data, and '{name}' is not one of them")
        return name

    @model_validator(mode="after")
    def _complete(self) -> LinesArgs:
        from mergeflow.merging.catalog import configure

        object.__setattr__(self, "of_args", frozen(configure(self.of, thawed(self.of_args)).args))
        return self

    def check_experts(self, count: int) -> None:
        self.inner()[1].check_experts(count)

    @property
    def uses(self) -> tuple[str, ...]:
        return (self.of, *self.inner()[1].uses)

    @property
    def selection(self) -> Selection | None:
        selection: Selection | None = self.inner()[1].selection
        return selection

    @property
    def splits(self) -> bool:
        return bool(self.inner()[1].splits)

    def inner(self) -> tuple[Method, Any]:
        from mergeflow.merging.catalog import configure

        call = configure(self.of, thawed(self.of_args))
        return call.method, call.arguments


def _square(part: Tensor) -> float:
    return float(part.double().square().sum())


def _length_pass() -> Pass:
    """Return the pass that finds ‖Στ‖ / (T ‖direction‖) over the whole model; its sums are exact in any order."""

    def squares_of(stack: Stack, args: LinesArgs) -> tuple[float, float]:
        """Return ‖Στ‖² and ‖direction‖² of a unit."""
        inner, inner_args = args.inner()
        summed = _square(stack.weighted.sum(0))  # before the inner method, which may take the task vectors
        return summed, _square(inner(stack, inner_args)[1])

    def finish(squares: ByUnit[tuple[float, float]], model: Model, args: LinesArgs) -> float:
        summed, directed = (fsum(pair[side] for pair in squares.values()) for side in (0, 1))
        return sqrt(summed / directed) / len(model.experts) if directed else 0.0

    return gathering("lines.alpha", squares_of, finish)


def _passes(args: LinesArgs, dtype: DType) -> tuple[Pass, ...]:
    inner, inner_args = args.inner()
    passes = tuple(each.with_arguments(lambda args: args.inner()[1]) for each in inner.passes(inner_args, dtype))
    return passes if args.alpha is not None else (*passes, _length_pass())


def _elementwise(args: LinesArgs, name: str, model: Model) -> bool:
    inner, inner_args = args.inner()
    return inner.elementwise(inner_args, name, model)


def _workspace(args: LinesArgs, name: str, model: Model) -> int:
    inner, inner_args = args.inner()  # and what its length or its product with λ takes
    further = (len(model.experts) + 5) * prod(model.shapes[name]) * model.dtype.itemsize
    return inner.workspace(inner_args, name, model) + further


@method("lines", LinesArgs, elementwise=_elementwise, passes=_passes, workspace=_workspace, on_device=Copies(1, 7))
def lines(stack: Stack, args: LinesArgs) -> Parts:
    """Another method's direction, scaled up with depth.

    θ = θ0 + scale · λ_l · direction,  λ_l = α + β · l/(L−1) by block index

    Tensors before the first block take l = 0, those after the last l = L−1. Roles and names tell them apart:
    embeddings, positions, the stem and the norm behind it come before the blocks, heads and all else after them.

    Property:
        With β = 0 every block is scaled by α alone; with β > 0 shallow blocks stay nearer to the base.

    Source:
        Wang et al., LiNeS (ICLR 2025), equation 4, and section 5.2 for the default of α.
    """
    inner, inner_args = args.inner()
    anchor, direction = inner(stack, inner_args)
    alpha = args.alpha if args.alpha is not None else stack.model.results["lines.alpha"]
    return anchor, direction * (alpha + args.beta * depth(stack.name, stack.model.shapes, stack.model.architecture))
