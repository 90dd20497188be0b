"""Weight matching: permutations leave every known architecture's function as it was, and find their way back."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from mergeflow.merging.alignment import Group, find_groups, permute, weight_matching
from mergeflow.modalities.nets import SmallResNet, mlp
from mergeflow.modalities.vision.models import image_model, load_clip

HEADS = {"num_attention_heads": 4}


def a_mlp() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return mlp([6, 16, 12, 4]), (torch.randn(9, 6),), {}


def a_resnet() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    net = SmallResNet(5, width=8, blocks=2)
    net.train()(torch.randn(16, 3, 16, 16))  # running statistics that differ by channel
    return net.eval(), (torch.randn(5, 3, 16, 16),), {}


def a_bottleneck() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from torchvision.models.resnet import Bottleneck, ResNet

    net = ResNet(Bottleneck, [1, 1, 1, 1], num_classes=3, width_per_group=8)
    net.train()(torch.randn(4, 3, 32, 32))
    return net.eval(), (torch.randn(2, 3, 32, 32),), {}


def a_clip() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    module = image_model(load_clip("pocket-clip", "pocket8")).module
    return module, (torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8),), HEADS


def a_bert() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import BertConfig, BertForSequenceClassification

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    net: Any = BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=3, **size))
    return net.eval(), (torch.randint(0, 50, (3, 7)),), HEADS


def a_vit() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    net: Any = ViTForImageClassification(ViTConfig(image_size=16, patch_size=8, **size))
    return net.eval(), (torch.randn(3, 3, 16, 16),), HEADS


# family → (net, whether its residual stream is permuted, groups of heads)
FAMILIES = {
    "mlp": (a_mlp, 0),
    "resnet": (a_resnet, 0),
    "bottleneck": (a_bottleneck, 0),
    "clip": (a_clip, 4),
    "bert": (a_bert, 2),
    "vit": (a_vit, 2),
}


def weights(net: Any, folder: Path) -> dict[str, Tensor]:
    """Return a net's weights by the names that its files have; transformers' modules may have others."""
    if not hasattr(net, "save_pretrained"):
        return {name: value.clone() for name, value in net.state_dict().items()}
    net.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def loaded(net: Any, state: dict[str, Tensor], folder: Path) -> nn.Module:
    """Return a net with these weights."""
    if not hasattr(net, "save_pretrained"):
        net.load_state_dict(state)
        return net  # type: ignore[no-any-return]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return type(net).from_pretrained(folder).eval()  # type: ignore[no-any-return]


def output(net: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    with torch.no_grad():
        answer = net(*inputs)
    return answer if isinstance(answer, Tensor) else answer.logits


def shuffled(state: dict[str, Tensor], config: dict[str, Any], seed: int = 0) -> tuple[dict[str, Tensor], list[Group]]:
    """Return weights with units in random order, and the groups."""
    groups = find_groups({name: value.shape for name, value in state.items()}, config)
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(group.units, generator=generator) for group in groups]
    return permute(state, groups, orders), groups


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    net, inputs, config = FAMILIES[request.param][0]()
    with torch.no_grad():  # biases, and norms' scales, that differ by unit
        for value in net.parameters():
            if value.ndim == 1:
                value.add_(0.3 * torch.randn_like(value))
    return request.param, net, inputs, config


def test_permutations_change_weights_and_not_the_function(
    case: tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]], tmp_path: Path
) -> None:
    name, net, inputs, config = case
    state = weights(net, tmp_path)
    other, groups = shuffled(state, config)
    assert sum(group.name.startswith("heads") for group in groups) == FAMILIES[name][1]
    before = output(net, inputs)
    after = output(loaded(net, other, tmp_path), inputs)
    loaded(net, state, tmp_path)
    assert (before - after).abs().max() <= 1e-5 * before.abs().max()
    touched = [key for key, value in state.items() if not torch.equal(value, other[key])]
    matrices = [key for key, value in state.items() if value.ndim >= 2 and value.is_floating_point()]
    assert {key for key in matrices if "pooler" not in key and key not in ("classifier.weight",)} <= set(touched)


def test_matching_finds_the_way_back(
    case: tuple[str, nn.Module, tuple[Any, ...], dict[str, Any]], tmp_path: Path
) -> None:
    name, net, _, config = case
    if name == "bottleneck":
        pytest.skip("assignments of 2048 units take half a minute; the groups are those of the other residual net")
    state = weights(net, tmp_path)
    other, groups = shuffled(state, config, seed=1)
    noisy = {k: v + 1e-3 * torch.randn_like(v) if v.is_floating_point() else v for k, v in other.items()}
    back = permute(noisy, groups, weight_matching(state, noisy, groups))
    far = sum(float((state[k] - noisy[k]).double().square().sum()) for k in state if state[k].is_floating_point())
    near = sum(float((state[k] - back[k]).double().square().sum()) for k in state if state[k].is_floating_point())
    assert near < 0.01 * far


def test_unknown_architectures_are_refused() -> None:
    with pytest.raises(MergeflowError, match=r"weight_matching knows chains .* tensors such as model\.embed"):
        find_groups({"model.embed_tokens.weight": (10, 4), "model.layers.0.mlp.gate_proj.weight": (8, 4)})


@pytest.mark.parametrize("odd", [{"layer1.0.se.fc1.weight": (2, 8, 1, 1)}, {"layer1.0.conv2.weight": (8, 4, 3, 3)}])
def test_residual_nets_with_other_parts_or_groups_are_refused(odd: dict[str, tuple[int, ...]]) -> None:
    """A squeeze-and-excitation reads the stream that was permuted; a grouped convolution ended in an IndexError."""
    shapes = {name: tuple(value.shape) for name, value in a_resnet()[0].state_dict().items()}
    assert find_groups(shapes)
    with pytest.raises(MergeflowError, match=r"align: weight_matching knows .*of none of these"):
        find_groups({**shapes, **odd})


def test_without_config_heads_stay_where_they_are() -> None:
    shapes = {name: value.shape for name, value in a_clip()[0].state_dict().items()}
    assert not any(group.name.startswith("heads") for group in find_groups(shapes))


def files(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    first = dict(mlp([6, 16, 12, 4], seed=1).state_dict().items())
    groups = find_groups({name: value.shape for name, value in first.items()})
    orders = [torch.randperm(group.units, generator=torch.Generator().manual_seed(2)) for group in groups]
    second = permute(first, groups, orders)
    save_file(first, folder / "first.safetensors")
    save_file(second, folder / "second.safetensors")
    return first, second


@pytest.mark.parametrize("out", ["merged.safetensors", "merged"])
def test_a_merge_of_a_net_and_its_shuffled_twin_is_the_net(tmp_path: Path, out: str) -> None:
    first, _second = files(tmp_path)
    recipe = {
        "method": "average",
        "base": str(tmp_path / "first.safetensors"),
        "experts": {"one": str(tmp_path / "first.safetensors"), "two": str(tmp_path / "second.safetensors")},
        "out": str(tmp_path / out),
    }
    merge(recipe)
    path = tmp_path / out if out.endswith("safetensors") else next((tmp_path / out).glob("*.safetensors"))
    assert any(not torch.allclose(value, first[name]) for name, value in load_file(path).items())
    made = merge({**recipe, "out": str(tmp_path / f"aligned_{out}"), "align": "weight_matching"})
    path = made.path if out.endswith("safetensors") else next(made.path.glob("*.safetensors"))
    for name, value in load_file(path).items():
        torch.testing.assert_close(value, first[name])
    assert made.recipe.align == "weight_matching"


def test_what_alignment_refuses(tmp_path: Path) -> None:
    files(tmp_path)
    base = str(tmp_path / "first.safetensors")
    recipe = {"method": "average", "base": base, "experts": [base], "out": str(tmp_path / "out.safetensors")}
    with pytest.raises(MergeflowError, match="align"):
        merge({**recipe, "align": "weights"})
    from mergeflow.merging.files.vectors import extract

    extract(base, str(tmp_path / "second.safetensors"), str(tmp_path / "vector.safetensors"))
    vector = {key: value for key, value in recipe.items() if key != "experts"}
    with pytest.raises(MergeflowError, match="'vector' is a difference from the base"):
        merge({**vector, "task_vectors": {"vector": str(tmp_path / "vector.safetensors")}, "align": "weight_matching"})
