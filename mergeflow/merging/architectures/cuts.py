"""How fused weights are cut into the matrices they hold: one cut, and the rule that finds it from config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

Config = Mapping[str, Any]
Sizes = tuple[int, Sequence[int]]
ROWS, COLUMNS = -2, -1


@dataclass(frozen=True)
class Cut:
    """A fused weight: its axis holds `groups` times parts of the given sizes, side by side.

    There is one group, or as many as heads where each head has its own query, key and value.

    Example:
        >>> two_heads = Cut(ROWS, 2, (1, 1, 1))  # rows q0 k0 v0 q1 k1 v1
        >>> [part.flatten().tolist() for part in two_heads.split(torch.arange(6.0).reshape(6, 1))]
        [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """

    axis: int  # -2 for rows (a torch Linear), -1 for columns (a Conv1D, stored [in, out])
    groups: int
    sizes: tuple[int, ...]  # rows or columns of each part within one group

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Return the parts of [..., m, n]; views where each lies in one piece."""
        if self.groups == 1:
            return list(matrix.split(self.sizes, self.axis))
        grouped = matrix.unflatten(self.axis, (self.groups, sum(self.sizes)))
        return [part.flatten(self.axis - 1, self.axis) for part in grouped.split(self.sizes, self.axis)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the fused weight [..., m, n] of its parts, in the order of `split`."""
        if self.groups == 1:
            return torch.cat(list(parts), self.axis)
        grouped = [part.unflatten(self.axis, (self.groups, -1)) for part in parts]
        return torch.cat(grouped, self.axis).flatten(self.axis - 1, self.axis)

    def __str__(self) -> str:
        """Say it in words, for `mergeflow check`."""
        sizes = "/".join(map(str, self.sizes)) if len(set(self.sizes)) > 1 else f"{len(self.sizes)} × {self.sizes[0]}"
        times = f", {self.groups} times in turn" if self.groups > 1 else ""
        return f"{'rows' if self.axis == ROWS else 'columns'} {sizes}{times}"


@dataclass(frozen=True)
class Form:
    """How a tensor is made of matrices [out, in]."""

    stacked: bool = False  # whether it is a stack of experts, [E, m, n]
    cut: Cut | None = None  # how each matrix is cut; None where it is whole
    transposed: bool = False  # whether it is stored as [in, out]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return the matrices of [..., m, n] or [..., E, m, n]; views where they can be."""
        matrices = tensor.unbind(-3) if self.stacked else [tensor]
        parts = [part for matrix in matrices for part in (self.cut.split(matrix) if self.cut else [matrix])]
        return [part.mT for part in parts] if self.transposed else parts

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the shape [out, in] of each matrix of a tensor [..., m, n], in order of `split`; of a stack's one."""
        rows, columns = shape[-2:]
        parts = [(rows, columns)]
        if self.cut is not None:
            sizes = [self.cut.groups * size for size in self.cut.sizes]
            parts = [(size, columns) if self.cut.axis == ROWS else (rows, size) for size in sizes]
        return [(n, m) for m, n in parts] if self.transposed else parts

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor [..., m, n] or [..., E, m, n] of its matrices, in order of `split`; one is not copied."""
        if self.transposed:
            parts = [part.mT for part in parts]
        if self.cut is not None:
            each = len(self.cut.sizes)
            parts = [self.cut.join(parts[at : at + each]) for at in range(0, len(parts), each)]
        return torch.stack(list(parts), -3) if self.stacked else parts[0]


@dataclass(frozen=True)
class Rule:
    """What the cut of a fused weight follows from."""

    words: str  # the layout, for the page of architectures
    cut: Callable[[Config, int, int], Sizes]  # (config.json, lengths of the fused axis and of the other) → the cut
    axis: int = ROWS  # the fused axis
    always: bool = False  # whether it is cut without `split_qkv` too, because it is not a matrix as it stands

    def __call__(self, name: str, shape: Sequence[int], config: Config) -> Cut:
        """Return the cut of one tensor."""
        length, otherwise = shape[self.axis], "" if self.always else ", or leave `split_qkv: false`"
        try:
            groups, sizes = self.cut(config, length, shape[-3 - self.axis])
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise MergeflowError(
                f"tensor '{name}' is fused ({self.words}), and how depends on {error} of config.json, which is missing "
                f"or not a number. Put the model's config.json next to its weights{otherwise}."
            ) from None
        if groups * sum(sizes) != length or min(sizes) < 1:
            raise MergeflowError(
                f"tensor '{name}' has {length} {'rows' if self.axis == ROWS else 'columns'}, but its layout "
                f"({self.words}) gives {groups} × {list(sizes)}: config.json is of another model, or the layout is "
                f"another one. Correct it{otherwise}."
            )
        return Cut(self.axis, groups, tuple(sizes))
