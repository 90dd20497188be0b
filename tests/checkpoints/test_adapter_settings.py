"""Every setting of PEFT's LoRA is read, known to be harmless, or refused: none changes a merge in silence."""

import copy
import dataclasses
import json

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.checkpoints.lora import HARMLESS, READ
from mergeflow.errors import MergeflowError
from tests.checkpoints.test_peft import llama, trained

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

FIELDS = {field.name: field for field in dataclasses.fields(peft.LoraConfig)}
ACTING = {
    "alora_invocation_tokens": [3],
    "use_qalora": True,
    "monteclora_config": {"n": 2},
    "layer_replication": [[0, 2], [1, 2]],
    "use_bdlora": {"nblocks": 2},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"r": 2},
    "a_key_of_a_later_version": 1,
}


@pytest.fixture
def adapter(tmp_path):
    tensors = {
        "base_model.model.mlp.lora_A.weight": torch.ones(2, 5),
        "base_model.model.mlp.lora_B.weight": torch.ones(4, 2),
    }
    write_checkpoint(tmp_path / "adapter_model.safetensors", tensors)
    peft.LoraConfig(r=2, lora_alpha=6, target_modules=["mlp"]).save_pretrained(tmp_path)
    return tmp_path


def change(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_no_setting_of_peft_is_unknown():
    assert FIELDS.keys() <= READ | HARMLESS | ACTING.keys()
    assert not READ & HARMLESS


@pytest.mark.parametrize("key", ACTING)
def test_a_setting_that_changes_what_an_adapter_computes_is_refused_by_name(adapter, key):
    open_checkpoint(adapter).close()
    for nothing in (None, False, {}, []):
        change(adapter, **{key: nothing})
        open_checkpoint(adapter).close()
    change(adapter, **{key: ACTING[key]})
    with pytest.raises(MergeflowError, match=f"more than plain LoRA, or are unknown: {key} = "):
        open_checkpoint(adapter)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "of_next_year", 3])
def test_a_start_that_moves_the_base_is_refused(adapter, start):
    change(adapter, init_lora_weights=start)
    with pytest.raises(MergeflowError, match=rf"started by '{start}', which also changes the base"):
        open_checkpoint(adapter)


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "mica"])
def test_a_start_that_leaves_the_base_is_merged(tmp_path, start):
    base = llama()
    before = {name: value.clone() for name, value in base.state_dict().items()}
    expected = trained(base, tmp_path, target_modules=["q_proj"], init_lora_weights=start)
    with open_checkpoint(tmp_path / "adapter") as state:
        for name in state:
            torch.testing.assert_close(before[name] + state[name], expected[name], rtol=1e-5, atol=1e-5)
    assert len(before) == len(expected)


def test_an_alpha_that_is_left_out_is_peft_s_default(adapter):
    path = adapter / "adapter_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: content[key] for key in content.keys() - {"lora_alpha"}}))
    assert peft.LoraConfig.from_pretrained(adapter).lora_alpha == 8
    with open_checkpoint(adapter) as state:
        assert state["mlp.weight"].tolist() == torch.full((4, 5), 2 * 8 / 2).tolist()


def test_velora_is_plain_lora_once_it_is_trained(tmp_path):
    base = llama()
    before = copy.deepcopy(base.state_dict())
    expected = trained(base, tmp_path, target_modules=["q_proj"], velora_config=peft.VeloraConfig(num_groups=4))
    with open_checkpoint(tmp_path / "adapter") as state:
        assert state
        for name in state:
            torch.testing.assert_close(before[name] + state[name], expected[name], rtol=1e-5, atol=1e-5)
