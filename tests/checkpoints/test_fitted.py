"""Inputs of everyday work fit their base: tied weights once or twice, prefixes, patterns, what is missing."""

import json
import time
from itertools import product

import pytest
import torch
from safetensors.torch import save_file

from mergeflow.checkpoints import check_compatible, open_checkpoint, write_checkpoint
from mergeflow.checkpoints.align_names import fit_inputs
from mergeflow.checkpoints.checks import infos_of, pattern_of
from mergeflow.checkpoints.reader import LazyStateDict, TensorEntry, view
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from tests.merging.tiny_models import tiny


def llama(seed, tied=True, layers=2):
    return tiny("llama", seed, tie_word_embeddings=tied, num_hidden_layers=layers)


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


def in_memory(tensors):
    return LazyStateDict("", {name: TensorEntry(tensor) for name, tensor in tensors.items()}, infos_of(tensors), {})


def test_a_mixture_that_meets_a_dense_base_is_refused_at_once():
    """4608 strange names against 84; for 18000 looking for the nearest name, and a copy, of each took minutes."""
    shared = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(12) for part in "qkvo"]
    kinds = [f"{kind}_proj.weight" for kind in ("gate", "up", "down")]
    dense = [f"model.layers.{layer}.mlp.{kind}" for layer in range(12) for kind in kinds]
    listed = [f"model.layers.{layer}.mlp.experts.{expert}.{kind}"
              for layer, expert, kind in product(range(12), range(128), kinds)]  # fmt: skip
    attention = dict.fromkeys(shared, torch.zeros(2))
    base, expert = (in_memory(attention | dict.fromkeys(names, torch.zeros(3))) for names in (dense, listed))
    began = time.process_time()
    fit = fit_inputs(base, {"a": expert})
    with pytest.raises(MergeflowError, match=r"has 1536 tensors '.*experts\.\*\.up_proj.*unknown.*near") as raised:
        fit.check()
    assert time.process_time() - began < 5
    assert str(raised.value).count("\n") < 12


def test_an_untied_head_is_not_taken_for_a_copy(tmp_path):
    base = saved(llama(0, tied=True), tmp_path / "base")
    expert = saved(llama(1, tied=False), tmp_path / "expert")
    for places in ((base, expert), (expert, base)):
        with open_checkpoint(places[0]) as b, open_checkpoint(places[1]) as e:
            fit = fit_inputs(b, {"e": e})
            check_compatible(fit.base, fit.experts)
            for state, tied in ((fit.base, places[0] == base), (fit.experts["e"], places[1] == base)):
                assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"]) == tied


@pytest.mark.parametrize("prefix", ["base_model.model.", "module.model_to_save."])
def test_a_constant_prefix_is_recognised_either_way_round(tmp_path, prefix):
    plain = saved(llama(0), tmp_path / "plain")
    wrapped = {f"{prefix}{name}": value for name, value in llama(1).state_dict().items()}
    write_checkpoint(tmp_path / "wrapped.safetensors", wrapped)
    with open_checkpoint(plain) as b, open_checkpoint(tmp_path / "wrapped.safetensors") as e:
        fit = fit_inputs(b, {"e": e})
        check_compatible(fit.base, fit.experts)
        assert f"without their prefix '{prefix.removeprefix('module.')}'" in fit.notes[0]
        assert torch.equal(fit.experts["e"]["model.norm.weight"], wrapped[f"{prefix}model.norm.weight"])
        back = fit_inputs(e, {"b": b})
        check_compatible(back.base, back.experts)
        assert f"with the prefix '{prefix.removeprefix('module.')}'" in back.notes[0]


def test_a_prefix_of_two_equal_towers_is_not_guessed():
    """A tower alone was taken for the first one, and `missing: base` gave the other."""
    alone = in_memory({"l1.weight": torch.ones(2, 2), "l2.weight": torch.ones(2, 2)})
    both = in_memory({f"{name}.{key}": value for name in ("text", "vision") for key, value in alone.items()})
    for base, expert in ((both, alone), (alone, both)):
        with pytest.raises(MergeflowError, match=r"prefix 'text\.' and as well with 'vision\.'"):
            fit_inputs(base, {"e": expert}, missing="base")


@pytest.mark.parametrize("patterns", [{"ignore": ["*"]}, {"only": ["*.bias"], "ignore": ["b.*"]}])
def test_patterns_that_leave_nothing_are_refused(patterns):
    state = in_memory({"a.weight": torch.ones(2), "b.bias": torch.ones(2)})
    with pytest.raises(MergeflowError, match="leave no tensor of the base to merge"):
        fit_inputs(state, {"e": state}, **patterns)


def test_patterns_leave_tensors_as_the_base_has_them(tmp_path):
    base = saved(llama(0), tmp_path / "base")
    model = llama(1).state_dict()
    model["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    model["model.embed_tokens.weight"] = torch.zeros(44, 32)
    del model["lm_head.weight"]
    e = in_memory(model)
    with open_checkpoint(base) as b:
        with pytest.raises(MergeflowError, match="2 mismatches"):
            check_compatible(b, {"e": e})
        fit = fit_inputs(b, {"e": e}, ignore=["*.inv_freq", "*embed_tokens*"])
        assert fit.base_only == {"model.embed_tokens.weight"}
        assert set(fit.experts["e"]) == set(b) - fit.base_only
        fit = fit_inputs(b, {"e": e}, only=["*.mlp.*"])
        assert set(fit.experts["e"]) == {name for name in b if ".mlp." in name}
        assert fit.base_only == {name for name in b if ".mlp." not in name}
        with pytest.raises(MergeflowError, match=r"pattern '\*\.inv_freqs' of `ignore` fits no tensor"):
            fit_inputs(b, {"e": e}, ignore=["*.inv_freqs"])


def test_what_an_expert_lacks_is_the_base_s_where_that_is_said():
    b, e = (in_memory(llama(seed, tied=False).state_dict()) for seed in (0, 1))
    fit = fit_inputs(b, {"e": view(e, [name for name in e if name != "lm_head.weight"])}, missing="base")
    check_compatible(fit.base, fit.experts)
    assert torch.equal(fit.experts["e"]["lm_head.weight"], b["lm_head.weight"])
    assert fit.notes == ("'lm_head.weight', which 'e' lacks, is the base's",)


def test_mismatches_of_all_blocks_are_one_line():
    b, e = (in_memory(llama(0, layers=layers).state_dict()) for layers in (3, 9))
    with pytest.raises(MergeflowError) as caught:
        check_compatible(b, {"e": e})
    lines = str(caught.value).splitlines()
    assert f"{len(set(e) - set(b))} mismatches" in lines[0]
    assert len(lines) == 2 + len({pattern_of(name) for name in e if ".layers." in name})
    assert "has 6 tensors 'model.layers.*.input_layernorm.weight', unknown to the base" in str(caught.value)


def test_types_may_differ_but_not_their_kind():
    base = {"w": torch.zeros(2), "n": torch.tensor(1)}
    check_compatible(base, {"a": {"w": torch.zeros(2).bfloat16(), "n": torch.tensor(1)}})
    with pytest.raises(MergeflowError, match=r"has tensor 'w' of torch.int8, base has torch.float32"):
        check_compatible(base, {"a": {"w": torch.zeros(2).to(torch.int8), "n": torch.tensor(1)}})


def test_equal_tensors_are_not_taken_for_tied():
    """Norms are equal before training: an expert that lacks one has not the other's."""
    b = in_memory({"h.0.norm.weight": torch.ones(4), "h.1.norm.weight": torch.ones(4), "w": torch.randn(4, 4)})
    e = in_memory({"h.0.norm.weight": torch.full((4,), 2.0), "w": torch.randn(4, 4)})
    with pytest.raises(MergeflowError, match=r"lacks tensor 'h\.1\.norm\.weight'"):
        fit_inputs(b, {"e": e}).check()
    with pytest.raises(MergeflowError, match=r"has tensor 'h\.1\.norm\.weight', unknown"):
        fit_inputs(e, {"b": b}).check()


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module.", "_fsdp_wrapped_module."]
)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_what_wrappers_put_into_names_is_taken_out(tmp_path, prefix, suffix):
    plain = {"visual.proj": torch.randn(2, 3), "w": torch.randn(2)}
    inner = {"visual._orig_mod.proj": plain["visual.proj"], "w": plain["w"]}
    for at, state in enumerate((plain, inner, {prefix + name: value for name, value in plain.items()})):
        path = tmp_path / f"{at}.{suffix}"
        torch.save(state, path) if suffix == "pt" else save_file(state, path)
        with open_checkpoint(path) as checkpoint:
            assert set(checkpoint) == set(plain)
            assert torch.equal(checkpoint["visual.proj"], plain["visual.proj"])
    base, *experts = (f"{tmp_path}/{at}.{suffix}" for at in (2, 0, 1))
    merge({"method": "average", "base": base, "experts": experts, "out": f"{tmp_path}/o.safetensors"})
    with open_checkpoint(tmp_path / "o.safetensors") as checkpoint:
        assert set(checkpoint) == set(plain)


def test_one_of_two_copies_in_a_file_is_left_out_by_ignore():
    """A moving average beside the weights had no way out: `ignore` was read after the prefixes."""
    b = in_memory({"a.weight": torch.zeros(2, 2), "b.weight": torch.zeros(2)})
    e = in_memory({f"{copy}.{name}": b[name] + by for copy, by in (("model", 1), ("ema", 5)) for name in b})
    with pytest.raises(MergeflowError, match=r"leave one out by `ignore: \['(ema|model)\.\*'\]`"):
        fit_inputs(b, {"e": e})
    assert fit_inputs(b, {"e": e}, ignore=["ema.*"]).experts["e"]["a.weight"].tolist() == [[1, 1], [1, 1]]


def test_torch_s_averaged_models_are_read_as_the_models_they_average(tmp_path):
    """The counter beside their names kept `module.` in all of them."""
    model = torch.nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "base.pt")
    torch.save(torch.optim.swa_utils.AveragedModel(model).state_dict(), tmp_path / "a.pt")
    plan = {"method": "average", "base": str(tmp_path / "base.pt"), "experts": [str(tmp_path / "a.pt")]}
    merge({**plan, "out": str(tmp_path / "o.safetensors")})
    with open_checkpoint(tmp_path / "o.safetensors") as checkpoint:
        assert set(checkpoint) == {"weight", "bias"}


def test_wrapped_shards_and_names_that_collide(tmp_path):
    for at in range(2):
        save_file({f"_orig_mod.w{at}": torch.ones(2)}, tmp_path / f"{at}.safetensors")
    index = {"weight_map": {f"_orig_mod.w{at}": f"{at}.safetensors" for at in range(2)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with open_checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint) == {"w0", "w1"}
        assert checkpoint.shards == (("w0",), ("w1",))
    save_file({"w": torch.ones(2), "_orig_mod.w": torch.ones(2)}, tmp_path / "twice.safetensors")
    with pytest.raises(MergeflowError, match=r"'_orig_mod\.w'.* both 'w'"):
        open_checkpoint(tmp_path / "twice.safetensors")


BUFFERS = {
    "embeddings.position_ids": torch.arange(4)[None],
    "layers.0.rotary_emb.inv_freq": torch.ones(2),
    "h.0.attn.masked_bias": torch.tensor(-1e4),
    "h.0.attn.bias": torch.ones(1, 1, 4, 4),
}


@pytest.mark.parametrize("buffer", BUFFERS)
def test_buffers_of_one_side_are_left_out_or_the_base_s(buffer):
    plain, more = in_memory({"w": torch.zeros(2)}), in_memory({"w": torch.ones(2), buffer: BUFFERS[buffer]})
    for b, e in ((plain, more), (more, plain)):
        fit = fit_inputs(b, {"e": e})
        fit.check()
        assert set(fit.experts["e"]) == set(b)
        assert f"'{buffer}', a buffer, of 'e' is" in fit.notes[0]
    biased = in_memory({"w": torch.ones(2), "h.0.attn.bias": torch.ones(4)})  # a bias is none
    with pytest.raises(MergeflowError, match="unknown to the base"):
        fit_inputs(plain, {"e": biased}).check()


@pytest.mark.parametrize(
    "parts",
    [
        ("weight_orig", "weight_mask"),  # pruned
        ("weight_orig", "weight_u", "weight_v"),  # spectral norm
        ("parametrizations.weight.original", "parametrizations.weight.0._u"),
        ("weight_hh_l0_g", "weight_hh_l0_v"),
    ],
)
def test_weights_that_are_stored_in_parts_are_noted(parts):
    """Masks of pruned weights and vectors of spectral norm were averaged without a word."""
    state = in_memory({f"{layer}.{part}": torch.ones(2) for part in parts for layer in "ab"})
    (note,) = fit_inputs(state, {"e": state}).notes
    assert note.startswith("parts of 2 weights with weight norm, spectral norm or pruning, such as 'a.weight")


def test_weight_norm_and_rows_of_new_tokens_are_told():
    state = {"conv.weight_g": torch.ones(2), "conv.weight_v": torch.ones(2, 2), "lm_head.weight": torch.ones(4, 2)}
    newer = {
        "conv.parametrizations.weight.original0": torch.ones(2),
        "conv.parametrizations.weight.original1": torch.ones(2, 2),
    }
    fit = fit_inputs(in_memory(state), {"e": in_memory({**newer, "lm_head.weight": torch.ones(6, 2)})})
    assert "parts of 1 weights with weight norm" in "".join(fit.notes)
    wanted = r"\A1 mismatch (?s:.*)\[6, 2\], base has \[4, 2\]; if its rows are of tokens, `tokenizer_so"
    with pytest.raises(MergeflowError, match=wanted):
        fit.check()


def test_eight_bit_floats_are_compared():
    table = torch.randn(4, 2).to(torch.float8_e4m3fn)
    base = in_memory({"lm_head.weight": table.clone(), "embed_tokens.weight": table})
    fit_inputs(base, {"e": in_memory({"embed_tokens.weight": table})}).check()
