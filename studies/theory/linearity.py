"""Stitched models, units matched by activation, and the curvature of a loss."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from mergeflow.linearity.affine import Featured, borrowed, clone_shared
from mergeflow.linearity.layers import check_layers
from mergeflow.merging.alignment import Group
from mergeflow.modality import Examples, Model, State


@contextmanager
def replaced(module: nn.Module, layer: str, value: Tensor) -> Iterator[None]:
    """Let a submodule give `value` whatever it computes; of several outputs the first is replaced.

    Args:
        layer: The submodule's dotted name.
        value: What it gives: [B, …], of the shape that it computes.
    """

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return value if isinstance(output, Tensor) else (value, *output[1:])

    handle = module.get_submodule(layer).register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def front(
    model: Model, examples: Examples, state: State, layers: Sequence[str], *, batch_size: int = 128
) -> dict[str, Tensor]:
    """Return f(θ), what layers give for every example: layer → [n, …], in one pass.

    Args:
        model: What the weights are loaded into; it has its own weights back at the end.

    Raises:
        MergeflowError: the module has no such layer.
    """
    check_layers(model.module, layers)
    state = clone_shared(state, model)
    with borrowed(model):
        model.load(state)
        parts = [examples.features(model, rows, layers) for rows in torch.arange(len(examples)).split(batch_size)]
    return {layer: torch.cat([part[layer] for part in parts]) for layer in layers}


@torch.no_grad()
def stitch(
    model: Model,
    examples: Examples,
    back: State,
    layer: str,
    terms: Sequence[tuple[float, Tensor]],
    read: Callable[[Model, Tensor], Tensor] | None = None,
    *,
    batch_size: int = 128,
) -> Tensor:
    """Run the layers after `layer` of one model on h = Σ c f(θ_c) of others, with nothing learned between.

    Args:
        model: What the weights are loaded into; it has its own weights back at the end.
        terms: (c, f(θ_c)), the features as `front` gives them; Σ c need not be 1.
        read: What is read of the model: a function of it and of some examples' numbers, int64 [b], such as
            `examples.log_p`; `examples.scores` if none is given.

    Returns:
        What `read` gives for all examples, [n, …].

    Raises:
        MergeflowError: the module has no such layer.

    Source:
        Zhou et al. 2024, Cross-Task Linearity, Section 4.3, footnote 5.
    """
    assert terms, "a stitch needs at least one term"
    check_layers(model.module, [layer])
    read, back, outputs = read or examples.scores, clone_shared(back, model), []
    with borrowed(model):
        model.load(back)
        for rows in torch.arange(len(examples)).split(batch_size):
            total = sum(factor * features[rows] for factor, features in terms)
            assert isinstance(total, Tensor)
            with replaced(model.module, layer, total):
                outputs.append(read(model, rows))
    return torch.cat(outputs)


# Activation matching: permutations that pair units which respond alike to the same samples.

_RELATIVE_ZERO = 1e-12  # a smaller share of the mean square is rounding


@torch.no_grad()
def activation_matching(
    model: Model, samples: Featured, reference: State, other: State, groups: Sequence[Group]
) -> list[Tensor]:
    """Return for each group the order of `other`'s units whose outputs correlate most with `reference`'s.

    max_P Σ_u corr(z_u(θ_A; x), z_P(u)(θ_B; x)), one linear assignment a group; z is what the group's first layer
    gives, over samples and positions.

    Args:
        model: What the weights are loaded into; it has its own weights back at the end.
        groups: As `find_groups` gives them, whose units are single outputs of a layer.

    Returns:
        Permutations for `permute(other, groups, …)`, int64 [units] each.

    Source:
        Ainsworth et al. 2023, Git Re-Basin, Section 3.1; Li et al. 2015, Convergent learning.
    """
    layers = [group.places[0].name.rpartition(".")[0] for group in groups]
    assert all(place.size == 1 for group in groups for place in group.places), "heads have no single outputs"
    reference, other = clone_shared(reference, model), clone_shared(other, model)
    sums = [torch.zeros(0)] * len(groups)
    count = 0
    with borrowed(model):
        for rows in torch.arange(len(samples)).split(256):
            hidden = []
            for state in (reference, other):
                model.load(state)
                hidden.append(samples.features(model, rows, layers))
            for number, (layer, group) in enumerate(zip(layers, groups, strict=True)):
                a, b = (_units(layers_of[layer], group.units) for layers_of in hidden)
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


# The Hessian of a loss at a model's weights: products with vectors, and its largest eigenvalue.


Product = Callable[[np.ndarray], np.ndarray]


def hessian_product(module: nn.Module, loss: Callable[[], Tensor]) -> Product:
    """Return v ↦ ∇²L(θ) v over the module's parameters, flattened one after the other.

    Args:
        module: At θ; its parameters must not change while the product is used.
        loss: Computes L(θ), twice differentiable.

    Example:
        >>> net = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        >>> factors = torch.tensor([1.0, 3.0], dtype=torch.float64)
        >>> product = hessian_product(net, lambda: (net.weight**2 @ factors).sum())
        >>> product(np.array([1.0, 1.0]))
        array([2., 6.])
    """
    parameters = [value for value in module.parameters() if value.requires_grad]
    with torch.enable_grad():
        gradients = torch.autograd.grad(loss(), parameters, create_graph=True)

    def product(vector: np.ndarray) -> np.ndarray:
        parts = _like(vector, parameters)
        total = sum(((g * v).sum() for g, v in zip(gradients, parts, strict=True)), torch.zeros(()))
        products = torch.autograd.grad(total, parameters, retain_graph=True, allow_unused=True)
        zeros = (torch.zeros_like(p) if f is None else f for f, p in zip(products, parameters, strict=True))
        return np.concatenate([value.detach().double().cpu().numpy().ravel() for value in zeros])

    return product


def top_eigenvalue(product: Product, size: int, seed: int = 0) -> float:
    """Return the largest eigenvalue of the Hessian by Lanczos.

    Args:
        product: Of `hessian_product`.
    """
    start = np.random.default_rng(seed).normal(size=size)
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    return float(eigsh(operator, k=1, which="LA", v0=start, tol=1e-4, return_eigenvectors=False)[0])


def _like(vector: np.ndarray, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    parts = np.split(np.asarray(vector).ravel(), np.cumsum([value.numel() for value in parameters])[:-1])
    return [
        torch.from_numpy(np.ascontiguousarray(part)).to(value).view_as(value)
        for part, value in zip(parts, parameters, strict=True)
    ]
