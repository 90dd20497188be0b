"""Inputs of everyday work fit their base: tied weights once or twice, prefixes, patterns, what is missing."""

import time

import pytest
import torch

from mergeflow.checkpoints import check_compatible, open_checkpoint, write_checkpoint
from mergeflow.checkpoints.checks import infos_of, pattern_of
from mergeflow.checkpoints.fitted import fit_inputs
from mergeflow.checkpoints.reader import LazyStateDict, TensorEntry
from mergeflow.errors import MergeflowError

transformers = pytest.importorskip("transformers")


def llama(seed, tied=True, layers=2):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


def pickled(model, path):
    torch.save(model.state_dict(), path)
    return path


def copied(model, path):
    """A safetensors file with both copies of the tied weight and no note of it, as naive writers make it."""
    write_checkpoint(path, {name: value.clone() for name, value in model.state_dict().items()})
    return path


def saved(model, path):
    model.save_pretrained(path)
    return path


WRITERS = [saved, pickled, copied]


def files(tmp_path, base_writer, expert_writer, **kind):
    suffix = {saved: "", pickled: ".bin", copied: ".safetensors"}
    base = base_writer(llama(0, **kind), tmp_path / f"base{suffix[base_writer]}")
    return base, expert_writer(llama(1, **kind), tmp_path / f"expert{suffix[expert_writer]}")


@pytest.mark.parametrize("expert_writer", WRITERS)
@pytest.mark.parametrize("base_writer", WRITERS)
def test_tied_weights_stored_in_one_input_and_left_out_in_another(tmp_path, base_writer, expert_writer):
    base, expert = files(tmp_path, base_writer, expert_writer)
    with open_checkpoint(base) as b, open_checkpoint(expert) as e:
        fit = fit_inputs(b, {"e": e})
        check_compatible(fit.base, fit.experts)
        assert set(fit.experts["e"]) == set(b)
        model = llama(1).state_dict()
        assert all(torch.equal(fit.experts["e"][name], model[name]) for name in b)
        if ("lm_head.weight" in b) != ("lm_head.weight" in e):
            assert any("lm_head.weight" in note for note in fit.notes)
        if "lm_head.weight" in b and "lm_head.weight" not in e:
            assert fit.base.tied == fit.experts["e"].tied == {"model.embed_tokens.weight": "lm_head.weight"}


def test_a_mixture_that_meets_a_dense_base_is_refused_at_once():
    """4608 strange names against 84; for 18000 looking for the nearest name, and a copy, of each took minutes."""
    shared = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(12) for part in "qkvo"]
    kinds = ("gate", "up", "down")
    dense = [f"model.layers.{layer}.mlp.{kind}_proj.weight" for layer in range(12) for kind in kinds]
    listed = [
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
        for layer in range(12)
        for expert in range(128)
        for kind in kinds
    ]
    tensors = [
        {**dict.fromkeys(shared, torch.zeros(2)), **dict.fromkeys(own, torch.zeros(3))} for own in (dense, listed)
    ]
    base, expert = (
        LazyStateDict("", {name: TensorEntry(one) for name, one in made.items()}, infos_of(made), {})
        for made in tensors
    )
    began = time.process_time()
    fit = fit_inputs(base, {"a": expert})
    with pytest.raises(MergeflowError, match=r"has 1536 tensors '.*experts\.\*\.up_proj.*unknown.*nearest is") as told:
        fit.check()
    assert time.process_time() - began < 5
    assert str(told.value).count("\n") < 12


def test_an_untied_head_is_not_taken_for_a_copy(tmp_path):
    base = saved(llama(0, tied=True), tmp_path / "base")
    expert = saved(llama(1, tied=False), tmp_path / "expert")
    with open_checkpoint(base) as b, open_checkpoint(expert) as e:
        fit = fit_inputs(b, {"e": e})
        with pytest.raises(MergeflowError, match=r"'lm_head.weight', unknown to the base"):
            check_compatible(fit.base, fit.experts)
    with open_checkpoint(expert) as b, open_checkpoint(base) as e:
        fit = fit_inputs(b, {"e": e})
        with pytest.raises(MergeflowError, match=r"lacks tensor 'lm_head.weight'"):
            check_compatible(fit.base, fit.experts)


@pytest.mark.parametrize("prefix", ["base_model.model.", "module.model_to_save."])
def test_a_constant_prefix_is_recognised_either_way_round(tmp_path, prefix):
    plain = saved(llama(0), tmp_path / "plain")
    wrapped = {f"{prefix}{name}": value for name, value in llama(1).state_dict().items()}
    write_checkpoint(tmp_path / "wrapped.safetensors", wrapped)
    with open_checkpoint(plain) as b, open_checkpoint(tmp_path / "wrapped.safetensors") as e:
        fit = fit_inputs(b, {"e": e})
        check_compatible(fit.base, fit.experts)
        assert f"without their prefix '{prefix}'" in fit.notes[0]
        assert torch.equal(fit.experts["e"]["model.norm.weight"], wrapped[f"{prefix}model.norm.weight"])
        back = fit_inputs(e, {"b": b})
        check_compatible(back.base, back.experts)
        assert f"with the prefix '{prefix}'" in back.notes[0]


def test_patterns_leave_tensors_as_the_base_has_them(tmp_path):
    base = saved(llama(0), tmp_path / "base")
    model = llama(1).state_dict()
    model["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    model["model.embed_tokens.weight"] = torch.zeros(44, 16)
    del model["lm_head.weight"]
    write_checkpoint(tmp_path / "e.safetensors", model)
    with open_checkpoint(base) as b, open_checkpoint(tmp_path / "e.safetensors") as e:
        with pytest.raises(MergeflowError, match="2 mismatches"):
            check_compatible(b, {"e": e})
        fit = fit_inputs(b, {"e": e}, ignore=["*.inv_freq", "*embed_tokens*"])
        assert fit.kept == {"model.embed_tokens.weight"}
        assert set(fit.experts["e"]) == set(b) - fit.kept
        fit = fit_inputs(b, {"e": e}, only=["*.mlp.*"])
        assert set(fit.experts["e"]) == {name for name in b if ".mlp." in name}
        assert fit.kept == {name for name in b if ".mlp." not in name}
        with pytest.raises(MergeflowError, match=r"pattern '\*\.inv_freqs' of `ignore` fits no tensor"):
            fit_inputs(b, {"e": e}, ignore=["*.inv_freqs"])


def test_what_an_expert_lacks_is_the_base_s_where_that_is_said(tmp_path):
    base = saved(llama(0, tied=False), tmp_path / "base")
    model = llama(1, tied=False).state_dict()
    del model["lm_head.weight"]
    write_checkpoint(tmp_path / "e.safetensors", model)
    with open_checkpoint(base) as b, open_checkpoint(tmp_path / "e.safetensors") as e:
        fit = fit_inputs(b, {"e": e}, missing="base")
        check_compatible(fit.base, fit.experts)
        assert torch.equal(fit.experts["e"]["lm_head.weight"], b["lm_head.weight"])
        assert fit.notes == ("'lm_head.weight', which 'e' lacks, is the base's",)


def test_mismatches_of_all_blocks_are_one_line(tmp_path):
    base = saved(llama(0, layers=3), tmp_path / "base")
    expert = saved(llama(1, layers=9), tmp_path / "expert")
    with open_checkpoint(base) as b, open_checkpoint(expert) as e:
        with pytest.raises(MergeflowError) as caught:
            check_compatible(b, {"e": e})
        count = len(set(e) - set(b))
        lines = str(caught.value).splitlines()
        assert f"{count} mismatches" in lines[0]
        assert len(lines) == 2 + len({pattern_of(name) for name in e if ".layers." in name})
        assert "has 6 tensors 'model.layers.*.input_layernorm.weight', unknown to the base" in str(caught.value)


def test_types_may_differ_but_not_their_kind():
    base = {"w": torch.zeros(2), "n": torch.tensor(1)}
    check_compatible(base, {"a": {"w": torch.zeros(2).bfloat16(), "n": torch.tensor(1)}})
    with pytest.raises(MergeflowError, match=r"has tensor 'w' of torch.int8, base has torch.float32"):
        check_compatible(base, {"a": {"w": torch.zeros(2).to(torch.int8), "n": torch.tensor(1)}})
