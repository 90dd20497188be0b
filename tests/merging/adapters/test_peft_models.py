"""Adapters as PEFT writes them today, on models whose file has other names, and stacks of experts, than the memory."""

import pytest
import torch
from safetensors.torch import load_file

from mergeflow.checkpoints import open_checkpoint, read_state
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from tests.merging.tiny_models import perturb, tiny

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

STACKS = ["experts.gate_up_proj", "experts.down_proj"]
KINDS = {
    "vit": ("vit", {"target_modules": "all-linear", "bias": "lora_only"}),
    "dinov2": ("dinov2", {"target_modules": ["q_proj", "fc1"], "modules_to_save": ["classifier"]}),
    "beit-dora": ("beit", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "swin": ("swin", {"target_modules": "all-linear"}),
    "mixtral": ("mixtral", {"target_modules": "all-linear"}),
    "mixtral-experts": ("mixtral", {"target_modules": [], "target_parameters": STACKS, "use_rslora": True}),
    "qwen3_moe-one": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": STACKS[1:]}),
    "deepseek_v3": ("deepseek_v3", {"target_modules": "all-linear"}),
    "gpt_oss": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": STACKS, "rank_pattern": {STACKS[0]: 3}}),
    "aria_text": ("aria_text", {"target_modules": ["q_proj"], "target_parameters": STACKS}),
    "qwen2_moe": ("qwen2_moe", {"target_modules": ["q_proj"], "target_parameters": [*STACKS, "mlp.gate.weight"]}),
}


def adapted(folder, name, seed, **config):
    """Save an adapter of random weights; return what PEFT's own merge makes of it, as a file of transformers."""
    cls = type(tiny(name))
    wrapped = peft.get_peft_model(
        cls.from_pretrained(folder / "base"), peft.LoraConfig(r=2, lora_alpha=5, lora_dropout=0.0, **config)
    )
    perturb(wrapped, 0.2, seed)
    wrapped.save_pretrained(folder / f"adapter{seed}")
    wrapped.merge_and_unload().save_pretrained(folder / f"whole{seed}")
    return read_state(folder / f"whole{seed}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_count_as_what_peft_makes_of_them(tmp_path, kind):
    name, config = KINDS[kind]
    tiny(name).save_pretrained(tmp_path / "base")
    base, wholes = read_state(tmp_path / "base"), [adapted(tmp_path, name, seed, **config) for seed in (1, 2)]
    experts = {f"a{seed}": str(tmp_path / f"adapter{seed}") for seed in (1, 2)}
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(tmp_path / "base"), "experts": experts}
    merge({**recipe, "weights": [1.0, -0.5], "out": str(tmp_path / "merged")})
    merged = read_state(tmp_path / "merged")
    assert merged.keys() == base.keys()
    for tensor, value in base.items():
        wanted = value + (wholes[0][tensor] - value) - 0.5 * (wholes[1][tensor] - value)
        torch.testing.assert_close(merged[tensor], wanted, rtol=1e-5, atol=2e-6, msg=tensor)
    assert sum(not torch.equal(merged[tensor], base[tensor]) for tensor in base) >= 2


@pytest.mark.parametrize("kind", ["mixtral", "mixtral-experts", "qwen3_moe-one", "gpt_oss", "aria_text", "vit"])
def test_one_adapter_of_weight_1_gives_itself_back(tmp_path, kind):
    name, config = KINDS[kind]
    tiny(name).save_pretrained(tmp_path / "base")
    adapted(tmp_path, name, 1, **config)
    recipe = {"method": "average", "base": str(tmp_path / "base"), "experts": [str(tmp_path / "adapter1")]}
    merge({**recipe, "adapter": 8, "out": str(tmp_path / "again")})
    adapter, again = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("adapter1", "again"))
    assert adapter.keys() == again.keys()
    assert all(torch.equal(adapter[key], again[key]) for key in adapter)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3", "gpt_oss", "qwen2_moe", "siglip"])
def test_two_adapters_of_a_mixture_are_one_that_peft_loads(tmp_path, kind):
    """Attention of torch's own kind is compared but for its output, which PEFT 0.21 moves twice as far."""
    name, config = KINDS.get(kind, (kind, {"target_modules": "all-linear"}))
    tiny(name).save_pretrained(tmp_path / "base")
    base, wholes = read_state(tmp_path / "base"), [adapted(tmp_path, name, seed, **config) for seed in (1, 2)]
    experts = {f"a{seed}": str(tmp_path / f"adapter{seed}") for seed in (1, 2)}
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(tmp_path / "base"), "experts": experts}
    made = merge({**recipe, "weights": [1.0, -0.5], "adapter": 16, "out": str(tmp_path / "both")})
    assert float(made.notes[0].split()[1]) < 1e-6
    assert any("moves it twice as far" in line for line in made.notes) == (kind == "siglip")
    model = peft.PeftModel.from_pretrained(type(tiny(name)).from_pretrained(tmp_path / "base"), tmp_path / "both")
    model.merge_and_unload().save_pretrained(tmp_path / "loaded")
    merged = read_state(tmp_path / "loaded")
    for tensor, value in base.items():
        wanted = value + (wholes[0][tensor] - value) - 0.5 * (wholes[1][tensor] - value)
        if "head.attention.out_proj" in tensor:
            wanted = 2 * wanted - value
        torch.testing.assert_close(merged[tensor], wanted, rtol=1e-5, atol=3e-6, msg=tensor)


def test_an_adapter_of_torch_s_own_attention_is_said_to_be_another_in_peft(tmp_path):
    tiny("siglip").save_pretrained(tmp_path / "base")
    adapted(tmp_path, "siglip", 1, target_modules=["head.attention"])
    with open_checkpoint(tmp_path / "adapter1") as state:
        assert "counts once; PEFT up to 0.21 moves it twice as far" in state.notes[0]


def test_parameters_that_no_merge_knows_are_refused(tmp_path):
    tiny("gpt_oss").save_pretrained(tmp_path / "base")
    adapted(tmp_path, "gpt_oss", 1, target_modules=[], target_parameters=["experts.gate_up_proj_bias"])
    recipe = {"method": "average", "base": str(tmp_path / "base"), "experts": [str(tmp_path / "adapter1")]}
    with pytest.raises(
        MergeflowError, match=r"adapts parameters \(experts\.gate_up_proj_bias\).*gate_up_proj, down_proj"
    ):
        merge({**recipe, "out": str(tmp_path / "merged")})
