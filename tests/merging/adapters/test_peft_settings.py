"""Each key of adapter_config.json is changed while the weights stay: a merge is PEFT's model, says so, or refuses."""

import copy
import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from mergeflow.merging.files.convert import convert
from tests.merging.families import built
from tests.merging.tiny_models import perturb, tiny

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

KINDS = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING
# Settings without which a kind of adapter cannot be made for a small model.
NEEDED: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1, "target_modules": "self_attn"},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 10},
    "IA3": {"feedforward_modules": ["v_proj"]},
    "MISS": {"r": 4},
    "PSOFT": {"r": 4},
    "ROAD": {"group_size": 8},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [3, 7], "target_modules": ["embed_tokens"]},
    "VBLORA": {"num_vectors": 4, "vector_length": 8},
    "WAVEFT": {"n_frequency": 10},
}
# Kinds that no weights can hold, and those of several adapters, which are not made here.
NO_WEIGHTS = {"ADAPTION_PROMPT", "CARTRIDGE", "CPT", "LILY", "MULTITASK_PROMPT_TUNING", "POLY", "PREFIX_TUNING",
              "PROMPT_TUNING", "P_TUNING", "SHADOW", "XLORA"}  # fmt: skip
TEXT = {"input_ids": torch.arange(3, 15)[None]}
PICTURE = {"pixel_values": torch.linspace(-1, 1, 768).reshape(1, 3, 16, 16)}
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
SAVED = {"target_modules": ["q_proj", "fc1"], "modules_to_save": ["classifier"], "layers_to_transform": [1]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": ["q_proj", "v_proj"]}),
    "tables": ("llama", {"target_modules": ["q_proj", "embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 2}}),
    "dora": ("llama", {"target_modules": "all-linear", "use_dora": True}),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "bias": "lora_only"}),
    "bert": ("bert", {"target_modules": ["query", "output.dense"], "exclude_modules": ["attention.output.dense"]}),
    "t5": ("t5", {"target_modules": ["q", "v", "wo"], "use_rslora": True}),
    "vit": ("vit", SAVED),
    "mixture": ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": STACKS}),
    "sentences": ("nomic_bert", {"target_modules": ["q_proj", "k_proj", "fc1"]}),
    "convolutions": ("resnet", {"target_modules": ["convolution"], "bias": "none"}),
}


def model(family: str) -> nn.Module:
    try:
        made = tiny(family)
    except KeyError:
        made = built(family)
    made.requires_grad_(True)
    perturb(made, 0.1, 7)
    return made.requires_grad_(False)


def output(net: Any) -> Tensor:
    given = PICTURE if net.main_input_name == "pixel_values" else TEXT
    torch.manual_seed(3)
    with torch.no_grad():
        return net.eval()(
            **given, **({"decoder_input_ids": given["input_ids"]} if net.config.is_encoder_decoder else {})
        )[0]


def others(key: str, value: Any, module: str) -> list[Any]:
    """Return other values of a key, right ones and wrong ones."""
    end = module.rpartition(".")[2]
    named = {
        "target_modules": [[end], [module], f".*{end}", ["nothing"], "all-linear", []],
        "exclude_modules": [[end], [module], f".*{end}", module],
        "layers_to_transform": [[0], 0, 1, [5]],
        "layers_pattern": ["layers", ["h"]],
        "rank_pattern": [{end: 2}, {module: 3}, {"nothing": 3}, {".*": 4}],
        "alpha_pattern": [{end: 2}, {module: 3}, {"nothing": 3}, {f"^{module}": 4.5}],
        "modules_to_save": [["lm_head"], [module], ["norm"]],
        "trainable_token_indices": [[3, 7], [4, 9], {"embed_tokens": [3]}, {"lm_head": [3]}],
        "target_parameters": [STACKS[:1], STACKS[::-1], [f"{end}.weight"]],
        "bias": ["none", "all", "lora_only"],
        "init_lora_weights": [False, "gaussian", "pissa", "pissa_niter_2", "olora", "loftq", "corda", "eva", "lora_ga"],
        "peft_type": ["LOHA", "ADALORA", "IA3", "HIRA", "OFT"],
        "task_type": ["CAUSAL_LM", "FEATURE_EXTRACTION"],
    }
    if key in named:
        return [*named[key], None, 3]
    if isinstance(value, bool):
        return [not value, None, "false", 1]
    return (
        [value + 1, value // 2, -value, None]
        if isinstance(value, int | float)
        else [True, 1, "x", {}, [], {"a": 1}, None]
    )


class Adapted:
    """A base, and a folder for adapters of it."""

    def __init__(self, folder: Path, family: str) -> None:
        self.folder, base = folder, model(family)
        base.save_pretrained(folder / "base")
        self.cls = type(base)

    def base(self) -> Any:
        return self.cls.from_pretrained(self.folder / "base")

    def train(self, config: Any) -> dict[str, Any]:
        """Save an adapter of random weights; return its adapter_config.json."""
        shutil.rmtree(self.folder / "adapter", ignore_errors=True)
        wrapped = peft.get_peft_model(self.base(), config)
        perturb(wrapped, 0.1, 2)
        wrapped.save_pretrained(self.folder / "adapter")
        content = json.loads((self.folder / "adapter/adapter_config.json").read_text())
        return {**content, "base_model_name_or_path": str(self.folder / "base")}

    def differs(self, content: dict[str, Any], usual: tuple[str, ...] = ()) -> bool | None:
        """Say whether a merge silently differs from PEFT's model; None where either refuses."""
        (self.folder / "adapter/adapter_config.json").write_text(json.dumps(content))
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        recipe = {
            "method": "task_arithmetic",
            "args": {"scale": 1.0},
            "base": str(self.folder / "base"),
            "out": str(out),
        }
        recipe |= {"experts": {"a": str(self.folder / "adapter")}}
        kind = content["peft_type"]
        fault = f"is of the type {kind!r}.*mergeflow convert"
        if not isinstance(kind, str):
            fault = f"says peft_type = {json.dumps(kind)}, expected a type of PEFT's"
        for form in ({}, {"adapter": 8}) if kind != "LORA" else ():
            with pytest.raises(MergeflowError, match=fault):
                merge({**recipe, **form})
        try:
            if content["peft_type"] == "LORA":
                merged = merge(recipe)
                notes = (*merged.notes, *merged.warnings)
            else:
                notes = convert(self.folder / "adapter", out).warnings
        except MergeflowError:
            return None
        try:
            wanted = output(peft.PeftModel.from_pretrained(self.base(), self.folder / "adapter"))
        except Exception:
            return None
        made = output(self.cls.from_pretrained(out))
        return set(notes) <= set(usual) and not torch.allclose(made, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_no_setting_of_lora_makes_a_merge_silently_another_model_than_peft_s(tmp_path: Path, name: str) -> None:
    family, settings = MODELS[name]
    adapted = Adapted(tmp_path, family)
    content = adapted.train(peft.LoraConfig(r=4, lora_alpha=6, **settings))
    assert adapted.differs(content) is False
    made = merge({"method": "average", "base": str(tmp_path / "base"), "experts": [str(tmp_path / "adapter")],
                  "out": str(tmp_path / "noted")})  # fmt: skip
    usual = (*made.notes, *made.warnings)
    file = (tmp_path / "adapter/adapter_model.safetensors").read_bytes()
    keys = re.findall(
        r"base_model\.model\.([\w.]+?)(?:\.base_layer)*\.lora_(?:embedding_)?A", file[:100_000].decode("latin-1")
    )
    silent, merged = [], 0
    for field in dataclasses.fields(peft.LoraConfig):
        values = [content.get(field.name), *others(field.name, content.get(field.name), min(keys))]
        for value in values:
            changed = {**copy.deepcopy(content), field.name: value}
            if value == content.get(field.name):
                changed.pop(field.name, None)
            answer = "peft_type" in changed and adapted.differs(changed, usual)
            merged += answer is False
            silent += [f"{field.name} = {changed.get(field.name, '(left out)')}"] if answer else []
    assert not silent
    assert merged >= 40


@pytest.mark.parametrize("kind", sorted(kind.value for kind in KINDS if kind.value != "LORA"))
def test_no_setting_of_another_kind_makes_a_converted_model_silently_another(tmp_path: Path, kind: str) -> None:
    family = "bert" if kind == "BEFT" else "llama"  # of biases
    made, config = Adapted(tmp_path, family), KINDS[peft.PeftType(kind)]
    modules, task = (["q_proj", "v_proj"], "CAUSAL_LM") if family == "llama" else (["query", "output.dense"], None)
    defaults = {"target_modules": modules, "num_virtual_tokens": 3, "task_type": task}
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    settings = {key: value for key, value in defaults.items() if key in fields} | NEEDED.get(kind, {})
    keys = fields.keys() - {"peft_type", "base_model_name_or_path", "task_type"}
    silent, merged = [], 0
    for key in sorted(keys - ({"init_weights"} if kind == "TINYLORA" else set())):  # whose memory is not set then
        for value in others(key, settings.get(key, fields[key]), modules[0]):
            try:
                content = made.train(config(**{**settings, key: value}))
            except Exception:  # PEFT makes none
                continue
            answer = made.differs(content)
            merged += answer is False
            silent += [f"{key} = {value}"] if answer else []
    assert not silent
    assert bool(merged) != (kind in NO_WEIGHTS)
