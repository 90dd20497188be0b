"""Fisher information and Gram matrices: formulas, determinism, properties, and the command up to a merge."""

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import Result
from torch import Tensor, nn
from torch.nn import functional as F

from mergeflow.checkpoints import open_checkpoint
from mergeflow.commands.statistics import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.evaluation.statistics import StatisticOrder, diagonal_fisher, input_grams, open_drawn, write_statistic
from mergeflow.merging import load_recipe, merge
from mergeflow.merging.files.vectors import extract
from mergeflow.modalities.classification import Classification, Subset
from mergeflow.modalities.heads import Head
from mergeflow.modalities.vision.models import POCKET_MEAN, POCKET_STD, image_model, load_clip
from mergeflow.modality import Network
from tests.command import invoke


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


def test_weights_of_a_whole_clip_are_named_with_the_part_that_is_read(world: Path, tmp_path: Path):
    path = tmp_path / "whole.pt"
    torch.save({"state_dict": load_clip("pocket-clip").model.state_dict()}, path)
    order = StatisticOrder("gram", str(path), str(world / "data/red"), "pocket-clip", samples=2)
    with pytest.raises(
        MergeflowError, match=r"(?s)'.*whole\.pt' does not fit.*logit_scale: not expected.*`visual\.\*`"
    ):
        write_statistic(order, tmp_path / "gram.safetensors")


def test_differences_need_an_architecture_that_names_their_base(world: Path, tmp_path: Path):
    extract(world / "base.safetensors", world / "experts/red.safetensors", tmp_path / "vector.safetensors")
    order = StatisticOrder("gram", str(tmp_path / "vector.safetensors"), str(world / "data/red"), "pocket-clip")
    with pytest.raises(MergeflowError, match=r"is a task vector or an adapter.*make the whole model first"):
        write_statistic(order, tmp_path / "gram.safetensors")


def test_what_an_experts_file_holds_beside_is_said(world: Path, tmp_path: Path):
    state = dict(open_checkpoint(world / "experts/red.safetensors"))
    torch.save({"model": state, "model_ema": dict(state)}, tmp_path / "run.pt")
    said: list[str] = []
    order = StatisticOrder("gram", str(tmp_path / "run.pt"), str(world / "data/red"), "pocket-clip", samples=2)
    write_statistic(order, tmp_path / "gram.safetensors", remark=lambda _, warnings: said.extend(warnings))
    assert "model_ema" in " ".join(said)


def test_deterministic_and_independent_of_batches(world: Path):
    model = model_of(world / "experts/red.safetensors")
    images = ten_images(world)
    first, two, other = (input_grams(model, images, batch_size=size) for size in (4, 4, 10))
    assert all(torch.equal(first[name], two[name]) for name in first)
    assert all((first[name] - other[name]).norm() < 1e-5 * first[name].norm() for name in first)


def test_a_model_without_linear_weights_is_refused():
    with pytest.raises(MergeflowError, match="no linear weight"):
        input_grams(Network(nn.Flatten()), unlabelled(torch.zeros(1, 2, 2, 3)))


def test_layers_that_share_a_weight_are_one():
    """The Gram was of the first layer's inputs alone."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.b.weight = self.a.weight

        def forward(self, images: Tensor) -> Tensor:
            self.inputs = images.flatten(1).float()[:, :6]
            self.between: Tensor = self.a(self.inputs)
            return self.b(self.between)

    module = Twice()
    grams = input_grams(
        Network(module), unlabelled(torch.randint(0, 256, (5, 1, 2, 3), dtype=torch.uint8)), batch_size=5
    )
    rows = torch.cat([module.inputs, module.between])
    assert grams.keys() == {"a.weight", "b.weight"}
    for gram in grams.values():
        torch.testing.assert_close(gram, rows.T @ rows / 10)


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


TASKS = ("red", "blue", "grey")


def call(world: Path, kind: str, task: str, out: Path, *more: str) -> Result:
    places = ["--task", str(world / "data" / task), "--head", str(world / "heads" / f"{task}.safetensors")]
    fixed = [str(world / "experts" / f"{task}.safetensors"), *places, "--architecture", "pocket-clip"]
    return invoke(add_commands, "statistics", kind, *fixed, "--out", out, *more)


@pytest.mark.parametrize(("kind", "method"), [("fisher", "fisher"), ("gram", "regmean")])
def test_from_commands_to_a_merge(world: Path, tmp_path: Path, kind: str, method: str):
    files = {task: tmp_path / f"{task}.safetensors" for task in TASKS}
    for task, path in files.items():
        done = call(world, kind, task, path, "--samples", "6")
        assert done.exit_code == 0, done.output
        assert "6 examples of train" in done.output
    recipe = {
        "method": method,
        "base": str(world / "base.safetensors"),
        "experts": {task: str(world / "experts" / f"{task}.safetensors") for task in TASKS},
        "data": {kind: {task: str(path) for task, path in files.items()}},
        "out": str(tmp_path / "merged.safetensors"),
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    made = merge(load_recipe(tmp_path / "recipe.yaml"))
    assert open_checkpoint(made.path).infos == open_checkpoint(recipe["base"]).infos


def test_deterministic_and_the_seed_draws_the_images(world: Path, tmp_path: Path):
    outs = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for out, seed in zip(outs, "001", strict=True):
        assert call(world, "fisher", "red", out, "--samples", "4", "--seed", seed).exit_code == 0
    assert outs[0].read_bytes() == outs[1].read_bytes() != outs[2].read_bytes()


def test_images_are_drawn_once_each_and_all_where_there_are_fewer(world: Path):
    order = StatisticOrder("gram", "", str(world / "data/red"), "pocket-clip", samples=99, seed=5)
    chosen = open_drawn(order)[1].chosen.tolist()
    assert sorted(chosen) == list(range(24))
    assert chosen != sorted(chosen)


def test_errors_name_the_way_out(world: Path, tmp_path: Path):
    done = call(world, "fisher", "red", tmp_path / "f.safetensors", "--labels", "samplet")
    assert isinstance(done.exception, MergeflowError)
    assert "did you mean 'sampled'" in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["experts/red", "heads/red", "base", "data/red/new"])
def test_no_input_is_overwritten(world: Path, tmp_path: Path, place: str):
    """Only the expert was looked at: a head and the base that `--architecture` names were replaced by statistics."""
    shutil.copytree(world, tmp_path / "world")
    world, out = tmp_path / "world", tmp_path / f"world/{place}.safetensors"
    before = out.read_bytes() if out.exists() else None
    wanted = StatisticOrder("fisher", *(str(world / name) for name in ("experts/red.safetensors", "data/red")),
                            str(world / "base.safetensors"), str(world / "heads/red.safetensors"))  # fmt: skip
    for force in (False, True):
        with pytest.raises(MergeflowError, match="would overwrite the input"):
            write_statistic(wanted, out, force=force)
    assert (out.read_bytes() if out.exists() else None) == before


def test_a_file_of_others_is_replaced_by_force_alone(world: Path, tmp_path: Path):
    out = tmp_path / "blue.safetensors"
    shutil.copy(world / "experts/blue.safetensors", out)
    before = out.read_bytes()
    done = call(world, "gram", "red", out, "--samples", "2")
    assert "was not made by a merge" in str(done.exception)
    assert out.read_bytes() == before
    assert call(world, "gram", "red", out, "--samples", "2", "--force").exit_code == 0
    made = out.read_bytes()
    assert call(world, "gram", "red", out, "--samples", "2").exit_code == 0, "its own result is replaced"
    assert out.read_bytes() == made != before
