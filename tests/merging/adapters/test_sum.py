"""Adapters in, an adapter out, on files of PEFT: exact algebra of the factors, or the best of a rank, and its error."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from tests.merging.tiny_models import perturb, tiny

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.arange(3, 15)[None]

VARIANTS = {
    "plain": ("llama", {"target_modules": ["q_proj", "down_proj"]}),
    "rslora": ("llama", {"target_modules": ["q_proj"], "use_rslora": True, "r": 6}),
    "patterns": (
        "llama",
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 5},
         "alpha_pattern": {"q_proj": 7, "k_proj": 3}},
    ),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "biases": ("qwen2", {"target_modules": ["q_proj"], "bias": "lora_only"}),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "embedding": ("llama", {"target_modules": ["v_proj", "embed_tokens"]}),
    "saved": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]}),
    "saved_inside": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["o_proj"]}),
}  # fmt: skip


def trained(folder, base, name, seed, **config):
    """Write an adapter with random weights; return the change that PEFT makes of the base's weights."""
    config = {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **config}
    model = type(base).from_pretrained(folder / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**config))
    perturb(wrapped, 0.3, seed)
    wrapped.save_pretrained(folder / name)
    merged = wrapped.merge_and_unload().state_dict()
    return {key: merged[key] - value for key, value in base.state_dict().items()}


@pytest.fixture
def llama(tmp_path):
    base = tiny("llama")
    base.save_pretrained(tmp_path / "base")
    return base


def recipe(folder, method="task_arithmetic", args=None, **more):
    return {
        "method": method,
        "args": {"scale": 1.0} if args is None else args,
        "base": str(folder / "base"),
        "out": str(folder / "out"),
        **more,
    }


def change(folder, base, out="out"):
    """What PEFT makes of the base with a written adapter."""
    wrapped = peft.PeftModel.from_pretrained(type(base).from_pretrained(folder / "base"), folder / out)
    merged = wrapped.merge_and_unload().state_dict()
    return {key: merged[key] - value for key, value in base.state_dict().items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_adapter_of_weight_one_gives_itself_back(tmp_path, variant):
    architecture, config = VARIANTS[variant]
    base = tiny(architecture)
    base.save_pretrained(tmp_path / "base")
    trained(tmp_path, base, "a", 1, **config)
    made = merge(recipe(tmp_path, experts={"a": str(tmp_path / "a")}, adapter=8))
    logits = []
    for name in ("a", "out"):
        model = peft.PeftModel.from_pretrained(type(base).from_pretrained(tmp_path / "base"), tmp_path / name).eval()
        logits.append(model(TOKENS).logits)
    if "modules_to_save" not in config and "bias" not in config:
        assert torch.equal(*logits)
    torch.testing.assert_close(*logits)
    files = [tmp_path / name / "adapter_model.safetensors" for name in ("a", "out")]
    with open_checkpoint(files[0]) as given, open_checkpoint(files[1]) as written:
        factors = [name for name in given if "lora_" in name]
        assert {name for name in written if "lora_" in name} == set(factors)
        assert all(torch.equal(given[name], written[name]) for name in factors)
    assert made.notes[0].startswith("error 0.00e+00")


def test_many_ranks_scalings_and_signs_are_summed_exactly(tmp_path, llama):
    changes = {
        "a": trained(tmp_path, llama, "a", 1, target_modules=["q_proj", "v_proj"], r=2),
        "b": trained(tmp_path, llama, "b", 2, target_modules=["q_proj", "up_proj"], r=5, use_rslora=True),
        "c": trained(tmp_path, llama, "c", 3, target_modules=["q_proj"], rank_pattern={"q_proj": 3}),
    }
    weights = {"a": 1.0, "b": -0.7, "c": 0.25}
    experts = {name: str(tmp_path / name) for name in changes}
    made = merge(recipe(tmp_path, args={"scale": 0.5}, experts=experts, weights=weights, adapter=10))
    difference = change(tmp_path, llama)
    for name, value in difference.items():
        wanted = sum(0.5 * weights[expert] * changes[expert][name] for expert in changes)
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    ranks = {config["r"], *config["rank_pattern"].values()}
    assert ranks == {10, 5, 2}
    assert config["task_type"] == "CAUSAL_LM"
    errors = json.loads((tmp_path / "out/mergeflow.json").read_text())["errors"]
    assert max(errors.values()) < 1e-7
    assert set(made.inputs) == {"a", "b", "c"}  # of the base only the header was read


def test_the_average_of_adapters_is_linear_too(tmp_path, llama):
    changes = [trained(tmp_path, llama, name, seed, target_modules=["q_proj"]) for seed, name in enumerate("ab")]
    places = {name: str(tmp_path / name) for name in "ab"}
    merge(recipe(tmp_path, "average", {}, experts=places, weights=[3, 1], adapter=8))
    name = "model.layers.0.self_attn.q_proj.weight"
    wanted = 0.75 * changes[0][name] + 0.25 * changes[1][name]
    torch.testing.assert_close(change(tmp_path, llama)[name], wanted, rtol=1e-5, atol=1e-6)


def test_below_the_sum_of_ranks_it_is_the_best_of_the_rank_with_its_error(tmp_path, llama):
    changes = [
        trained(tmp_path, llama, name, seed, target_modules=["q_proj", "k_proj"], r=6)
        for seed, name in enumerate("abc")
    ]
    merge(recipe(tmp_path, experts={name: str(tmp_path / name) for name in "abc"}, adapter=4))
    difference = change(tmp_path, llama)
    errors = json.loads((tmp_path / "out/mergeflow.json").read_text())["errors"]
    assert len(errors) == 4
    for name, error in errors.items():
        whole = sum(change_of_one[name] for change_of_one in changes).double()
        left, values, right = torch.linalg.svd(whole, full_matrices=False)
        torch.testing.assert_close(difference[name].double(), (left[:, :4] * values[:4]) @ right[:4], rtol=0, atol=1e-5)
        assert error == pytest.approx(float(values[4:].norm() / values.norm()), rel=1e-4)


@pytest.mark.parametrize(("method", "args"), [("ties", {"keep": 0.3}), ("dare", {"drop": 0.5}), ("slerp", {"t": 0.3})])
def test_any_other_method_is_merged_first_and_approximated_then(tmp_path, llama, method, args):
    for seed, name in enumerate("ab"):
        trained(tmp_path, llama, name, seed, target_modules=["q_proj", "o_proj"])
    given = recipe(tmp_path, method, args, experts={name: str(tmp_path / name) for name in "ab"})
    merge({**given, "adapter": 32})
    merge({**given, "out": str(tmp_path / "whole")})
    with open_checkpoint(tmp_path / "whole") as whole:
        for name, value in change(tmp_path, llama).items():
            torch.testing.assert_close(value + llama.state_dict()[name], whole[name], rtol=0, atol=3e-6)


def test_dora_becomes_lora_with_its_error(tmp_path, llama):
    wanted = trained(tmp_path, llama, "a", 1, target_modules=["q_proj"], use_dora=True)
    made = merge(recipe(tmp_path, experts={"a": str(tmp_path / "a")}, adapter=32))
    name = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(change(tmp_path, llama)[name], wanted[name], rtol=0, atol=1e-5)
    assert "error" in made.notes[0]
    assert not json.loads((tmp_path / "out/adapter_config.json").read_text())["use_dora"]


def test_an_adapter_beside_a_whole_expert_comes_out_as_one_adapter(tmp_path, llama):
    delta = trained(tmp_path, llama, "a", 1, target_modules=["q_proj"])
    other = tiny("llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    with torch.no_grad():
        other.state_dict()[name].add_(torch.randn(32, 32, generator=torch.Generator().manual_seed(9)))
    other.save_pretrained(tmp_path / "e")
    merge(recipe(tmp_path, experts={"a": str(tmp_path / "a"), "e": str(tmp_path / "e")}, adapter=32))
    wanted = delta[name] + other.state_dict()[name] - llama.state_dict()[name]
    torch.testing.assert_close(change(tmp_path, llama)[name], wanted, rtol=0, atol=1e-5)


def test_no_matrix_is_formed_of_factors(tmp_path):
    """The base is a file of 9.6 GB that takes no space: reading or forming any of it would be noticed."""
    (tmp_path / "base").mkdir()
    rows, columns = 60_000, 40_000
    info = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, 4 * rows * columns]}
    head = json.dumps({"model.layers.0.mlp.up_proj.weight": info}).encode()
    with open(tmp_path / "base/model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        file.truncate(8 + len(head) + 4 * rows * columns)
    for seed, rank in ((1, 3), (2, 4)):
        generator = torch.Generator().manual_seed(seed)
        stem = "base_model.model.model.layers.0.mlp.up_proj"
        sides = {"lora_A": (rank, columns), "lora_B": (rows, rank)}
        tensors = {f"{stem}.{side}.weight": torch.randn(shape, generator=generator) for side, shape in sides.items()}
        write_checkpoint(tmp_path / f"{rank}/adapter_model.safetensors", tensors)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["up_proj"]}
        (tmp_path / f"{rank}/adapter_config.json").write_text(json.dumps(config))
    made = merge(recipe(tmp_path, experts=[str(tmp_path / "3"), str(tmp_path / "4")], adapter=5))
    error = json.loads((tmp_path / "out/mergeflow.json").read_text())["errors"]["model.layers.0.mlp.up_proj.weight"]
    assert 0.4 < error < 0.6  # 2 of 7 nearly equal directions, √(2/7) = 0.53
    assert made.seconds < 60


def test_adapters_that_cancel_leave_nothing(tmp_path, llama):
    trained(tmp_path, llama, "a", 1, target_modules=["q_proj"])
    given = recipe(tmp_path, experts={"x": str(tmp_path / "a"), "y": str(tmp_path / "a")}, weights=[1, -1], adapter=8)
    with pytest.raises(MergeflowError, match="nothing for an adapter to hold"):
        merge(given)


@pytest.mark.parametrize(("side", "value"), [("A", float("inf")), ("B", float("nan"))])
def test_factors_that_are_not_finite_are_refused_by_the_name_of_their_adapter(tmp_path, llama, side, value):
    trained(tmp_path, llama, "a", 1, target_modules=["q_proj"])
    file = tmp_path / "a/adapter_model.safetensors"
    factors = load_file(file)
    factors[min(name for name in factors if f"lora_{side}" in name)][0, 0] = value
    save_file(factors, file)
    for form in ({}, {"adapter": 4}):
        with pytest.raises(MergeflowError, match=r"'a' holds NaN or infinity in tensor 'model\.layers\.0.*q_proj"):
            merge(recipe(tmp_path, experts={"a": str(tmp_path / "a")}, **form))
