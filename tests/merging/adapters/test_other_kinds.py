"""Adapters of other kinds than LoRA become whole models by PEFT, and experts after that."""

import json
from typing import Any

import pytest
import torch

from mergeflow.checkpoints import read_state, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from mergeflow.merging.files.convert import convert
from tests.merging.tiny_models import perturb, tiny

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.tensor([[1, 5, 9, 2, 7]])
BOTH = {"target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdaLora": ("llama", {**BOTH, "total_step": 10}),
    "BOFT": ("llama", {**BOTH, "boft_block_size": 4}),
    "HRA": ("llama", BOTH),
    "IA3": ("llama", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "LNTuning": ("llama", {"target_modules": ["input_layernorm"], "modules_to_save": ["lm_head"]}),
    "LoHa": ("gpt_neox", {"target_modules": ["query_key_value", "dense_4h_to_h"], "task_type": "CAUSAL_LM"}),
    "LoKr": ("qwen2", {**BOTH, "modules_to_save": ["lm_head"]}),
    "OFT": ("llama", {**BOTH, "r": 0, "oft_block_size": 8}),
    "TrainableTokens": ("llama", {"token_indices": [3, 7]}),
    "Vera": ("llama", {"target_modules": ["q_proj", "o_proj"], "r": 4}),
}


def adapted(folder: Any, kind: str) -> Any:
    """Save a base and an adapter of a kind with random weights; return what PEFT computes with both."""
    family, settings = KINDS[kind]
    base = tiny(family)
    base.save_pretrained(folder / "base")
    model = peft.get_peft_model(type(base).from_pretrained(folder / "base"), getattr(peft, f"{kind}Config")(**settings))
    perturb(model, 0.1, 1)
    model.save_pretrained(folder / "adapter")
    return model.eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_of_any_kind_becomes_the_model_that_peft_computes(tmp_path, kind):
    model = adapted(tmp_path, kind)
    (tmp_path / "base/tokenizer.json").write_text("{}")
    convert(tmp_path / "adapter", tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "whole"]
    assert (tmp_path / "whole/tokenizer.json").exists()
    base, whole = (type(tiny(KINDS[kind][0])).from_pretrained(tmp_path / name).eval() for name in ("base", "whole"))
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
        torch.testing.assert_close(whole(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(base(TOKENS).logits, expected, atol=1e-3)
    recipe = {"method": "average", "base": f"{tmp_path}/base", "experts": [f"{tmp_path}/adapter"]}
    with pytest.raises(MergeflowError, match=r"only LORA is merged as it is.*mergeflow convert .*/adapter --out"):
        merge({**recipe, "out": f"{tmp_path}/out"})
    merge({**recipe, "experts": [f"{tmp_path}/whole"], "out": f"{tmp_path}/out"})


@pytest.mark.slow
def test_an_adapter_that_is_no_change_of_weights_or_not_whole_is_refused(tmp_path):
    adapted(tmp_path, "LoHa")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())

    def refused(message: str, **changes: Any) -> None:
        (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config | changes))
        with pytest.raises(MergeflowError, match=message):
            convert(tmp_path / "adapter", tmp_path / "whole")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]

    refused("Unexpected keyword arguments", of_next_year=1)
    refused(r"of the type loha, part of its base: PEFT \S+ knows no such type", peft_type="loha")
    refused("expected a type of PEFT", peft_type=None)
    refused("which its settings do not name, so that PEFT passes over it", target_modules=["query_key_value"])
    refused("is not on this machine: say in adapter_config.json", base_model_name_or_path="models/none")
    refused("Found missing adapter keys", target_modules=["query_key_value", "dense_4h_to_h", "dense"])
    weights = read_state(tmp_path / "base")
    write_checkpoint(tmp_path / "base/model.safetensors", {k: v for k, v in weights.items() if "embed_out" not in k})
    refused(r"the base lacks 'lm_head\.weight'")
    write_checkpoint(tmp_path / "base/model.safetensors", weights)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    base = type(tiny("gpt_neox")).from_pretrained(tmp_path / "base")
    peft.get_peft_model(base, prompts).save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    refused("of the type PROMPT_TUNING, part of its base: prompts and prefixes are no change of weights")
    peft.XLoraConfig(hidden_size=8, adapters={"a": "a"}).save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    refused("its change depends on the input", base_model_name_or_path=str(tmp_path / "base"))
