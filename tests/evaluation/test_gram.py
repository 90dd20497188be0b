"""Gram matrices of inputs: against a forward pass written out in float64, and RegMean through files."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.statistics import StatisticOrder, input_grams, open_drawn
from mergeflow.modalities.classification import Classification, Subset
from mergeflow.modalities.vision.models import POCKET_MEAN, POCKET_STD, image_model, load_clip
from mergeflow.modality import Network


def model_of(path: Path) -> Network:
    model = image_model(load_clip("pocket-clip"))
    with open_checkpoint(path) as state:
        model.load(state)
    return model


def unlabelled(inputs: Tensor) -> Classification:
    return Classification("t", inputs, torch.zeros(len(inputs), dtype=torch.int64))


def plain_grams(state: dict[str, Tensor], images: Tensor, blocks: int = 4, heads: int = 4) -> dict[str, Tensor]:
    """The pocket tower in float64, formula by formula, collecting mean x xᵀ before every linear weight."""
    w = {name.removeprefix("visual."): value.double() for name, value in state.items()}
    sums: dict[str, Tensor] = {}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    def linear(x: Tensor, name: str, bias: str) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        sums[f"visual.{name}"] = rows.T @ rows / len(rows)
        return x @ w[name].T + w[bias]

    pixels = (images.permute(0, 3, 1, 2).double() / 255 - POCKET_MEAN[0]) / POCKET_STD[0]
    x = F.conv2d(pixels, w["conv1.weight"], stride=8).flatten(2).transpose(1, 2)
    x = torch.cat([w["class_embedding"].expand(len(x), 1, -1), x], 1) + w["positional_embedding"]
    x = norm(x, "ln_pre")
    for index in range(blocks):
        block = f"transformer.resblocks.{index}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.in_proj_weight", f"{block}.attn.in_proj_bias")
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
        mixed = ((q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5).softmax(-1) @ v
        joined = mixed.transpose(1, 2).flatten(2)
        x = x + linear(joined, f"{block}.attn.out_proj.weight", f"{block}.attn.out_proj.bias")
        inner = F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc.weight", f"{block}.mlp.c_fc.bias"))
        x = x + linear(inner, f"{block}.mlp.c_proj.weight", f"{block}.mlp.c_proj.bias")
    return sums


def ten_images(world: Path) -> Subset:
    return open_drawn(StatisticOrder("gram", "", str(world / "data/red"), "pocket-clip", samples=10))[1]


def test_reference_every_linear_weight_of_the_tower(world: Path):
    path = world / "experts/red.safetensors"
    images = ten_images(world)
    estimates = input_grams(model_of(path), images, batch_size=4)
    expected = plain_grams(dict(open_checkpoint(path)), images.whole.inputs[images.chosen])
    assert estimates.keys() == expected.keys()
    assert len(estimates) == 4 * 4
    for name, gram in estimates.items():
        error = (gram.double() - expected[name]).norm() / expected[name].norm()
        assert error < 1e-5, (name, float(error))
        torch.testing.assert_close(gram, gram.T)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_out_proj_sees_the_joined_heads(batch_first: bool, masked: bool):
    """G of out_proj must explain its outputs: trace(W G Wᵀ) is their mean squared length, bias apart."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
    nn.init.zeros_(attention.out_proj.bias)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = attention

        def forward(self, images: Tensor) -> Tensor:
            x = images.flatten(2).float() / 255
            mask = torch.triu(torch.full((4, 4), float("-inf")), 1) if masked else None
            x = x if batch_first else x.transpose(0, 1)
            self.last: Tensor = self.attn(x, x, x, need_weights=False, attn_mask=mask)[0]
            return self.last

    module = Wrapped()
    images = torch.randint(0, 256, (3, 4, 2, 4), dtype=torch.uint8)
    estimates = input_grams(Network(module), unlabelled(images), batch_size=3)
    weight = attention.out_proj.weight.detach()
    explained = torch.trace(weight @ estimates["attn.out_proj.weight"] @ weight.T)
    torch.testing.assert_close(explained, module.last.square().sum(-1).mean())


def test_deterministic_and_independent_of_batches(world: Path):
    model = model_of(world / "experts/red.safetensors")
    images = ten_images(world)
    first, two, other = (input_grams(model, images, batch_size=size) for size in (4, 4, 10))
    assert all(torch.equal(first[name], two[name]) for name in first)
    assert all((first[name] - other[name]).norm() < 1e-5 * first[name].norm() for name in first)


def test_a_model_without_linear_weights_is_refused():
    with pytest.raises(MergeflowError, match="no linear weight"):
        input_grams(Network(nn.Flatten()), unlabelled(torch.zeros(1, 2, 2, 3)))


def test_attention_to_other_rows_gets_no_gram():
    class Pooler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.after = nn.MultiheadAttention(6, 1, batch_first=True), nn.Linear(6, 2)

        def forward(self, images: Tensor) -> Tensor:
            x = images.flatten(2).float()
            return self.after(self.attn(x[:, :1], x, x)[0])

    images = torch.ones(2, 4, 2, 3, dtype=torch.uint8)
    assert set(input_grams(Network(Pooler()), unlabelled(images))) == {"after.weight"}
