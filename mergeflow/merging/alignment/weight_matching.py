"""Weight matching: permutations that bring one net's weights close to another's, by linear assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mergeflow.late import np, torch
from mergeflow.merging.alignment.groups import Group, permute

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDS = 100  # Git Re-Basin converges in 5 to 30; each one costs an assignment a group


def weight_matching(
    reference: Mapping[str, Tensor], other: Mapping[str, Tensor], groups: Sequence[Group], seed: int = 0
) -> list[Tensor]:
    """Return for each group the order of `other`'s units that brings it closest to `reference`.

    max_P ⟨θ_A, P(θ_B)⟩ by coordinate descent: given all other permutations, one group's best is a linear assignment.
    The groups are visited in random order until a whole round changes nothing.

    Args:
        reference: θ_A.
        other: θ_B, with the same names and shapes.
        groups: As `find_groups` gives them.
        seed: Of the order of visits.

    Returns:
        Permutations for `permute(other, groups, …)`.

    Example:
        >>> from mergeflow.merging.alignment.layouts import find_groups
        >>> net = {"0.weight": torch.tensor([[1.0], [2.0]]), "1.weight": torch.tensor([[3.0, 4.0]])}
        >>> groups = find_groups({name: value.shape for name, value in net.items()})
        >>> weight_matching(net, permute(net, groups, [torch.tensor([1, 0])]), groups)
        [tensor([1, 0])]

    Source:
        Ainsworth et al. 2023, Git Re-Basin, Algorithm 1.
    """
    from scipy.optimize import linear_sum_assignment

    orders = [torch.arange(group.units) for group in groups]
    if not groups:
        return orders
    touched = {place.name for group in groups for place in group.places}
    current = {name: other[name].double() for name in touched}
    wanted = {name: reference[name].double() for name in touched}
    generator = np.random.default_rng(seed)
    for _ in range(_ROUNDS):
        changed = False
        for index in generator.permutation(len(groups)):
            group = groups[index]
            gain = alikeness(group, wanted, current).numpy()
            _, columns = linear_sum_assignment(gain, maximize=True)
            order, still = torch.from_numpy(columns), np.arange(group.units)
            # Ties are left as they are, or the rounds would not end.
            if gain[still, columns].sum() > gain[still, still].sum() * (1 + 1e-12) + 1e-12:
                current = permute(current, [group], [order])
                orders[index] = orders[index][order]
                changed = True
        if not changed:
            break
    return orders


def alikeness(group: Group, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return the inner products of a group's units in two nets, [units of a, units of b]; running statistics apart.

    Args:
        group: Units that are permuted together, and where they stand in each tensor.
        a: State dict of the one net.
        b: State dict of the other, with the same names and shapes.

    Returns:
        float64 [units of a, units of b].
    """
    total = torch.zeros(group.units, group.units, dtype=torch.float64)
    for place in group.places:
        if "running_" not in place.name:
            total += place.rows(a[place.name], group.units) @ place.rows(b[place.name], group.units).T
    return total
