"""The card of `tests.card` is as strict as a real one, computes the processor's numbers, and is gone afterwards."""

import copy

import pytest
import torch
from torch import nn

from tests.card import OnCard, card


def test_devices_do_not_mix() -> None:
    with card():
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        for mixed in (lambda: here + there, lambda: there.add_(here), lambda: torch.cat([here, there])):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        with pytest.raises(RuntimeError, match="same device"):
            nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3, device="cuda"))
        with pytest.raises((RuntimeError, IndexError)):
            here[torch.tensor([0], device="cuda")]
        with pytest.raises(TypeError, match="cuda"):
            there.numpy()


def test_what_a_card_allows() -> None:
    with card():
        there = torch.arange(3.0, device="cuda")
        assert (there * torch.tensor(2.0)).tolist() == [0, 2, 4]
        assert there[torch.tensor([2, 0])].tolist() == [2, 0]
        assert torch.ones(3).copy_(there).device.type == "cpu"
        assert there.cpu().numpy().tolist() == [0, 1, 2]
        assert torch.tensor([1, 2], device="cuda:0").device == torch.device("cuda:0")
        assert torch.zeros_like(there).is_cuda


def test_a_product_with_a_vector_has_the_shape_of_one() -> None:
    """It ends with `squeeze_`, which changes a tensor in place."""
    with card():
        vector, matrix = torch.ones(3, device="cuda"), torch.eye(3, device="cuda")
        assert (vector @ matrix).shape == (3,)
        assert (vector @ matrix @ vector).item() == 3


def test_gradients_and_optimisers_give_the_processor_s_bits() -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    inputs = torch.randn(5, 4)

    def train(module: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
        optimiser = torch.optim.AdamW(module.parameters(), fused=True)
        for _ in range(3):
            optimiser.zero_grad()
            module(batch).square().mean().backward()
            optimiser.step()
        return [p.detach().cpu() for p in module.parameters()]

    expected = train(copy.deepcopy(plain), inputs)
    with card():
        there = copy.deepcopy(plain).to("cuda")
        assert all(isinstance(p, OnCard) for p in there.parameters())
        trained = train(there, inputs.to("cuda"))
    assert all(torch.equal(a, b) for a, b in zip(trained, expected, strict=True))


def test_it_is_gone_afterwards() -> None:
    before = (torch.cuda.is_available(), torch.load)
    with card():
        assert torch.cuda.is_available()
    assert (torch.cuda.is_available(), torch.load) == before
