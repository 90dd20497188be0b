"""Task vectors with less in them: what is left, what it takes, and the theory's own vector as a reference."""

import pytest
import torch
from torch import Tensor

from mergeflow.errors import MergeflowError
from studies.theory.laboratory import Weights
from studies.theory.laboratory import row_pruned as theory_pruned
from studies.theory.reduced import bimodality, low_rank, row_pruned, thinned, trimmed

NAME = "layers.0.mlp.0.weight"


@pytest.fixture
def vector() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {NAME: (20, 8), "layers.0.attn.weight": (12, 8), "layers.0.mlp.0.bias": (20,)}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def test_low_rank_is_the_best_approximation_and_leaves_what_factors_would_not_shrink(vector: dict[str, Tensor]) -> None:
    reduced = low_rank(vector, 2)
    left, sizes, right = torch.linalg.svd(vector[NAME])
    assert torch.allclose(reduced.vector[NAME], left[:, :2] * sizes[:2] @ right[:2], atol=1e-5)
    assert reduced.vector["layers.0.mlp.0.bias"] is vector["layers.0.mlp.0.bias"]
    assert reduced.bytes == 4 * (2 * 28 + 2 * 20 + 20)
    whole = low_rank(vector, 6)  # 6 · 28 > 160, and 6 · 20 > 96
    assert all((whole.vector[name] == value).all() for name, value in vector.items())
    assert whole.bytes == 4 * sum(value.numel() for value in vector.values())


@pytest.mark.parametrize("smallest", [False, True])
def test_rows_are_pruned_as_in_the_theory_and_nothing_else_is(vector: dict[str, Tensor], smallest: bool) -> None:
    reduced = row_pruned(vector, 0.25, smallest)
    reference = theory_pruned(Weights(torch.zeros(8, 8), vector[NAME]), 0.25, smallest).value
    assert (reduced.vector[NAME] == reference).all()
    assert (reduced.vector["layers.0.attn.weight"] == vector["layers.0.attn.weight"]).all()
    assert reduced.bytes == 4 * (5 * 9 + 96 + 20)


def test_trimmed_keeps_the_largest_and_thinned_keeps_the_mean(vector: dict[str, Tensor]) -> None:
    trimmed_values = trimmed(vector, 0.1).vector[NAME]
    assert int((trimmed_values != 0).sum()) == 16
    assert trimmed_values[trimmed_values != 0].abs().min() >= vector[NAME][trimmed_values == 0].abs().max()
    draws = torch.stack([thinned(vector, 0.5, seed).vector[NAME] for seed in range(400)])
    assert (draws.mean(0) - vector[NAME]).abs().max() < 5 * vector[NAME].abs().max() / 20  # s.e. abs(x)/√400
    assert (thinned(vector, 0.5, 1).vector[NAME] == thinned(vector, 0.5, 1).vector[NAME]).all()
    assert all((trimmed(vector, 1.0).vector[name] == value).all() for name, value in vector.items())


def test_two_groups_of_rows_are_told_from_one() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.nn.functional.normalize(torch.randn(200, 8, generator=draw), dim=1)
    lengths = torch.where(torch.arange(200) < 100, 1.0, 5.0) + 0.1 * torch.rand(200, generator=draw)
    assert bimodality({NAME: rows * lengths[:, None]}) > 0.9
    assert bimodality({NAME: rows * (1 + torch.rand(200, generator=draw))[:, None]}) == pytest.approx(5 / 9, abs=0.05)


def test_what_cannot_be_pruned_is_said(vector: dict[str, Tensor]) -> None:
    with pytest.raises(MergeflowError, match=r"keep is 1\.5; expected a share"):
        row_pruned(vector, 1.5)
    with pytest.raises(MergeflowError, match="must be above 0"):
        thinned(vector, 0, 0)
    with pytest.raises(MergeflowError, match="no tensor of the task vector is a matrix of an MLP"):
        trimmed({"attn.weight": torch.ones(3, 3)}, 0.5)
