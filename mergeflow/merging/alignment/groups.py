"""Groups of units that may be permuted together, and what a permutation does to the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where units lie in a tensor: unit u holds the entries start + u · size … start + (u + 1) · size − 1 of an axis.

    Attributes:
        name: The tensor.
        axis: Which of its axes.
        start: Where the first unit begins.
        size: Entries of a unit: 1 for a neuron, the head's width for a head.
    """

    name: str
    axis: int
    start: int = 0
    size: int = 1

    def rows(self, tensor: Tensor, units: int) -> Tensor:
        """Return the units of a tensor as rows, [units, ...]."""
        part = tensor.movedim(self.axis, 0)[self.start : self.start + units * self.size]
        return part.reshape(units, -1)

    def permuted(self, tensor: Tensor, order: Tensor) -> Tensor:
        """Return the tensor with unit `order[u]` where unit u was."""
        index = torch.arange(tensor.shape[self.axis])
        offsets = order[:, None] * self.size + torch.arange(self.size)
        index[self.start : self.start + len(order) * self.size] = self.start + offsets.reshape(-1)
        return tensor.index_select(self.axis, index)


@dataclass(frozen=True)
class Group:
    """Units that one permutation reorders wherever they lie.

    Attributes:
        name: What it is called in messages.
        units: How many.
        places: All of them; a permutation of all leaves the net's function as it was.
    """

    name: str
    units: int
    places: tuple[Place, ...]


def permute(state: Mapping[str, Tensor], groups: Sequence[Group], orders: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return weights with each group's units reordered.

    Args:
        state: The weights.
        groups: As `find_groups` gives them.
        orders: For each group a permutation, int64 [units]: unit u of the result is unit `order[u]` of `state`.

    Example:
        >>> state = {"0.weight": torch.eye(2), "1.weight": torch.tensor([[1.0, 2.0]])}
        >>> hidden = Group("hidden", 2, (Place("0.weight", 0), Place("1.weight", 1)))
        >>> permute(state, [hidden], [torch.tensor([1, 0])])["1.weight"]
        tensor([[2., 1.]])
    """
    found = dict(state)
    for group, order in zip(groups, orders, strict=True):
        for place in group.places:
            found[place.name] = place.permuted(found[place.name], order)
    return found
