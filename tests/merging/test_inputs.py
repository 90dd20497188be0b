"""Merges of everyday inputs, on files of transformers: tied weights, patterns, no base, shards as the base has them."""

import json
import os

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, make_recipe, merge
from mergeflow.merging.compression.compressor import configure_compressor
from mergeflow.merging.compression.suite_file import compress
from mergeflow.merging.files.vectors import extract
from tests.checkpoints.test_fitted import WRITERS, copied, llama, pickled, saved
from tests.merging.helpers import recipe

transformers = pytest.importorskip("transformers")


def three(tmp_path, *writers, **kind):
    """A base and two experts, each written in its way; their paths and state dicts."""
    suffix = {saved: "", pickled: ".bin", copied: ".safetensors"}
    models = [llama(seed, **kind) for seed in range(3)]
    paths = [
        str(writer(model, tmp_path / f"m{index}{suffix[writer]}"))
        for index, (model, writer) in enumerate(zip(models, writers, strict=True))
    ]
    return paths, [model.state_dict() for model in models]


@pytest.mark.parametrize("base_writer", WRITERS)
def test_tied_models_merge_and_load_whatever_way_they_are_stored(tmp_path, base_writer):
    (base, *experts), states = three(tmp_path, base_writer, *[w for w in WRITERS if w is not base_writer])
    made = merge({"method": "dare", "base": base, "experts": experts, "out": str(tmp_path / "out")})
    (tmp_path / "out" / "config.json").write_text(llama(0).config.to_json_string())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loaded[1]["missing_keys"]
    assert not loaded[1]["unexpected_keys"]
    result = loaded[0].state_dict()
    assert torch.equal(result["lm_head.weight"], result["model.embed_tokens.weight"])
    moved = result["model.embed_tokens.weight"] - states[0]["model.embed_tokens.weight"]
    assert float(moved.abs().sum()) > 0
    assert made.fingerprint


def test_what_is_ignored_is_the_base_s_to_the_bit_and_counts_in_no_threshold(tmp_path):
    (base, *experts), states = three(tmp_path, saved, saved, saved)
    plan = {"method": "ties", "base": base, "experts": experts, "args": {"keep": 0.3}}
    merge({**plan, "only": ["*.mlp.*"], "out": str(tmp_path / "only.safetensors")})
    names = [name for name in states[0] if ".mlp." in name]
    for index, state in enumerate(states):
        write_checkpoint(tmp_path / f"part{index}.safetensors", {name: state[name] for name in names})
    parts = [str(tmp_path / f"part{index}.safetensors") for index in range(3)]
    merge({**plan, "base": parts[0], "experts": parts[1:], "out": str(tmp_path / "part.safetensors")})
    with open_checkpoint(tmp_path / "only.safetensors") as only, open_checkpoint(tmp_path / "part.safetensors") as part:
        for name in only:
            assert torch.equal(only[name], part[name] if name in part else states[0][name])
    ignored = merge({**plan, "ignore": ["*.mlp.*"], "dtype": "bfloat16", "out": str(tmp_path / "i.safetensors")})
    with open_checkpoint(ignored.path) as checkpoint:
        assert torch.equal(checkpoint[names[0]], states[0][names[0]].bfloat16())
        assert not torch.equal(checkpoint["model.norm.weight"], checkpoint[names[0]])


def test_a_spectral_method_knows_what_is_left_to_it(tmp_path):
    (base, *experts), _ = three(tmp_path, saved, saved, saved)
    plan = {"method": "cart", "base": base, "experts": experts, "out": str(tmp_path / "out")}
    whole, part = check_recipe(make_recipe(plan)), check_recipe(make_recipe({**plan, "only": ["*.self_attn.*"]}))
    assert 0 < part.treatment.count < whole.treatment.count


@pytest.mark.parametrize(
    ("method", "args"),
    [
        ("average", {}),
        ("average", {"normalize": False}),
        ("slerp", {"t": 0.3}),
        ("karcher", {}),
        ("cart", {"scale": 0.7}),
        ("nuslerp", {"on": "weights"}),
        ("multislerp", {"on": "weights"}),
    ],
)
def test_methods_that_need_no_base(tmp_path, method, args):
    (base, *experts), _ = three(tmp_path, saved, saved, saved)
    plan = {"method": method, "args": args, "experts": experts}
    with_base = merge({**plan, "base": base, "out": str(tmp_path / "with.safetensors")})
    without = merge({**plan, "out": str(tmp_path / "without.safetensors")})
    with open_checkpoint(with_base.path) as a, open_checkpoint(without.path) as b:
        assert list(a) == list(b)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)
    again = json.loads(without.recipe.record())
    assert "base" not in again
    assert merge({**again, "out": str(tmp_path / "again.safetensors")}).fingerprint == without.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "ties"}, "base: is missing, and the result of 'ties' depends on it"),
        ({"method": "average", "args": {"scale": 0.5}}, "the result of 'average' at this scale depends on it"),
        ({"method": "average", "experts": {}, "task_vectors": ["a"]}, "base: is missing, and task vectors"),
    ],
)
def test_a_base_that_is_needed(tmp_path, change, message):
    with pytest.raises(MergeflowError, match=message):
        recipe(tmp_path, **{"base": None, **change})


def test_a_folder_has_the_base_s_shards_unless_the_recipe_says_otherwise(tmp_path):
    models = [llama(seed) for seed in range(2)]
    for index, model in enumerate(models):
        model.save_pretrained(tmp_path / f"m{index}", max_shard_size="4KB")
    shards = sorted(path.name for path in (tmp_path / "m0").glob("model-*"))
    assert len(shards) > 2
    plan = {"method": "average", "base": str(tmp_path / "m0"), "experts": [str(tmp_path / "m1")]}
    made = merge({**plan, "out": str(tmp_path / "out")})
    assert sorted(path.name for path in made.path.glob("model-*")) == shards
    first, second = (json.loads((tmp_path / p / "model.safetensors.index.json").read_text()) for p in ("m0", "out"))
    assert second["weight_map"] == first["weight_map"]
    whole = merge({**plan, "out": str(tmp_path / "one"), "shard_size": "1GB"})
    assert (whole.path / "model.safetensors").is_file()
    assert whole.fingerprint == made.fingerprint


@pytest.mark.filterwarnings("ignore")
def test_a_dora_in_a_merge_is_peft_s_own(tmp_path):
    pytest.importorskip("peft")
    from mergeflow.merging import configure, prepare
    from tests.checkpoints import test_peft

    expected = test_peft.trained(test_peft.llama(), tmp_path, target_modules=["q_proj", "lm_head"], use_dora=True)
    plan = {"method": "average", "base": str(tmp_path / "base"), "experts": [str(tmp_path / "adapter")]}
    made = merge({**plan, "out": str(tmp_path / "out.safetensors")})
    with open_checkpoint(tmp_path / "base") as base, open_checkpoint(tmp_path / "adapter") as adapter:
        in_memory = prepare(configure("average"), {name: base[name] for name in base}, {"a": adapter}).at(1)
    with open_checkpoint(made.path) as checkpoint:
        for name in checkpoint:
            torch.testing.assert_close(checkpoint[name], expected[name], rtol=1e-5, atol=1e-6)
            assert torch.equal(in_memory[name], checkpoint[name])


def test_an_expert_that_is_another_one_once_more_is_warned_of(tmp_path):
    """A file named twice, a link to it, or equal weights elsewhere had twice the weight, without a word."""
    (base, a, b), _ = three(tmp_path, saved, saved, copied)
    with open_checkpoint(a) as state:
        write_checkpoint(tmp_path / "copy.safetensors", dict(state))
    (tmp_path / "link").symlink_to(a)
    plan = {"method": "task_arithmetic", "base": base, "out": str(tmp_path / "out.safetensors")}

    def warned(command, **experts):
        return [line for line in command({**plan, "experts": experts}).warnings if "the same" in line]

    assert not warned(merge, a=a, b=b)
    (line,) = warned(merge, a=a, link=f"{tmp_path}/link", b=b)
    assert line == "the experts 'a', 'link' are the same, which counts as often as it is named"
    assert warned(check_recipe, a=a, link=f"{tmp_path}/link") == [line]
    assert "'a', 'copy'" in warned(merge, a=a, b=b, copy=f"{tmp_path}/copy.safetensors")[0]


def test_complex_numbers_are_the_base_s_and_refused_where_they_differ(tmp_path):
    for name, change in (("base", 0), ("a", 1)):
        frequencies = torch.ones(3, dtype=torch.complex64)
        write_checkpoint(tmp_path / f"{name}.safetensors", {"w": torch.full((2,), float(change)), "f": frequencies})
    write_checkpoint(tmp_path / "b.safetensors", {"w": torch.ones(2), "f": 2 * frequencies})
    plan = {"method": "average", "base": f"{tmp_path}/base.safetensors", "out": str(tmp_path / "out.safetensors")}
    merge({**plan, "experts": [f"{tmp_path}/a.safetensors"]})
    with open_checkpoint(tmp_path / "out.safetensors") as out:
        assert (out["w"].tolist(), out["f"].tolist()) == ([1, 1], frequencies.tolist())
    with pytest.raises(MergeflowError, match=r"'f' \[3\] holds complex numbers that differ between the base and 'b'"):
        merge({**plan, "experts": [f"{tmp_path}/b.safetensors"]})
    with pytest.raises(MergeflowError, match=r"complex numbers that differ between the base and '.*b\.safetensors'"):
        extract(tmp_path / "base.safetensors", tmp_path / "b.safetensors", tmp_path / "vector.safetensors")
    merge({**plan, "experts": [f"{tmp_path}/b.safetensors"], "ignore": ["f"]})


FACTORS = ("lora_A.weight", "lora_down.weight", "lora.up.weight", "hada_w1_a", "lokr_w2", "oft_blocks", "vera_lambda_d")
FACTORS = (*FACTORS, "lora_a", "lora_b.weight", "qkv_lora1.down.weight", "a1.weight")  # of MLX, torchtune, XLabs, GLoRA


@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("base", ["base", "a"])
def test_factors_of_an_adapter_alone_are_told_as_such(tmp_path, name, base):
    """Two files of factors have the same names: their means would be no adapter of the mean change."""
    write_checkpoint(tmp_path / "base.safetensors", {"w": torch.ones(2, 2)})
    for file in ("a", "b"):
        write_checkpoint(tmp_path / f"{file}.safetensors", {f"lora_unet_w.{name}": torch.ones(2, 2)})
    plan = {"method": "average", "base": f"{tmp_path}/{base}.safetensors", "experts": [f"{tmp_path}/b.safetensors"]}
    with pytest.raises(MergeflowError, match=r"factors of an adapter.*its adapter_config\.json"):
        merge({**plan, "out": str(tmp_path / "out.safetensors")})


def test_factors_of_a_model_s_weights_are_merged_with_a_word(tmp_path):
    state = {f"q.{part}.weight": torch.ones(2, 2) for part in ("base_layer", "lora_A.speech", "lora_B.speech")}
    for file in ("a", "b"):
        write_checkpoint(tmp_path / f"{file}.safetensors", state)
    plan = {"method": "average", "experts": [f"{tmp_path}/a.safetensors", f"{tmp_path}/b.safetensors"]}
    made = merge({**plan, "out": str(tmp_path / "out.safetensors")})
    assert "parts of 1 weights with factors of adapters, such as 'q', are merged apart" in made.notes[0]


def test_weights_that_sum_to_0_in_a_tensor_and_nan_without_a_base_name_what_is_wrong(tmp_path):
    for place, value in (("a", 1.0), ("b", 2.0), ("broken", float("nan"))):
        write_checkpoint(tmp_path / f"{place}.safetensors", {"mlp": torch.full((2,), value), "w": torch.ones(2)})
    a, b, broken = (f"{tmp_path}/{place}.safetensors" for place in ("a", "b", "broken"))
    plan = {"method": "average", "out": str(tmp_path / "out.safetensors")}
    nothing = [{"filter": "mlp", "value": 0}, 1]
    with pytest.raises(
        MergeflowError, match="'mlp' of the result is NaN: where weights vary, their sum may be 0 in no"
    ):
        merge({**plan, "experts": {"a": a, "b": b}, "weights": {"a": nothing, "b": nothing}})
    with pytest.raises(MergeflowError, match="'broken' holds NaN or infinity in tensor 'mlp'"):
        merge({**plan, "experts": {"broken": broken, "a": a}})


@pytest.mark.parametrize("base", ["tied", "apart"])
@pytest.mark.parametrize("experts", [["apart"], ["tied", "apart"], ["tied"]])
def test_models_with_a_head_apart_merge_with_models_that_tie_it(tmp_path, base, experts):
    """They were refused as mismatches, whatever was tied, although a tied head is the embedding."""
    states = {}
    for seed, (kind, tied) in enumerate({"tied": True, "apart": False}.items()):
        model = llama(seed, tied)
        model.save_pretrained(tmp_path / kind)
        states[kind] = model.state_dict()
    paths = {f"e{index}": f"{tmp_path}/{kind}" for index, kind in enumerate(experts)}
    made = merge({"method": "average", "base": f"{tmp_path}/{base}", "experts": paths, "out": f"{tmp_path}/out"})
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(made.path, output_loading_info=True)
    assert not loading["missing_keys"] | loading["unexpected_keys"]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, sum(states[kind][name] for kind in experts) / len(experts))
    mixed = len({base, *experts}) > 1
    assert model.config.tie_word_embeddings is not (mixed or base == "apart")
    assert any("ties it to 'model.embed_tokens.weight': the result has both" in note for note in made.notes) == mixed


@pytest.mark.parametrize("key", ["ignore", "only"])
def test_a_tied_weight_that_is_merged_alone_is_untied(tmp_path, key):
    """The file had both, but said that they are tied: transformers 4, and the next merge, took one for the other."""
    (base, expert, _), _ = three(tmp_path, pickled, pickled, pickled)
    for place in (base, expert):
        os.renames(place, f"{place}.d/pytorch_model.bin")
        llama(0).config.save_pretrained(f"{place}.d")
    plan = {"method": "average", "base": f"{base}.d", "experts": [f"{expert}.d"], "out": str(tmp_path / "out")}
    made = merge({**plan, key: ["lm_head.weight"]})
    assert "which are tied, stays the base's" in made.notes[0]
    assert not made.warnings
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    with open_checkpoint(tmp_path / "out") as state:
        assert not state.tied
        assert not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", ["_flat_param", "layer._flat_param", "flat_param_0"])
def test_flat_weights_of_fsdp_are_refused(tmp_path, name):
    """Rows that hold many modules were trimmed, and interpolated on the sphere, as one tensor."""
    for file in ("a", "b"):
        torch.save({name: torch.randn(20)}, tmp_path / f"{file}.pt")
    with pytest.raises(MergeflowError, match=r"many modules in one row.*FULL_STATE_DICT"):
        merge({"method": "slerp", "experts": [f"{tmp_path}/a.pt", f"{tmp_path}/b.pt"], "out": f"{tmp_path}/out"})


@pytest.mark.parametrize("expert", [{"map": torch.tensor([2, 1, 0])}, {"mask": torch.tensor([True, True, False])}])
def test_maps_and_masks_that_differ_are_refused_and_counters_named(tmp_path, expert):
    """They stayed the base's without a word, in merges, task vectors and compressed suites."""
    base = {"w": torch.zeros(2), "map": torch.arange(3), "mask": torch.ones(3, dtype=torch.bool)}
    base |= {"steps": torch.tensor(1), "norm.num_batches_tracked": torch.tensor(1)}
    counted = {**base, "steps": torch.tensor(9), "norm.num_batches_tracked": torch.tensor(9)}
    for name, state in (("base", base), ("b", counted), ("a", {**base, **expert})):
        write_checkpoint(tmp_path / f"{name}.safetensors", state)
    a, b, origin = (f"{tmp_path}/{name}.safetensors" for name in ("a", "b", "base"))
    plan = {"method": "average", "base": origin, "out": str(tmp_path / "out.safetensors")}
    (warning,) = merge({**plan, "experts": [b]}).warnings
    assert warning == "integers: 'steps' of 'b' differs from the base's, which the result has"
    for refused in (
        lambda: merge({**plan, "experts": [a]}),
        lambda: extract(origin, a, tmp_path / "vector.safetensors"),
        lambda: compress(configure_compressor("emr"), open_checkpoint(origin), {"a": open_checkpoint(a)}),
    ):
        with pytest.raises(MergeflowError, match=f"'{next(iter(expert))}' \\[3\\] holds integers that differ"):
            refused()
    merge({**plan, "experts": [a], "ignore": ["ma*"]})
    with open_checkpoint(origin) as state, open_checkpoint(b) as other:  # in a compressed suite a scalar became [1]
        suite = compress(configure_compressor("cart_indexing"), state, {"b": other})
    assert suite.tensors["shared/steps/copy"].shape == ()


@pytest.mark.parametrize("name", ["rotary_emb.inv_freq", "rotary.cos_cached", "weight_mask"])
def test_tables_that_a_class_computes_are_the_same_or_refused(tmp_path, name):
    """Files without a config.json, of two rotary bases, gave the mean of both tables."""
    steps = torch.arange(0, 1, 0.125)
    tables = {theta: theta**-steps if "inv" in name else (theta**-steps).cos() for theta in (1e4, 1e6)}
    for file, table in (("base", tables[1e4]), ("rounded", tables[1e4].bfloat16()), ("other", tables[1e6])):
        write_checkpoint(tmp_path / f"{file}.safetensors", {"w": torch.ones(3), name: table})
    plan = {"method": "average", "base": f"{tmp_path}/base.safetensors", "out": str(tmp_path / "out.safetensors")}
    merge({**plan, "experts": [f"{tmp_path}/rounded.safetensors"]})
    other = {**plan, "experts": [f"{tmp_path}/other.safetensors"]}
    with pytest.raises(
        MergeflowError, match=rf"'{name}' is a table of settings or a mask, and that of 'other' is another"
    ):
        merge(other)
    merge({**other, "ignore": [name]})


@pytest.mark.parametrize("method", ["average", "ties"])
def test_weights_whose_data_are_elsewhere_are_refused(tmp_path, method):
    """A state dict of ZeRO-3 holds its large weights as [0], and small ones whole."""
    state = {"a.weight": torch.zeros(0), "norm.weight": torch.ones(2)}
    for file in ("base", "a", "b"):
        torch.save({"module": state}, tmp_path / f"{file}.pt")
    recipe = {"method": method, "base": f"{tmp_path}/base.pt", "experts": [f"{tmp_path}/a.pt", f"{tmp_path}/b.pt"]}
    with pytest.raises(MergeflowError, match=r"holds no data of 1 weights, such as 'a\.weight'.*zero_to_fp32"):
        merge({**recipe, "out": str(tmp_path / "out.safetensors")})
