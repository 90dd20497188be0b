"""Slices of layers: what comes out is a model of transformers' own class that runs the chosen blocks in their order."""

import json
import re

import pytest
import torch
from torch import nn

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, merge
from mergeflow.merging.architectures.blocks import ENCODERS, STACKED
from mergeflow.merging.architectures.families import family_of
from tests.merging.tiny_models import CAUSAL, tiny

transformers = pytest.importorskip("transformers")
AUTO = transformers.AutoModelForCausalLM
TOKENS = torch.tensor([[1, 5, 9, 2, 7]])
ROWS = {"llama": "model.layers", "mistral": "model.layers", "qwen2": "model.layers", "gpt2": "transformer.h"}
ROWS |= {"gemma2": "model.layers", "gpt_neox": "gpt_neox.layers"}


def saved(folder, name, seed=0, **changes):
    model = tiny(name, seed, **changes)
    model.save_pretrained(folder)
    return model


def load(path):
    model, loading = AUTO.from_pretrained(path, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    return model.eval()


@pytest.mark.parametrize("name", ROWS)
def test_a_frankenmerge_runs_the_chosen_blocks(name, tmp_path):
    """Blocks 0, 1 of a, then 1, 0 … of b: as a ModuleList put together by hand gives it."""
    a, b = (saved(tmp_path / place, name, seed) for seed, place in enumerate("ab"))
    slices = [{"model": f"{tmp_path}/a"}, {"model": f"{tmp_path}/b", "layers": [1, 2]}, {"model": f"{tmp_path}/b"}]
    assert (
        check_recipe({"slices": slices}).steps["slices"] == f"layers of {tmp_path}/a, {tmp_path}/b [1, 2], {tmp_path}/b"
    )
    merge({"slices": slices}, tmp_path / "tall")
    tall = load(tmp_path / "tall")
    row, first, other = (model.get_submodule(ROWS[name]) for model in (tall, a, b))
    assert len(row) == 5
    blocks = [first[0], first[1], other[1], other[0], other[1]]
    for index, block in enumerate(blocks):
        for key, value in block.state_dict().items():
            assert torch.equal(row[index].state_dict()[key], value), key
    parent, _, last = ROWS[name].rpartition(".")
    setattr(a.get_submodule(parent), last, nn.ModuleList(blocks))
    a.config.update({key: getattr(tall.config, key) for key in ("num_hidden_layers", "layer_types") if key in a.config})
    behind = ["lm_head", "embed_out", "model.norm", "gpt_neox.final_layer_norm", "transformer.ln_f"]
    for place in behind[a.config.tie_word_embeddings :]:
        if place in dict(a.named_modules()):
            a.get_submodule(place).load_state_dict(b.get_submodule(place).state_dict())
    with torch.no_grad():
        expected = a(TOKENS, use_cache=False).logits
        torch.testing.assert_close(tall(TOKENS, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)
        assert tall.generate(TOKENS, max_new_tokens=3, do_sample=False).shape == (1, 8)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_whose_blocks_are_alike_stack(name, tmp_path):
    """Blocks 0 and 1 of a, then 1 of b; what makes tokens is a's, what comes behind the blocks is b's."""
    a, b = (saved(tmp_path / place, name, seed) for seed, place in enumerate("ab"))
    merge({"slices": [{"model": f"{tmp_path}/a"}, {"model": f"{tmp_path}/b", "layers": [1, 2]}]}, tmp_path / "tall")
    tall, loading = type(a).from_pretrained(tmp_path / "tall", output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    row, other = (next(part for part in model.modules() if isinstance(part, nn.ModuleList)) for model in (a, b))
    row.append(other[1])
    held = dict(a.named_parameters())
    for key, value in b.named_parameters():
        if not any(word in key for word in ("embed", "layer.", "layers.", "decoder.weight")):
            held[key].data.copy_(value)
    given = {"input_ids": TOKENS} if "vocab_size" in a.config else {"pixel_values": torch.rand(2, 3, 16, 16)}
    with torch.no_grad():
        torch.testing.assert_close(tall.eval()(**given)[0], a.eval()(**given)[0], rtol=1e-5, atol=1e-6)


def test_a_classifier_belongs_to_the_blocks_whatever_the_config_ties(tmp_path):
    """The rows of classes were the first model's wherever config.json ties a head, which this one is not."""
    for seed, place in enumerate("ab"):
        config = tiny("qwen2", tie_word_embeddings=True, num_labels=3).config
        torch.manual_seed(seed)
        transformers.Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / place)
    merge({"slices": [{"model": f"{tmp_path}/{place}", "layers": [0, 1]} for place in "ab"]}, tmp_path / "tall")
    tall, b = (dict(open_checkpoint(tmp_path / place)) for place in ("tall", "b"))
    assert torch.equal(tall["score.weight"], b["score.weight"])


STACKS = [name for name in CAUSAL if family_of(name, ()).name in STACKED]


@pytest.mark.parametrize(
    "name", [name for name in STACKS if name not in ("jamba", "gpt_neo", "deepseek_v2", "deepseek_v3")]
)
def test_every_architecture_that_is_said_to_stack_does(name, tmp_path):
    saved(tmp_path / "a", name)
    merge({"slices": [{"model": f"{tmp_path}/a"}, {"model": f"{tmp_path}/a", "layers": [0, 1]}]}, tmp_path / "tall")
    with torch.no_grad():
        assert bool(load(tmp_path / "tall")(TOKENS).logits.isfinite().all())


def test_lists_with_an_entry_per_block_follow_their_blocks(tmp_path):
    saved(tmp_path / "a", "gemma2", num_hidden_layers=4)
    merge({"slices": [{"model": f"{tmp_path}/a", "layers": [1, 4]}]}, tmp_path / "short")
    config = json.loads((tmp_path / "short/config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert config["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]


def test_slices_of_merges_and_merges_of_slices(tmp_path):
    """A slerp of two ranges of layers, on a stack with another model's; dtype and shards as any merge has them."""
    for seed, place in enumerate("ab"):
        saved(tmp_path / place, "llama", seed, num_hidden_layers=3)
    recipe = {
        "steps": {
            "low": [{"model": f"{tmp_path}/a", "layers": [0, 2]}],
            "high": [{"model": f"{tmp_path}/b", "layers": [1, 3]}],
            "mixed": {"method": "slerp", "args": {"t": [0.2, 0.8]}, "experts": ["step:low", "step:high"]},
            "tall": [{"model": "step:mixed"}, {"model": f"{tmp_path}/b", "layers": [2, 3]}],
        },
        "method": "passthrough",
        "experts": ["step:tall"],
        "dtype": "bfloat16",
        "shard_size": "40KB",
    }
    made = merge(recipe, tmp_path / "out")
    assert load(tmp_path / "out").config.num_hidden_layers == 3
    whole = {"method": "slerp", "args": {"t": [0.2, 0.8]}, "experts": [f"{tmp_path}/low", f"{tmp_path}/high"]}
    for name in ("low", "high"):
        merge({"slices": recipe["steps"][name]}, tmp_path / name)
    merge(whole, tmp_path / "mixed")
    stacked, mixed, b = (open_checkpoint(tmp_path / place) for place in ("out", "mixed", "b"))
    for name in stacked:
        last = name.startswith("model.layers.2.") or name in ("lm_head.weight", "model.norm.weight")
        assert torch.equal(stacked[name], (b if last else mixed)[name].bfloat16()), name
    assert "step:mixed/low" in made.inputs


def test_the_bits_are_the_models(tmp_path):
    """One slice of all layers is the model, −0 included, and its config."""
    model = tiny("qwen2")
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = -0.0
    model.save_pretrained(tmp_path / "a")
    made = merge({"slices": [{"model": f"{tmp_path}/a"}]}, tmp_path / "same")
    with open_checkpoint(tmp_path / "a") as a:
        from mergeflow.checkpoints import fingerprint

        assert made.fingerprint == fingerprint(a)
    assert json.loads((tmp_path / "same/config.json").read_text()) == json.loads(
        (tmp_path / "a/config.json").read_text()
    )


def test_models_of_other_types_keep_them_with_a_word(tmp_path):
    for seed, (place, dtype) in enumerate((("a", torch.bfloat16), ("b", torch.float32))):
        tiny("llama", seed).to(dtype).save_pretrained(tmp_path / place)
    slices = [{"model": f"{tmp_path}/{place}", "layers": [at, at + 1]} for at, place in enumerate("ab")]
    (warning,) = merge({"slices": slices}, tmp_path / "out").warnings
    assert re.search("types of the slices' models differ .*/a' torch.bfloat16, .*/b' torch.float32", warning)
    with open_checkpoint(tmp_path / "out") as made, open_checkpoint(tmp_path / "b") as b:
        assert torch.equal(made["model.layers.1.mlp.up_proj.weight"], b["model.layers.1.mlp.up_proj.weight"])


def test_scale_switches_parts_off(tmp_path):
    """The trick of new blocks that begin as identities: o_proj and down_proj of the copies are 0."""
    model = saved(tmp_path / "a", "llama")
    off = [{"filter": "layers.2.self_attn.o_proj", "value": 0.0}, {"filter": "layers.2.mlp.down_proj", "value": 0.0}]
    slices = [{"model": f"{tmp_path}/a"}, {"model": f"{tmp_path}/a", "layers": [1, 2]}]
    merge({"slices": slices, "args": {"scale": [*off, 1.0]}}, tmp_path / "tall")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "tall")(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        (
            {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
            [0, 1],
            "config.json differs:\n.*rope_theta is 500.0",
        ),
        ({"intermediate_size": 40}, [0, 1], "config.json differs:\n.*intermediate_size is 40 in '.*/b' and 48"),
        ({"vocab_size": 42}, [0, 1], r"the head of '.*/b', whose rows are of other tokens .*has 42 rows for tokens"),
        ({}, [1, 3], r"layers \[1, 3\] of '.*/b': it has 2 blocks, 0 to 1, so that the end is 2 at most"),
    ],
)
def test_what_cannot_run_in_one_model(changes, layers, message, tmp_path):
    saved(tmp_path / "a", "llama")
    saved(tmp_path / "b", "llama", **changes)
    slices = [{"model": f"{tmp_path}/a"}, {"model": f"{tmp_path}/b", "layers": layers}]
    with pytest.raises(MergeflowError, match=message):
        check_recipe({"slices": slices})


def test_rows_of_a_head_are_of_the_tokens_of_the_embedding(tmp_path):
    """The result answered in the last model's tokens, and was read by the first one's tokenizer."""
    for seed, place in enumerate("ab"):
        saved(tmp_path / place, "llama", seed)
        words = [f"t{row}" for row in range(40)][:: -1 if seed else 1]
        (tmp_path / place / "vocab.txt").write_text("\n".join(words))
    slices = [{"model": f"{tmp_path}/a", "layers": [0, 1]}, {"model": f"{tmp_path}/b", "layers": [1, 2]}]
    with pytest.raises(
        MergeflowError, match=r"the head of '.*/b', whose rows are of other tokens .*40 tokens in other"
    ):
        merge({"slices": slices}, tmp_path / "tall")
    merge({"slices": [*slices, slices[0]]}, tmp_path / "tall")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("albert", "model_type albert.*only from models that are one row of blocks that are known to be alike"),
        ("t5", "model_type t5.*only from models that are one row of blocks"),
        ("clip", "model_type clip.*only from models that are one row of blocks"),
        ("dinov2", "model_type dinov2.*only from models that are one row of blocks"),
        ("deepseek_v3", "depends on its index \\(first_k_dense_replace: 1"),
        ("gpt_neo", "depends on its index \\(attention_types"),
        ("jamba", "depends on its index \\(attn_layer_period: 8"),
    ],
)
def test_architectures_that_do_not_stack(name, message, tmp_path):
    saved(tmp_path / "a", name)
    with pytest.raises(MergeflowError, match=message):
        check_recipe({"slices": [{"model": f"{tmp_path}/a", "layers": [0, 1]}]})


def test_configurations_of_both_versions_of_transformers_run_in_one_model(tmp_path):
    """transformers 4 writes rope_theta and torch_dtype, and leaves out what has its class's default."""
    for seed, place in enumerate("ab"):
        saved(tmp_path / place, "llama", seed)
    path = tmp_path / "b/config.json"
    config = json.loads(path.read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    left_out = ("attention_bias", "mlp_bias", "hidden_act", "head_dim", "dtype", "rms_norm_eps", "pretraining_tp")
    older = {"rope_theta": theta, "rope_scaling": None, "torch_dtype": "float32", "transformers_version": "4.44.0"}
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in left_out} | older))
    slices = [{"model": f"{tmp_path}/a"}, {"model": f"{tmp_path}/b", "layers": [1, 2]}]
    merge({"slices": slices}, tmp_path / "tall")
    assert load(tmp_path / "tall").config.num_hidden_layers == 3
    path.write_text(path.read_text().replace(f'"rope_theta": {theta}', '"rope_theta": 77.0'))
    with pytest.raises(MergeflowError, match=r"rope_theta is 77\.0"):
        check_recipe({"slices": slices})


def test_a_config_without_what_it_needs(tmp_path):
    saved(tmp_path / "a", "gemma2")
    path = tmp_path / "a/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "layer_types"}))
    with pytest.raises(MergeflowError, match=r"has no list `layer_types`. Load and save the model with a newer"):
        check_recipe({"slices": [{"model": f"{tmp_path}/a"}]})
    path.write_text(json.dumps(config | {"num_hidden_layers": 7}))
    with pytest.raises(MergeflowError, match=r"has 2 blocks, but config.json says 7"):
        check_recipe({"slices": [{"model": f"{tmp_path}/a"}]})
    path.unlink()
    with pytest.raises(MergeflowError, match=r"no config.json with a model_type"):
        check_recipe({"slices": [{"model": f"{tmp_path}/a"}]})
