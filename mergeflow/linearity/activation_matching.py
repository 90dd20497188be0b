"""Activation matching: permutations that pair units which respond alike to the same samples."""

from collections.abc import Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from mergeflow.linearity.affine import Featured, apart, borrowed
from mergeflow.merging.alignment.groups import Group
from mergeflow.modality import Model, State

_RELATIVE_ZERO = 1e-12  # a smaller share of the mean square is rounding


@torch.no_grad()
def activation_matching(
    model: Model, samples: Featured, reference: State, other: State, groups: Sequence[Group], batch_size: int = 256
) -> list[Tensor]:
    """Return for each group the order of `other`'s units whose outputs correlate most with `reference`'s.

    max_P Σ_u corr(z_u(θ_A; x), z_P(u)(θ_B; x)), one linear assignment a group; z is what the group's first layer
    gives, over samples and positions.

    Args:
        model: What the weights are loaded into; it has its own weights back at the end.
        samples: Of both tasks, for example.
        reference: θ_A.
        other: θ_B.
        groups: As `find_groups` gives them, whose units are single outputs of a layer.
        batch_size: Samples in memory at a time.

    Returns:
        Permutations for `permute(other, groups, …)`, int64 [units] each.

    Source:
        Ainsworth et al. 2023, Git Re-Basin, Section 3.1; Li et al. 2015, Convergent learning.
    """
    layers = [group.places[0].name.rpartition(".")[0] for group in groups]
    assert all(place.size == 1 for group in groups for place in group.places), "heads have no single outputs"
    reference, other = apart(reference, model), apart(other, model)
    sums = [torch.zeros(0)] * len(groups)
    count = 0
    with borrowed(model):
        for rows in torch.arange(len(samples)).split(batch_size):
            found = []
            for state in (reference, other):
                model.load(state)
                found.append(samples.features(model, rows, layers))
            for number, (layer, group) in enumerate(zip(layers, groups, strict=True)):
                a, b = (_units(one[layer], group.units) for one in found)
                part = torch.cat([a, b, torch.ones_like(a[:1])])  # with the row of ones its products hold the sums too
                product = part @ part.T
                sums[number] = product if not count else sums[number] + product
            count += len(rows)
    orders = []
    for product, group in zip(sums, groups, strict=True):
        _, columns = linear_sum_assignment(_correlation(product, group.units).numpy(), maximize=True)
        orders.append(torch.from_numpy(columns))
    return orders


def _units(outputs: Tensor, units: int) -> Tensor:
    """Return outputs as [units, samples · positions] in float64: axis 1 of pictures, the last of others."""
    axis = 1 if outputs.ndim == 4 else outputs.ndim - 1
    return outputs.movedim(axis, 0).reshape(units, -1).double()


def _correlation(product: Tensor, units: int) -> Tensor:
    """Return the correlations of a's units with b's; 0 for a unit that never changes."""
    total = product[-1, -1]
    means = product[-1, :-1] / total
    squares = product[:-1, :-1] / total
    covariance = squares - means[:, None] * means
    variance = covariance.diagonal()
    changes = variance > _RELATIVE_ZERO * squares.diagonal()
    spread = torch.where(changes, variance, 0.0).sqrt()
    scale = spread[:units, None] * spread[None, units:]
    return torch.where(scale > 0, covariance[:units, units:] / torch.where(scale > 0, scale, 1.0), 0.0)
