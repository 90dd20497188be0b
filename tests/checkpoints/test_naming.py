"""Experts of a mixture as transformers 4 lists them and transformers 5 fuses them: files of both are merged alike."""

from functools import partial

import pytest
import torch

from mergeflow.checkpoints import open_checkpoint
from mergeflow.checkpoints.align_names import fit_inputs
from mergeflow.checkpoints.names import loaded_name
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, merge
from tests.merging.families import built
from tests.merging.tiny_models import tiny

RENAMED = ("gpt_neox", "vit", "dinov2", "beit", "swin", "clip", "siglip", "bert", "wav2vec2", "llama")
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "deepseek_v3", "jamba", "granitemoe")
pytestmark = pytest.mark.filterwarnings("ignore")


def saved(folder, make):
    """A base and an expert, each as transformers writes its file (mixtures of version 4: listed) and as in memory."""
    for kind, seed in (("base", 0), ("expert", 1)):
        model = make(seed)
        model.save_pretrained(folder / f"{kind}-listed")
        model.save_pretrained(folder / f"{kind}-fused", save_original_format=False)


@pytest.mark.parametrize("name", [*MIXTURES, *RENAMED])
def test_an_expert_of_either_layout_fits_a_base_of_either(tmp_path, name):
    saved(tmp_path, partial(tiny, name))
    for ours, other in (("listed", "fused"), ("fused", "listed")):
        with (
            open_checkpoint(tmp_path / f"base-{ours}") as base,
            open_checkpoint(tmp_path / f"expert-{ours}") as same,
            open_checkpoint(tmp_path / f"expert-{other}") as turned,
        ):
            assert name in RENAMED or set(same) != set(turned)
            fit = fit_inputs(base, {"e": turned})
            fit.check()
            assert set(fit.experts["e"]) == set(same)
            assert all(torch.equal(fit.experts["e"][tensor], same[tensor]) for tensor in same)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "cart"])
def test_a_merge_of_both_layouts_is_that_of_one(tmp_path, method):
    saved(tmp_path, partial(tiny, "mixtral"))
    expert = tmp_path / "expert-listed", tmp_path / "expert-fused"
    recipe = {"method": method, "base": str(tmp_path / "base-listed")}
    mixed = {**recipe, "experts": {"a": str(expert[1]), "b": str(tmp_path / "base-fused")}}
    plain = {**recipe, "experts": {"a": str(expert[0]), "b": str(tmp_path / "base-listed")}}
    merged, wanted = (
        merge({**values, "out": str(tmp_path / name)}) for values, name in ((mixed, "mixed"), (plain, "plain"))
    )
    assert merged.fingerprint == wanted.fingerprint
    assert "tensors of 'a' are read as" in "\n".join(check_recipe(mixed).lines())
    model = type(tiny("mixtral")).from_pretrained(tmp_path / "mixed")
    with open_checkpoint(tmp_path / "plain") as state:
        weight = model.state_dict()["model.layers.1.mlp.experts.gate_up_proj"][2, :48]
        assert torch.equal(weight, state["model.layers.1.block_sparse_moe.experts.2.w1.weight"])


def test_an_incomplete_mixture_is_refused(tmp_path):
    saved(tmp_path, partial(tiny, "mixtral"))
    with open_checkpoint(tmp_path / "base-fused") as base, open_checkpoint(tmp_path / "expert-listed") as listed:
        lost = "model.layers.0.block_sparse_moe.experts.3.w3.weight"
        del listed.infos[lost], listed.entries[lost]
        with pytest.raises(MergeflowError, match=r"lacks tensor 'model.layers.0.mlp.experts.gate_up_proj'"):
            fit_inputs(base, {"e": listed}).check()


@pytest.mark.parametrize("name", [*MIXTURES, "gpt_neox", "llama"])
def test_names_in_memory_are_those_that_transformers_has(tmp_path, name):
    model = tiny(name)
    model.save_pretrained(tmp_path)
    config, loaded = model.config.to_dict(), set(model.state_dict())
    with open_checkpoint(tmp_path) as state:
        plain = [tensor for tensor in state if ".experts." not in tensor]
        assert {loaded_name(config, tensor) for tensor in plain} <= loaded
        assert all(loaded_name(config, tensor) == tensor for tensor in loaded)


CONVERTED = ("nemotron_h", "nomic_bert", "radio", "gte", "olmo_hybrid", "inkling2_text")


@pytest.mark.slow
@pytest.mark.parametrize("family", CONVERTED)
def test_what_transformers_converts_fits_either_way_round(tmp_path, family):
    """Fused weights, transposed and interleaved stacks: a file has them otherwise than the model in memory."""
    saved(tmp_path, partial(built, family))
    merged = {}
    for ours, other in (("listed", "fused"), ("fused", "listed")):
        for expert in (ours, other):
            experts = {"e": str(tmp_path / f"expert-{expert}"), "b": str(tmp_path / f"base-{other}")}
            made = merge({"method": "ties", "args": {"keep": 0.3}, "base": str(tmp_path / f"base-{ours}"),
                          "experts": experts, "out": str(tmp_path / f"{ours}-{expert}")})  # fmt: skip
            merged[ours, expert] = made.fingerprint
        assert merged[ours, ours] == merged[ours, other]
