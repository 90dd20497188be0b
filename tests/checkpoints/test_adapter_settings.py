"""Every setting of PEFT's LoRA is read, known to be harmless, or refused: none changes a merge in silence."""

import copy
import dataclasses
import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.checkpoints.lora import HARMLESS, READ
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe
from tests.checkpoints.test_peft import added, check, classifier, gpt2, llama, trained

peft = pytest.importorskip("peft")
tuners = pytest.importorskip("peft.tuners.tuners_utils")
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
    defaults = [{}] * key.endswith("_config")  # of a part that is switched on
    for nothing in (None, False, [], *([] if defaults else [{}])):
        change(adapter, **{key: nothing})
        open_checkpoint(adapter).close()
    for value in (ACTING[key], *defaults):
        change(adapter, **{key: value})
        with pytest.raises(MergeflowError, match=f"more than plain LoRA, or are unknown: {key} = "):
            open_checkpoint(adapter)


Q = "model.layers.1.self_attn.q_proj"
NAMED = ["q_proj", "lm_head"]


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": [Q, "head"]},
        {"target_modules": r".*\.1\..*q_proj|lm_.*"},
        {"target_modules": ["oj", "nothing"]},
        {"target_modules": None, "target_parameters": ["experts.down_proj"]},
        {"exclude_modules": ["self_attn.q_proj"]},
        {"exclude_modules": ".*layers.1.*"},
        {"modules_to_save": ["self_attn"]},
        {"modules_to_save": ["head"]},
        {"layers_to_transform": [1, 7]},
        {"layers_to_transform": 0},
        {"layers_to_transform": [1], "layers_pattern": "layers"},
        {"layers_to_transform": [1], "layers_pattern": ["h", "blocks"]},
        {"layers_to_transform": [0], "target_modules": [Q]},
        {"layers_to_transform": [], "layers_pattern": []},
    ],
    ids=str,
)
def test_factors_that_peft_passes_over_are_refused(adapter, settings):
    settings = {"target_modules": NAMED, **settings}
    change(adapter, **settings)
    for module in (Q, Q.replace("1", "0"), "layers.1.q_proj", "lm_head", "head.q_proj"):
        tensors = {f"base_model.model.{module}.lora_{side}.weight": torch.ones(2, 2) for side in "AB"}
        save_file(tensors, adapter / "adapter_model.safetensors")
        if tuners.check_target_module_exists(peft.LoraConfig(**settings), module):
            open_checkpoint(adapter).close()
        else:
            with pytest.raises(
                MergeflowError, match=rf"factors of '{module}', which its adapter_config\.json does not"
            ):
                open_checkpoint(adapter)


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "modules_to_save"])
def test_names_of_modules_of_another_type_are_refused(adapter, key):
    for value in (3, {"mlp": 1}, [1], True):
        change(adapter, **{key: value})
        with pytest.raises(MergeflowError, match=rf"gives {key} = .*, expected names of modules"):
            open_checkpoint(adapter)


@pytest.mark.parametrize("targets", [None, "all-linear"])
def test_an_adapter_that_lists_no_modules_is_merged_whole_with_a_note(adapter, targets):
    change(adapter, target_modules=targets)
    with open_checkpoint(adapter) as state:
        assert list(state) == ["mlp.weight"]
        assert "all factors of the file are merged" in state.notes[0]


def test_names_without_peft_s_prefix_are_noted_and_two_of_one_tensor_refused(adapter):
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    bare = {name.removeprefix("base_model.model."): value + 1 for name, value in tensors.items()}
    with open_checkpoint(adapter) as state:
        assert not state.notes
    save_file(tensors | bare, file)
    with pytest.raises(MergeflowError, match="with and without PEFT's prefix"):
        open_checkpoint(adapter)
    save_file(bare, file)
    with open_checkpoint(adapter) as state:
        assert list(state) == ["mlp.weight"]
        assert "lack PEFT's prefix 'base_model.model.'" in state.notes[0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64])
def test_factors_of_codes_or_complex_numbers_are_refused(adapter, dtype):
    file = adapter / "adapter_model.safetensors"
    save_file({name: value.to(dtype) for name, value in load_file(file).items()}, file)
    with pytest.raises(MergeflowError, match=r"lora_A\.weight' is of .*, expected floating-point numbers"):
        open_checkpoint(adapter)


@pytest.mark.parametrize("place", ["adapter_model-00001-of-00002.safetensors", "default/adapter_model.safetensors"])
def test_weights_in_shards_or_a_folder_below_are_named(adapter, place):
    (adapter / "default").mkdir()
    (adapter / "adapter_model.safetensors").rename(adapter / place)
    with pytest.raises(MergeflowError, match=rf"holds neither .*, but {place}: name the folder that has one"):
        open_checkpoint(adapter)


def test_magnitudes_of_an_adapter_that_says_it_is_no_dora_are_refused(tmp_path):
    trained(llama(), tmp_path, target_modules=["q_proj"], use_dora=True)
    change(tmp_path / "adapter", use_dora=False)
    with pytest.raises(MergeflowError, match=r"says it is no DoRA \(use_dora\), but .* has magnitudes"):
        open_checkpoint(tmp_path / "adapter")


def test_a_weight_that_is_stored_whole_counts_and_not_the_factors_beside_it(tmp_path):
    base = llama()
    trained(base, tmp_path, target_modules=["q_proj"], modules_to_save=["lm_head"])
    file = tmp_path / "adapter/adapter_model.safetensors"
    head = "base_model.model.lm_head"
    factors = {f"{head}.lora_A.weight": torch.ones(4, 32), f"{head}.lora_B.weight": torch.ones(40, 4)}
    save_file(load_file(file) | factors, file)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    expected = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload().lm_head.weight
    with open_checkpoint(tmp_path / "adapter") as state:
        assert torch.equal(state["lm_head.weight"], expected)


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "of_next_year", 3])
def test_a_start_that_moves_the_base_is_refused(adapter, start):
    change(adapter, init_lora_weights=start)
    with pytest.raises(MergeflowError, match=rf"started by '{start}', which also changes the base"):
        open_checkpoint(adapter)


STARTS = [{"init_lora_weights": start} for start in (True, False, "gaussian", "orthogonal", "mica")]


@pytest.mark.parametrize("settings", [*STARTS, {"velora_config": peft.VeloraConfig(num_groups=4)}], ids=str)
def test_a_start_that_leaves_the_base_is_merged_and_velora_is_plain_once_trained(tmp_path, settings):
    base = llama()
    before = copy.deepcopy(base.state_dict())
    expected = trained(base, tmp_path, target_modules=["q_proj"], **settings)
    with open_checkpoint(tmp_path / "adapter") as state:
        assert state
        check({name: before[name] + state[name] for name in state}, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA is merged as it is"),
        ({"peft_type": None}, 'says peft_type = null, expected a type of PEFT\'s such as "LORA"'),
        ({"peft_type": 3}, "says peft_type = 3, expected a type"),
        ({"r": 2.0}, "r = 2.0 for 'mlp', expected a positive whole number"),
        ({"use_dora": True}, "DoRA"),
        ({"r": 3}, "has rank 2, its configuration says 3"),
        ({"lora_alpha": None}, "lora_alpha = None .* expected a number"),
        ({"alpha_pattern": {"mlp": "6"}}, "lora_alpha = '6' for 'mlp'"),
        ({"alpha_pattern": [3]}, r"alpha_pattern = \[3\], expected a mapping"),
        ({"rank_pattern": {"(": 2}}, "invalid expression"),
    ],
)
def test_adapters_that_cannot_be_merged(adapter, values, message):
    change(adapter, **values)
    with pytest.raises(MergeflowError, match=message):
        open_checkpoint(adapter)


@pytest.mark.parametrize("alpha", [6, 0, -6, 2.5])
def test_any_alpha_is_a_factor_however_the_difference_is_read(adapter, alpha):
    change(adapter, lora_alpha=alpha)
    with open_checkpoint(adapter) as opened:
        assert opened.is_task_vector
        torch.testing.assert_close(opened["mlp.weight"], torch.full((4, 5), 2 * alpha / 2))
        assert torch.equal(opened.read("mlp.weight", 3, 9), opened["mlp.weight"].reshape(-1)[3:9])


@pytest.mark.parametrize(
    ("end", "lacking"),
    [
        ("lora_A.weight", "lora_B"),
        ("lora_B.weight", "lora_A"),
        ("lora_embedding_A", "lora_embedding_B"),
        ("lora_embedding_B", "lora_embedding_A"),
        ("lora_magnitude_vector", "lora_A"),
    ],
)
def test_half_of_a_pair_of_factors_is_refused(adapter, end, lacking):
    stored = load_file(adapter / "adapter_model.safetensors")
    save_file(stored | {f"base_model.model.attn.{end}": torch.ones(4, 2)}, adapter / "adapter_model.safetensors")
    with pytest.raises(MergeflowError, match=rf"holds 'base_model.model.attn.{end}' without its {lacking}: copy"):
        open_checkpoint(adapter)


def test_a_folder_with_an_adapter_and_a_model_is_ambiguous(adapter):
    write_checkpoint(adapter / "model.safetensors", {"mlp.weight": torch.ones(4, 5)})
    with pytest.raises(MergeflowError, match=r"holds an adapter and a model: name 'model.safetensors' if"):
        open_checkpoint(adapter)
    with open_checkpoint(adapter / "model.safetensors") as checkpoint:
        assert set(checkpoint) == {"mlp.weight"}


def test_an_alpha_that_is_left_out_is_peft_s_default(adapter):
    path = adapter / "adapter_config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: content[key] for key in content.keys() - {"lora_alpha"}}))
    assert peft.LoraConfig.from_pretrained(adapter).lora_alpha == 8
    with open_checkpoint(adapter) as state:
        assert state["mlp.weight"].tolist() == torch.full((4, 5), 2 * 8 / 2).tolist()


def lose(folder, lost):
    """Take tensors out of an adapter's file."""
    file = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    assert any(lost in name for name in tensors)
    save_file({name: value for name, value in tensors.items() if lost not in name}, file)


def recipe(folder):
    experts = {"a": str(folder / "adapter")}
    return {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(folder / "base"), "experts": experts}


@pytest.mark.parametrize(
    ("model", "settings", "lost", "tensor"),
    [
        (gpt2, {"modules_to_save": ["wpe"]}, "wpe", "transformer.wpe.weight"),
        (classifier, {"task_type": "SEQ_CLS"}, "score", "score.weight"),
        (llama, {"trainable_token_indices": [3, 7]}, "tokens_delta", "the embedding"),
        (llama, {"trainable_token_indices": {"lm_head": [1], "embed_tokens": [2]}}, "lm_head", "lm_head.weight"),
        (gpt2, {"lora_bias": True}, "lora_B.bias", "transformer.h.0.attn.c_attn.bias"),
    ],
    ids=["saved", "classifier", "tokens", "tokens-of-one", "lora-bias"],
)
def test_tensors_that_the_settings_name_and_the_file_lacks_are_refused(tmp_path, model, settings, lost, tensor):
    """PEFT does not load such a file, or warns of missing keys."""
    trained(model(), tmp_path, target_modules=["q_proj" if model is llama else "c_attn"], **settings)
    assert not any("lacks" in note for note in check_recipe(recipe(tmp_path)).notes)
    lose(tmp_path, lost)
    with pytest.raises(MergeflowError, match=rf"'a' lacks '{tensor}'.*adapter_config.json.*`missing: base`"):
        check_recipe(recipe(tmp_path))
    assert any("lacks" in note for note in check_recipe({**recipe(tmp_path), "missing": "base"}).notes)


@pytest.mark.parametrize(
    ("settings", "lost", "setting"),
    [
        ({"bias": "all"}, "ln_1.bias", "bias"),
        ({"bias": "lora_only"}, "h.1.attn.c_attn.base_layer.bias", "bias"),
        ({}, "h.1.attn", "target_modules"),
    ],
    ids=["all", "lora-only", "factors"],
)
def test_what_peft_takes_from_the_base_in_an_incomplete_file_is_noted(tmp_path, settings, lost, setting):
    trained(gpt2(), tmp_path, target_modules=["c_attn"], **settings)
    lose(tmp_path, lost)
    assert any(f"by `{setting}`: the base's, as in PEFT" in note for note in check_recipe(recipe(tmp_path)).notes)
    merged = load_file(added(tmp_path) / "model.safetensors")
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    check(merged, expected)
