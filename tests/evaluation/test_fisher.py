"""The diagonal Fisher information: its formula, determinism, purpose and property."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.evaluation.statistics import StatisticOrder, diagonal_fisher, write_statistic
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head
from mergeflow.modality import Network


class Linear(nn.Module):
    """Features W x of 2×2 images, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(5, 12, generator=generator) / 4)
        self.unused = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1).float() / 255 @ self.weight.T


def images(count: int = 7) -> Tensor:
    return torch.randint(0, 256, (count, 2, 2, 3), generator=torch.Generator().manual_seed(4), dtype=torch.uint8)


def head(classes: int = 4) -> Head:
    weight = torch.nn.functional.normalize(torch.randn(classes, 5, generator=torch.Generator().manual_seed(5)), dim=1)
    return Head(weight, 3.0, [str(index) for index in range(classes)])


def fisher(encoder: nn.Module, head: Head, **options) -> dict[str, Tensor]:
    examples = Classification("t", images(), torch.zeros(len(images()), dtype=torch.int64), head)
    return diagonal_fisher(Network(encoder), examples, **options)


def test_reference_formula_in_float64():
    encoder, rows, h = Linear(), images().flatten(1).double() / 255, head()
    estimate = fisher(encoder, h, labels="all")
    w, weight = encoder.weight.detach().double(), h.weight.double()
    expected = torch.zeros(5, 12, dtype=torch.float64)
    for x in rows:
        p = torch.softmax(3.0 * weight @ w @ x, 0)
        for y in range(4):
            slope = 3.0 * (weight[y] - p @ weight)  # of log p_y in the features
            expected += p[y] * torch.outer(slope, x).square() / len(rows)
    torch.testing.assert_close(estimate["weight"].double(), expected, rtol=1e-5, atol=1e-9)
    assert torch.equal(estimate["unused"], torch.zeros(3))


def test_sampled_labels_are_the_models_own_and_tend_to_the_exact_sum():
    encoder, h = Linear(), head()
    exact = fisher(encoder, h, labels="all")["weight"]
    many = torch.stack([fisher(encoder, h, seed=seed)["weight"] for seed in range(150)])
    error = (many.mean(0) - exact).norm() / exact.norm()
    assert error < 0.1
    assert (many[0] - exact).norm() / exact.norm() > error


def test_deterministic_and_leaves_the_encoder_as_it_was():
    encoder, h = Linear(), head()
    before = encoder.weight.detach().clone()
    first, two = (fisher(encoder, h, seed=1)["weight"] for _ in range(2))
    assert torch.equal(first, two)
    assert not torch.equal(first, fisher(encoder, h, seed=2)["weight"])
    assert torch.equal(before, encoder.weight)
    assert (encoder.weight.requires_grad, encoder.unused.requires_grad) == (True, False)
    assert encoder.weight.grad is None


def test_property_no_information_where_the_model_cannot_tell():
    """A head of equal classes gives the same p whatever θ: no gradient, no information."""
    same = Head(torch.ones(3, 5) / 5**0.5, 3.0, ["a", "b", "c"])
    assert fisher(Linear(), same, labels="all")["weight"].abs().max() < 1e-10


def order(world: Path, task: str, **changes) -> StatisticOrder:
    values = {
        "kind": "fisher",
        "expert": str(world / "experts" / f"{task}.safetensors"),
        "task": str(world / "data" / task),
        "head": str(world / "heads" / f"{task}.safetensors"),
        "architecture": "pocket-clip",
        "labels": "all",
    }
    return StatisticOrder(**{**values, **changes})


def test_bad_orders_are_refused(world: Path, tmp_path: Path):
    out = tmp_path / "f.safetensors"
    for message, changes in (
        ("never taken from test", {"split": "test"}),
        ("needs the task's head", {"head": None}),
        ("'blue centre' / 'red centre'", {"head": str(world / "heads/blue.safetensors")}),
        ("at least 1", {"samples": 0}),
    ):
        with pytest.raises(MergeflowError, match=message):
            write_statistic(order(world, "red", **changes), out)
    assert not out.exists()


def test_an_expert_that_a_merge_would_pass_over_is_refused(world: Path, tmp_path: Path, monkeypatch):
    """A head of one class is certain of every answer, and its expert's weight in the mean was 0."""
    nothing = {"weight": torch.zeros(2, 2)}
    monkeypatch.setattr("mergeflow.evaluation.statistics.diagonal_fisher", lambda *_, **options: nothing)
    with pytest.raises(MergeflowError, match=r"is 0 everywhere, .* Give a task of several classes"):
        write_statistic(order(world, "red"), tmp_path / "fisher.safetensors")
    assert not (tmp_path / "fisher.safetensors").exists()
