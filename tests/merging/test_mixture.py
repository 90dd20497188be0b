"""Mixtures of dense models: transformers' own classes load them, equal experts are the dense model, prompts choose."""

import json

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, read_state, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, make_recipe, merge
from tests.merging.tiny_models import loaded, tiny

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
TOKENS = torch.tensor([[1, 5, 9, 2, 7, 3]])
BECOMES = {"llama": "Mixtral", "mistral": "Mixtral", "qwen2": "Qwen2Moe", "qwen3": "Qwen3Moe"}


def saved(folder, name, seed=0, words=False, **changes):
    model = tiny(name, seed, **changes)
    model.save_pretrained(folder)
    if words:
        vocab = {
            "<unk>": 0,
            **{word: index + 1 for index, word in enumerate(["code", "maths", "a", "b", "c", "d", "e", "f"])},
        }
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", BECOMES)
def test_equal_experts_are_the_dense_model(name, tmp_path):
    dense = saved(tmp_path / "base", name, tie_word_embeddings=name == "qwen3")
    base = f"{tmp_path}/base"
    merge({"mixture": {"base": base, "experts": [base] * 3, "gate": "random"}}, tmp_path / "out")
    made = loaded(tmp_path / "out")
    assert type(made).__name__ == f"{BECOMES[name]}ForCausalLM"
    with torch.no_grad():
        torch.testing.assert_close(made(TOKENS).logits, dense(TOKENS).logits, rtol=1e-4, atol=1e-5)
        assert made.generate(TOKENS, max_new_tokens=3, do_sample=False).shape == (1, 9)


def test_an_expert_does_what_its_model_did(tmp_path):
    """Each token of a block passes through the MLP of the model that the router chose for it."""
    a, b = (saved(tmp_path / place, "llama", seed) for seed, place in enumerate("ab"))
    recipe = {"base": f"{tmp_path}/a", "experts": [f"{tmp_path}/a", f"{tmp_path}/b"], "gate": "random"}
    merge({"mixture": {**recipe, "experts_per_token": 1}}, tmp_path / "out")
    made = loaded(tmp_path / "out")
    for block, (first, other) in enumerate(zip(a.model.layers, b.model.layers, strict=True)):
        moe = made.model.layers[block].mlp
        x = torch.randn(1, 7, 32)
        with torch.no_grad():
            chosen = (x @ moe.gate.weight.T)[0].argmax(-1)
            output = moe(x)
            output = (output[0] if isinstance(output, tuple) else output).reshape(7, 32)
            for at, expert in enumerate(chosen):
                expected = (first, other)[expert].mlp(x[0, at])
                torch.testing.assert_close(output[at], expected, rtol=1e-4, atol=1e-6)


def test_prompts_choose_their_expert(tmp_path):
    saved(tmp_path / "base", "llama", words=True)
    experts = [
        {"model": f"{tmp_path}/base", "prompts": ["code a b"], "negative_prompts": ["maths c"]},
        {"model": f"{tmp_path}/base", "prompts": ["maths c", "maths d"]},
    ]
    base = f"{tmp_path}/base"
    for gate in ("hidden", "cheap_embed"):
        merge({"mixture": {"base": base, "experts": experts, "gate": gate}}, tmp_path / gate)
    dense = loaded(tmp_path / "base")
    seen = []
    for layer in dense.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
    with torch.no_grad():
        for text, expert in (("code a b", 0), ("maths c", 1)):
            seen.clear()
            ids = transformers.AutoTokenizer.from_pretrained(base)(text, return_tensors="pt")["input_ids"]
            dense(ids)
            with open_checkpoint(tmp_path / "hidden") as made:
                for block, x in enumerate(seen):
                    router = made[f"model.layers.{block}.block_sparse_moe.gate.weight"]
                    torch.testing.assert_close(router.norm(dim=1), torch.ones(2))
                    assert int((x.mean(0) @ router.T).argmax()) == expert
    embedding = dense.model.embed_tokens.weight.detach()
    prompt = embedding[[1, 3, 4]].mean(0) - embedding[[2, 5]].mean(0)
    with open_checkpoint(tmp_path / "cheap_embed") as made:
        for block in range(2):
            router = made[f"model.layers.{block}.block_sparse_moe.gate.weight"]
            torch.testing.assert_close(router[0], prompt / prompt.norm())


def test_prompts_that_cancel_out_but_for_rounding_are_refused(tmp_path):
    base = saved(tmp_path / "base", "llama", words=True) and f"{tmp_path}/base"
    experts = [
        {"model": base, "prompts": ["code a b maths c d"], "negative_prompts": ["d maths b c a code"]},
        {"model": base, "prompts": ["maths c"]},
    ]
    with pytest.raises(MergeflowError, match="the prompts of an expert cancel out"):
        merge({"mixture": {"base": base, "experts": experts, "gate": "cheap_embed"}}, tmp_path / "out")


def test_a_shared_expert_of_qwen(tmp_path):
    """Its gate is open by half: with equal weights the block gives 1 + scale / 2 of the dense one."""
    dense = saved(tmp_path / "base", "qwen2")
    base = f"{tmp_path}/base"
    shared = {"model": base, "scale": 0.5}
    merge({"mixture": {"base": base, "experts": [base, base], "gate": "random", "shared": shared}}, tmp_path / "out")
    made, x = loaded(tmp_path / "out"), torch.randn(1, 4, 32)
    with torch.no_grad():
        output = made.model.layers[1].mlp(x)
        output = output[0] if isinstance(output, tuple) else output
        expected = 1.25 * dense.model.layers[1].mlp(x)
        torch.testing.assert_close(output.reshape(4, 32), expected[0], rtol=1e-4, atol=1e-5)


def test_random_routers_are_the_seeds_and_steps_may_be_experts(tmp_path):
    for seed, place in enumerate("ab"):
        saved(tmp_path / place, "mistral", seed)
    paths = [f"{tmp_path}/a", f"{tmp_path}/b"]
    mean = {"method": "average", "experts": paths}

    def made(name, seed):
        mixture = {"base": paths[0], "experts": [*paths, "step:mean"], "gate": "random", "seed": seed}
        recipe = {
            "steps": {"mean": mean, "mix": {"mixture": mixture}},
            "method": "passthrough",
            "experts": ["step:mix"],
        }
        return merge(recipe, tmp_path / name).fingerprint

    assert made("x", 0) == made("y", 0) != made("z", 1)
    merge(mean, tmp_path / "mean")
    with open_checkpoint(tmp_path / "x") as x, open_checkpoint(tmp_path / "mean") as average:
        written = x["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
        assert torch.equal(written, average["model.layers.1.mlp.down_proj.weight"])
        assert x.infos["model.layers.1.block_sparse_moe.gate.weight"].shape == (3, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate": "hidden"}, r"gate hidden needs `prompts` of every expert; 0, 1 \(from 0\)"),
        ({"experts_per_token": 5}, "experts_per_token is 5, of 2 experts"),
        ({"shared": {"model": "{base}"}}, "a mixtral has no expert that every token passes through"),
        ({"experts": ["{base}"]}, "2 or more"),
        ({"gates": 1}, "unknown key 'gates': did you mean 'gate'"),
        (
            {"experts": ["{base}", "{wide}"]},
            r"down_proj.weight' is \[32, 40\], the base's is \[32, 48\], and 5",
        ),
        ({"experts": ["{base}", "{biased}"]}, r"down_proj.bias' is \[32\], the base's is missing, and 5"),
        ({"experts": ["{base}", "{gelu}"]}, "hidden_act: base 'silu'; '.*/gelu' 'gelu'"),
        ({"experts": ["{base}", "{turned}"]}, "rope_theta: base 10000.0; '.*/turned' 500000.0"),
        ({"base": "{gpt2}"}, "model_type gpt2: mixtures are made of dense models of llama, mistral, qwen2, qwen3"),
    ],
)
def test_what_is_no_mixture(changes, message, tmp_path):
    saved(tmp_path / "base", "llama")
    saved(tmp_path / "wide", "llama", intermediate_size=40)
    saved(tmp_path / "gpt2", "gpt2")
    saved(tmp_path / "biased", "llama", mlp_bias=True)
    saved(tmp_path / "gelu", "llama", hidden_act="gelu")
    saved(tmp_path / "turned", "llama", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    plain = {"base": "{base}", "experts": ["{base}", "{base}"], "gate": "random"}
    text = json.dumps({**plain, **changes})
    for place in ("base", "wide", "gpt2", "biased", "gelu", "turned"):
        text = text.replace(f"{{{place}}}", f"{tmp_path}/{place}")
    with pytest.raises(MergeflowError, match=message):
        check_recipe({"mixture": json.loads(text)})


def test_experts_of_other_settings_are_accepted_by_allow_and_told_of(tmp_path):
    saved(tmp_path / "base", "llama")
    saved(tmp_path / "a", "mistral", rms_norm_eps=1e-3, sliding_window=None)
    weights = {name: value.bfloat16() for name, value in read_state(tmp_path / "a").items()}
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    write_checkpoint(tmp_path / "a/model.safetensors", weights)
    plan = {"mixture": {"base": f"{tmp_path}/base", "experts": [f"{tmp_path}/{n}" for n in ("a", "base")]}}
    plan["mixture"]["gate"] = "random"
    made = merge({**plan, "allow": ["hidden_act"]}, tmp_path / "out")
    assert [line for line in made.warnings if line.startswith("rms_norm_eps: base 1e-06; ")]
    halves = {name: value.half() for name, value in read_state(tmp_path / "base").items()}
    write_checkpoint(tmp_path / "base/model.safetensors", halves)
    with pytest.raises(MergeflowError, match=r"experts\.0\.w3\.weight' of the result overflows torch\.float16"):
        merge(plan, tmp_path / "half")


def test_a_base_without_a_tokenizer(tmp_path):
    saved(tmp_path / "base", "llama")
    experts = [{"model": f"{tmp_path}/base", "prompts": ["a"]}, {"model": f"{tmp_path}/base", "prompts": ["b"]}]
    recipe = make_recipe({"mixture": {"base": f"{tmp_path}/base", "experts": experts}, "out": f"{tmp_path}/out"})
    with pytest.raises(MergeflowError, match=r"gate hidden: no tokenizer can be opened in '.*/base'"):
        merge(recipe)
    assert not (tmp_path / "out").exists()


def test_a_router_is_not_computed_with_weights_that_transformers_draws(tmp_path):
    saved(tmp_path / "base", "llama", words=True)
    weights = read_state(tmp_path / "base")
    del weights["model.layers.1.self_attn.q_proj.weight"]
    write_checkpoint(tmp_path / "base/model.safetensors", weights)
    experts = [{"model": f"{tmp_path}/base", "prompts": [word]} for word in ("code", "maths")]
    with pytest.raises(
        MergeflowError, match=r"gate hidden computes with .* lacks 'model\.layers\.1\.self_attn\.q_proj"
    ):
        merge({"mixture": {"base": f"{tmp_path}/base", "experts": experts}}, tmp_path / "out")
