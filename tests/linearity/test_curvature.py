"""The Hessian's products and largest eigenvalue, against matrices; activation matching, against a shuffled twin."""

import numpy as np
import torch
from torch import nn

from mergeflow.merging.alignment import find_groups, permute
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.nets import SmallResNet, mlp, on_pixels
from mergeflow.modality import Network
from studies.theory.linearity import activation_matching, hessian_product, top_eigenvalue


def test_a_quadratic_loss_has_its_matrix() -> None:
    torch.manual_seed(0)
    half = torch.randn(6, 6, dtype=torch.float64)
    matrix = half @ half.T - 3 * torch.eye(6)
    net = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    product = hessian_product(net, lambda: (net.weight @ matrix @ net.weight.T).sum() / 2)
    for row in np.eye(6):
        np.testing.assert_allclose(product(row), matrix.numpy() @ row, atol=1e-12)
    assert abs(top_eigenvalue(product, 6) - float(torch.linalg.eigvalsh(matrix)[-1])) < 1e-6


def test_theorem_one_is_exact_for_a_quadratic_loss() -> None:
    """δ = ⅛ dᵀHd at α = ½, and at most ⅛ λ_max ‖d‖² where H is positive."""
    torch.manual_seed(1)
    half = torch.randn(5, 5, dtype=torch.float64)
    matrix = half @ half.T
    net = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    product = hessian_product(net, lambda: (net.weight @ matrix @ net.weight.T).sum() / 2)
    a, b = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def loss(point: torch.Tensor) -> float:
        return float(point @ matrix @ point / 2)

    delta = abs(loss((a + b) / 2) - loss(a) / 2 - loss(b) / 2)
    d = (a - b).numpy()
    np.testing.assert_allclose(delta, d @ product(d) / 8)
    assert delta <= top_eigenvalue(product, 5) * float(d @ d) / 8 * (1 + 1e-9)


def test_the_largest_eigenvalue_of_a_net_is_that_of_its_whole_hessian() -> None:
    net = mlp([4, 5, 3]).double()
    inputs, labels = torch.randn(20, 4, dtype=torch.float64), torch.arange(20) % 3
    product = hessian_product(net, lambda: nn.functional.cross_entropy(net(inputs), labels))
    size = sum(value.numel() for value in net.parameters())
    whole = np.stack([product(row) for row in np.eye(size)])
    np.testing.assert_allclose(whole, whole.T, atol=1e-12)
    assert abs(top_eigenvalue(product, size) - np.linalg.eigvalsh(whole)[-1]) < 1e-5


def test_activation_matching_finds_a_shuffled_twin() -> None:
    torch.manual_seed(0)
    nets = {
        "mlp": (mlp([6, 16, 12, 4]), Classification("rows", torch.randn(300, 6), torch.zeros(300))),
        "resnet": (
            SmallResNet(3, width=8, blocks=1).eval(),
            Classification(
                "pictures", torch.randint(0, 256, (60, 8, 8, 3), dtype=torch.uint8), torch.zeros(60), encode=on_pixels
            ),
        ),
    }
    for net, data in nets.values():
        state = {name: value.clone() for name, value in net.state_dict().items()}
        groups = find_groups({name: value.shape for name, value in state.items()})
        orders = [torch.randperm(group.units) for group in groups]
        twin = permute(state, groups, orders)
        inverse = activation_matching(Network(net), data, state, twin, groups)
        for order, back in zip(orders, inverse, strict=True):
            assert torch.equal(order[back], torch.arange(len(order)))
