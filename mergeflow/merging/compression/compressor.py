"""Compressors: how task vectors are stored small, what one declares, and the catalog of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mergeflow.checkpoints.header import DType
from mergeflow.late import np, torch
from mergeflow.merging.catalog import Call, arguments_of
from mergeflow.merging.method import TWO_TENSORS, Elementwise, Model, Pass, Stack, Workspace
from mergeflow.plugins import Shelf
from mergeflow.schema import Frozen

if TYPE_CHECKING:
    from torch import Tensor


class CompressArgs(Frozen):
    """Arguments of a compressor."""


Named = dict[str, "Tensor"]


@dataclass(frozen=True)
class Payload:
    """What is stored of one tensor: a part that all tasks share and one part per task, in order of the stack."""

    shared: Named = field(default_factory=dict)
    per_task: tuple[Named, ...] = ()


@dataclass(frozen=True)
class Stored:
    """What decoding one tensor of one task can use."""

    base: Tensor | None  # θ0 of this tensor in the type of arithmetic; None for compressors that need no base
    shared: Named
    task_part: Named
    whole: Named  # the task's values for the whole model


@dataclass(frozen=True)
class Compressor:
    """One entry of the catalog of compressors: what is stored of a tensor is made of all of it, not by elements."""

    name: str  # what a command says
    encode: Callable[[Stack, Any], Payload]
    decode: Callable[[Stored, Any], Tensor]  # to the task's tensor, in the type of arithmetic
    args: type[CompressArgs]
    passes: Callable[[Any, DType], tuple[Pass, ...]]  # first passes over the whole model, by the type of arithmetic
    whole: Callable[[Model], Mapping[str, Named]]  # values of each task for the whole model, from the first passes
    needs_base: bool  # whether decoding needs θ0
    elementwise: Elementwise = lambda _args, _name, _model: False
    by_rows: bool = False
    workspace: Workspace = TWO_TENSORS  # held beside base and task vectors of a tensor

    def __call__(self, stack: Stack, args: Any) -> Payload:
        """Encode one tensor."""
        return self.encode(stack, args)

    @property
    def doc(self) -> str:
        """Its docstring: line, formula, property, source."""
        return inspect.getdoc(self.encode) or ""

    @property
    def summary(self) -> str:
        """The first line of the docstring."""
        return self.doc.partition("\n")[0]


def compressor(
    name: str,
    args: type[CompressArgs],
    decode: Callable[[Stored, Any], Tensor],
    *,
    passes: Callable[[Any, DType], tuple[Pass, ...]] = lambda _args, _dtype: (),
    whole: Callable[[Model], Mapping[str, Named]] = lambda _: {},
    needs_base: bool = True,
) -> Callable[[Callable[[Stack, Any], Payload]], Compressor]:
    """Declare a function as a `Compressor`, whose `encode` it is; the catalog finds it in its module."""

    def declare(encode: Callable[[Stack, Any], Payload]) -> Compressor:
        return Compressor(name, encode, decode, args, passes, whole, needs_base)

    return declare


def pack(mask: Tensor) -> Tensor:
    """Return the bits of a mask, eight to a byte.

    Example:
        >>> pack(torch.tensor([True, False, True]))
        tensor([160], dtype=torch.uint8)
    """
    return torch.from_numpy(np.packbits(mask.reshape(-1).cpu().numpy()))


def unpack(bits: Tensor, shape: torch.Size) -> Tensor:
    """Return the mask of the given shape that was packed into bytes [⌈numel / 8⌉]."""
    return torch.from_numpy(np.unpackbits(bits.numpy(), count=shape.numel())).bool().reshape(shape)


COMPRESSORS = Shelf(
    "compressor",
    Compressor,
    "mergeflow.merging.compression.compressors",
    "compressors",
    "`@compressor(…)` of mergeflow.merging.compression.compressor",
)
CompressorCall = Call[Compressor]


def compressors() -> dict[str, Compressor]:
    """List every compressor by name: those of mergeflow, of installed packages and of the project.

    Example:
        >>> list(compressors())
        ['cart_indexing', 'emr', 'tall_mask', 'tsv_compress']
    """
    return COMPRESSORS.all()


def configure_compressor(name: str, args: Mapping[str, Any] | None = None) -> CompressorCall:
    """Validate a compressor's arguments and return the frozen call."""
    compressor = COMPRESSORS.get(name)
    return Call(compressor, arguments_of("compressor", name, compressor.args, args))
