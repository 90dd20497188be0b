"""A PEFT adapter made of a whole expert, on models of transformers: PEFT loads it and gives the expert's outputs."""

import ast
import json
import re
import shutil

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

from mergeflow.checkpoints import open_checkpoint, write_checkpoint
from mergeflow.commands.derived import add_commands
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, merge
from mergeflow.merging.adapters.configuration import loading_notes
from tests.command import invoke
from tests.merging.families import shrunk
from tests.merging.tiny_models import OTHERS, tiny

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

FAMILIES = (
    "llama",
    "qwen2",
    "gpt2",
    "gpt_neox",
    "bloom",
    "opt",
    "phi3",
    "t5",
    "bert",
    "roberta",
    "distilbert",
    "albert",
    "mixtral",
    "qwen2_moe",
    "deepseek_v2",
)


def saved(folder, name, **changes):
    """Save a base and an expert that differs in every parameter; return both models."""
    base, expert = tiny(name, **changes), tiny(name, **changes)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in expert.parameters():
            value.add_(0.05 * torch.randn(value.shape, generator=generator))
    base.save_pretrained(folder / "base")
    expert.save_pretrained(folder / "expert")
    return base, expert


def outputs(model, name):
    tokens = torch.arange(3, 15)[None]
    given = {"decoder_input_ids": tokens} if name in OTHERS else {}
    with torch.no_grad():
        return model(tokens, **given).logits


def extracted(folder, out="adapter", ignore=None, run=merge, **adapter):
    return run(
        {
            "method": "task_arithmetic",
            "args": {"scale": 1.0},
            "base": str(folder / "base"),
            "experts": {"e": str(folder / "expert")},
            "adapter": {"rank": 64, **adapter},
            "out": str(folder / out),
            "ignore": ignore,
        }
    )


def loaded(folder, base, out="adapter"):
    return peft.PeftModel.from_pretrained(type(base).from_pretrained(folder / "base"), folder / out).eval()


@pytest.mark.parametrize("embeddings", ["whole", "lora"])
@pytest.mark.parametrize("name", FAMILIES)
def test_at_full_rank_peft_gives_the_experts_outputs(tmp_path, name, embeddings):
    base, expert = saved(tmp_path, name)
    made = extracted(tmp_path, embeddings=embeddings)
    wanted = outputs(expert, name)
    assert (outputs(base, name) - wanted).abs().max() > 0.1
    torch.testing.assert_close(outputs(loaded(tmp_path, base), name), wanted, rtol=1e-4, atol=2e-5)
    assert "error" in made.notes[0]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "gpt2"])
def test_at_a_low_rank_the_weights_are_the_best_of_that_rank_and_the_error_is_told(tmp_path, name):
    base, expert = saved(tmp_path, name)
    extracted(tmp_path, rank=3, embeddings="lora")
    errors = json.loads((tmp_path / "adapter/mergeflow.json").read_text())["errors"]
    model = loaded(tmp_path, base).merge_and_unload()
    before, after, wanted = base.state_dict(), model.state_dict(), expert.state_dict()
    assert len(errors) >= 8
    for tensor, error in errors.items():
        change = (wanted[tensor] - before[tensor]).double()
        left, values, right = torch.linalg.svd(change, full_matrices=False)
        best = (left[:, :3] * values[:3]) @ right[:3]
        torch.testing.assert_close((after[tensor] - before[tensor]).double(), best, rtol=0, atol=3e-6)
        assert error == pytest.approx(float((change - best).norm() / change.norm()), rel=1e-4)


@pytest.mark.parametrize("name", ["vit", "dinov2", "whisper"])
def test_modules_are_named_as_transformers_has_them_in_memory(tmp_path, name):
    """A ViT's file says `encoder.layer.0.attention.attention.query`, the model `layers.0.attention.q_proj`."""
    base, expert = saved(tmp_path, name)
    extracted(tmp_path)
    model, inputs = loaded(tmp_path, base), {"pixel_values": torch.ones(1, 3, 16, 16)}
    if name == "whisper":
        inputs = {"input_features": torch.ones(1, 8, 32), "decoder_input_ids": torch.arange(6)[None]}
    assert model(**inputs).logits.isfinite().all()
    merged, wanted = model.merge_and_unload().state_dict(), expert.state_dict()
    assert all(torch.allclose(merged[key], value, atol=2e-6) for key, value in wanted.items())


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "bert"])
def test_a_merge_reads_the_adapter_back(tmp_path, name):
    _, expert = saved(tmp_path, name)
    extracted(tmp_path)
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(tmp_path / "base")}
    merge({**recipe, "experts": {"a": str(tmp_path / "adapter")}, "out": str(tmp_path / "again")})
    with open_checkpoint(tmp_path / "again") as again, open_checkpoint(tmp_path / "expert") as wanted:
        for tensor in wanted:
            torch.testing.assert_close(again[tensor], wanted[tensor], rtol=0, atol=2e-6)
    assert type(expert).from_pretrained(tmp_path / "again") is not None


def of_class(folder, name):
    """Save a small model of a class and an expert of other matrices, if it can be built; return both as loaded."""
    kind = getattr(transformers, name)
    try:
        config = kind.config_class.from_dict(shrunk(kind.config_class().to_dict()))
        with torch.device("meta"):
            if sum(value.numel() for value in kind(config).parameters()) > 3e6:
                return None
        torch.manual_seed(0)
        base = kind(config).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for value in base.parameters():
                value.add_(0.1 * torch.randn(value.shape, generator=generator))
            base.save_pretrained(folder / "base")
            for key, value in base.named_parameters():
                if value.ndim == 2 and key.endswith(".weight"):
                    value.add_(0.05 * torch.randn(value.shape, generator=generator))
            base.save_pretrained(folder / "expert")
        models = tuple(kind.from_pretrained(folder / which).eval() for which in ("base", "expert"))
        logits(models[0])
    except Exception:  # a configuration that does not shrink so, or a model of more inputs
        return None
    return models


def logits(model):
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        try:
            return model(input_ids=tokens).logits
        except ValueError:  # an encoder with a decoder
            return model(input_ids=tokens, decoder_input_ids=tokens).logits


def check_of_class(folder, base, expert, embeddings):
    """An adapter of full rank gives the expert's outputs, as PEFT loads it and once it is merged."""
    extracted(folder, rank=256, embeddings=embeddings)
    wanted = logits(expert)
    close = {"rtol": 1e-4, "atol": 3e-5 * float(wanted.abs().max())}
    torch.testing.assert_close(logits(loaded(folder, base)), wanted, **close)
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(folder / "base")}
    merge({**recipe, "experts": {"a": str(folder / "adapter")}, "out": str(folder / "again")})
    again = type(base).from_pretrained(folder / "again").eval()
    torch.testing.assert_close(logits(again), wanted, **close)


@pytest.mark.parametrize(
    ("name", "embeddings"),
    [
        ("BigBirdForMaskedLM", "whole"),  # a head of no table, whose bias is its module's
        ("RobertaForCausalLM", "lora"),
        ("MarianMTModel", "whole"),  # ties that its class's name does not tell
        ("CTRLLMHeadModel", "lora"),  # an embedding named as none
        ("FNetForMaskedLM", "lora"),  # a linear layer named as an embedding
        ("IBertForMaskedLM", "lora"),  # modules that PEFT does not adapt
        ("FalconMambaForCausalLM", "whole"),
        ("GitForCausalLM", "whole"),  # a head whose name ends those of others
        ("T5Gemma2ForConditionalGeneration", "whole"),  # ties beside the embedding
        ("MiniMaxForCausalLM", "whole"),  # experts that a file lists under another name, and memory stacks
        ("MiniMaxM2ForCausalLM", "lora"),
        ("DeepseekV4ForCausalLM", "whole"),
    ],
)
def test_modules_and_ties_are_those_of_the_class(tmp_path, name, embeddings):
    check_of_class(tmp_path, *of_class(tmp_path, name), embeddings)


def test_a_linear_layer_of_a_class_of_its_own_gets_factors(tmp_path):
    base, expert = saved(tmp_path, "falcon")
    extracted(tmp_path)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"} <= set(config["target_modules"])
    close = {"rtol": 1e-4, "atol": 2e-5}
    torch.testing.assert_close(outputs(loaded(tmp_path, base), "falcon"), outputs(expert, "falcon"), **close)


def test_a_part_of_a_model_stores_its_weights_as_its_own_type(tmp_path):
    encoder, decoder = (tiny(name, add_cross_attention=name == "gpt2").config for name in ("vit", "gpt2"))
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    for seed, name in enumerate(("base", "expert")):
        torch.manual_seed(seed)
        transformers.VisionEncoderDecoderModel(config).save_pretrained(tmp_path / name)
    base, expert = (transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / n) for n in ("base", "expert"))
    extracted(tmp_path)
    given = {"pixel_values": torch.ones(1, 3, 16, 16), "decoder_input_ids": torch.arange(6)[None]}
    got, wanted = (model.eval()(**given).logits for model in (loaded(tmp_path, base), expert))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=2e-5)


def test_a_refusal_of_experts_names_patterns_that_leave_them_out(tmp_path):
    assert of_class(tmp_path, "JetMoeForCausalLM")
    with pytest.raises(MergeflowError, match="experts of a mixture that no adapter can hold") as error:
        extracted(tmp_path)
    assert "install" not in str(error.value)
    patterns = re.search(r"ignore: (\[.*\])", str(error.value))
    extracted(tmp_path, ignore=ast.literal_eval(patterns[1]))


def test_weights_that_a_file_fuses_are_refused_with_the_way_out(tmp_path):
    models = of_class(tmp_path, "GteForMaskedLM")
    with pytest.raises(MergeflowError, match=r"qkv_proj\.weight' are other ones in.*save_original_format=False"):
        extracted(tmp_path)
    for folder, model in zip(("base", "expert"), models, strict=True):
        model.save_pretrained(tmp_path / folder, save_original_format=False)
    check_of_class(tmp_path, *models, "whole")


LANGUAGE = [
    name
    for names in (
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    for entry in names.values()
    for name in ([entry] if isinstance(entry, str) else entry)
]
# PEFT passes over `gate_proj` and others of Beam; Kosmos-2.5 takes an embedding's weight, past what PEFT adds to it.
UNLIKE = {"BeamForCausalLM", "Kosmos2_5ForConditionalGeneration"}


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted({*LANGUAGE} - UNLIKE))
def test_every_class_of_language_models(tmp_path, name):
    models = of_class(tmp_path, name)
    if models is None:
        pytest.skip("cannot be built small")
    try:
        extracted(tmp_path)
    except MergeflowError:
        with pytest.raises(
            MergeflowError,
            match=r"no adapter can hold|part of an adapter|are other ones in|none of the",
        ):
            extracted(tmp_path)
        return
    shutil.rmtree(tmp_path / "adapter")
    check_of_class(tmp_path, *models, "whole")


def test_ranks_by_pattern_and_by_error(tmp_path):
    base, _ = saved(tmp_path, "llama")
    extracted(tmp_path, "patterns", rank=4, ranks={"*.mlp.*": 2, "*.q_proj.*": 8})
    config = json.loads((tmp_path / "patterns/adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 2 or config["r"] == 4
    model = loaded(tmp_path, base, "patterns")
    ranks = {
        module.rpartition(".")[2]: layer.r["default"] for module, layer in model.named_modules() if hasattr(layer, "r")
    }
    wanted = {"q_proj": 8, "k_proj": 4, "v_proj": 4, "o_proj": 4, "gate_proj": 2, "up_proj": 2, "down_proj": 2}
    assert ranks == wanted
    assert config["rank_pattern"] == config["alpha_pattern"]
    extracted(tmp_path, "error", rank=64, error=0.5)
    errors = json.loads((tmp_path / "error/mergeflow.json").read_text())["errors"]
    assert all(0.3 < error <= 0.5 for error in errors.values())


def test_tables_and_matrices_of_an_unknown_class_are_not_taken_for_each_other_without_a_word(tmp_path):
    """An embedding got the factors of a linear layer, over which PEFT passes."""
    net = nn.ModuleDict({"tok": nn.Embedding(20, 8), "turn": nn.Linear(8, 8)})
    for name in ("base", "e"):
        torch.manual_seed(len(name))
        write_checkpoint(
            tmp_path / f"{name}.safetensors", {k: torch.randn_like(v) for k, v in net.state_dict().items()}
        )
    plan = {"method": "task_arithmetic", "args": {"scale": 1.0}, "experts": {"e": f"{tmp_path}/e.safetensors"}}
    plan |= {"base": f"{tmp_path}/base.safetensors", "out": f"{tmp_path}/out", "adapter": {"rank": 8}}
    made = merge(plan)
    assert "class is unknown, 1 such as 'turn', are taken for linear" in made.notes[-1]
    config = peft.LoraConfig.from_pretrained(made.path)
    assert (config.target_modules, config.modules_to_save) == ({"turn"}, ["tok"])


def test_what_did_not_change_is_not_stored_and_nothing_is_an_error(tmp_path):
    base = tiny("llama")
    base.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        base.model.layers[1].mlp.up_proj.weight[0] += 1
    base.save_pretrained(tmp_path / "expert")
    extracted(tmp_path, rank=2)
    with open_checkpoint(tmp_path / "adapter") as adapter:
        assert list(adapter) == ["model.layers.1.mlp.up_proj.weight"]
        assert adapter["model.layers.1.mlp.up_proj.weight"][1:].abs().max() < 1e-6
    (tmp_path / "expert").rename(tmp_path / "other")
    tiny("llama").save_pretrained(tmp_path / "expert")
    with pytest.raises(MergeflowError, match="nothing for an adapter to hold"):
        extracted(tmp_path, "none")
    assert not (tmp_path / "none").exists()


def test_biases_of_adapted_modules_go_with_them(tmp_path):
    base, expert = saved(tmp_path, "qwen2")
    extracted(tmp_path)
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["bias"] == "lora_only"
    merged = loaded(tmp_path, base).merge_and_unload().state_dict()
    name = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(merged[name], expert.state_dict()[name])


def test_what_no_adapter_can_hold_is_refused_with_the_way_out(tmp_path):
    saved(tmp_path, "mamba")
    with pytest.raises(MergeflowError, match=r"mixer.A_log.*`ignore: \[.*\]`") as refused:
        extracted(tmp_path)
    assert not (tmp_path / "adapter").exists()
    extracted(tmp_path, ignore=ast.literal_eval(str(refused.value).partition("ignore: ")[2].partition("`")[0]))
    saved(tmp_path, "dbrx")
    for run in (check_recipe, merge):
        with pytest.raises(MergeflowError, match="experts of a mixture that no adapter can hold"):
            extracted(tmp_path, run=run)
    saved(tmp_path, "gpt_oss")
    with pytest.raises(MergeflowError, match=r"4 tensors .*biases of stacked experts.*ignore: \['\*experts\*bias'\]"):
        extracted(tmp_path)
    extracted(tmp_path, ignore=["*experts*bias", "*sinks"])
    saved(tmp_path, "siglip")
    with pytest.raises(
        MergeflowError, match=r"^3 changed .*: \['logit_bias', 'logit_scale', 'vision_model\.head\.probe'\]`"
    ):
        extracted(tmp_path)


def test_a_pattern_of_ranks_that_fits_no_matrix_is_refused(tmp_path):
    saved(tmp_path, "llama")
    with pytest.raises(MergeflowError, match=r"--rank-of.*fits '\*\.nope\.\*'\. Matrices are such as '.*\.weight'"):
        extracted(tmp_path, ranks={"*.mlp.*": 2, "*.nope.*": 3})
    with pytest.raises(MergeflowError, match="fits '"):
        extracted(tmp_path, ranks={"*.nope.*": 3}, run=check_recipe)
    assert not (tmp_path / "adapter").exists()
    saved(tmp_path, "mixtral")
    extracted(tmp_path, ranks={"*gate_up_proj[[]0]*": 3})


def test_an_adapter_without_factors_is_refused_since_peft_loads_none(tmp_path):
    """Of a net of convolutions everything would be stored whole."""
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "expert"):
        state = {
            "conv.weight": torch.randn(4, 3, 3, 3, generator=generator),
            "norm.weight": torch.randn(4, generator=generator),
        }
        write_checkpoint(tmp_path / f"{name}/model.safetensors", state)
    with pytest.raises(MergeflowError, match=r"none of the 2 changed tensors, such as 'conv\.weight'.*vector extract"):
        extracted(tmp_path)
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"adapter": {"rank": 0}}, "adapter.rank"),
        ({"adapter": {"rank": 4, "eror": 1}}, "did you mean 'error'"),
        ({"adapter": "4"}, "adapter"),
        ({"out": "a.safetensors"}, "an adapter is a folder"),
        ({"shard_size": "5GB"}, "an adapter is one file"),
    ],
)
def test_bad_options_are_one_message(tmp_path, change, message):
    tiny("llama").save_pretrained(tmp_path / "base")
    place = str(tmp_path / "base")
    recipe = {"method": "average", "base": place, "experts": {"e": place}, "adapter": 4}
    with pytest.raises(MergeflowError, match=message):
        merge({**recipe, "out": str(tmp_path / "out"), **change})


@pytest.mark.parametrize("columns", [32, 31])
def test_only_tables_of_another_vocabulary_may_have_another_size_than_peft_expects(columns):
    """Every "size mismatch" was taken for a table that is resized before the adapter is loaded."""
    model, key = tiny("llama"), "base_model.model.model.layers.0.self_attn.q_proj"
    table = "base_model.model.model.embed_tokens.weight"
    adapter = {"r": 2, "target_modules": ["layers.0.self_attn.q_proj"], "modules_to_save": ["embed_tokens"]}
    width = model.config.hidden_size
    shapes = {f"{key}.lora_A.weight": (2, width * columns // 32), f"{key}.lora_B.weight": (width, 2)}
    shapes[table] = (model.config.vocab_size + 3, width)
    config = model.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    notes = loading_notes(config, adapter, shapes, [table])
    assert bool(notes) == (columns == 31)
    assert not notes or "size mismatch for base_model.model.model.layers.0.self_attn.q_proj.lora_A" in notes[0]
    assert loading_notes(config, adapter, shapes, [])


def test_the_command_writes_the_folder_and_tells_the_error_by_layer(tmp_path):
    base, _ = saved(tmp_path, "gpt2")
    places = [str(tmp_path / name) for name in ("base", "expert")]
    options = ["--out", str(tmp_path / "small"), "--rank", "2", "--rank-of", "*.mlp.*=3", "--dtype", "bfloat16"]
    done = invoke(add_commands, "extract-lora", *places, *options)
    assert done.exit_code == 0, done.output
    assert "transformer.h.1 " in done.output
    assert "rank 2 to 3" in done.output
    assert "stored whole" in done.output
    assert loaded(tmp_path, base, "small")
    for rank in ("two", "0"):
        bad = invoke(add_commands, "extract-lora", *places, "--out", "x", "--rank-of", f"*={rank}")
        assert isinstance(bad.exception, MergeflowError)
        assert f"--rank-of '*={rank}': expected a whole number of at least 1" in str(bad.exception)


def test_what_peft_does_not_load_is_noted_with_its_reason(tmp_path):
    """Position tables of Reformer are a list of parameters, which PEFT does not keep whole."""
    sizes = {"attention_head_size": 8, "hidden_size": 16, "num_attention_heads": 2, "feed_forward_size": 24}
    axes = {"axial_pos_embds_dim": (8, 8), "axial_pos_shape": (4, 4), "max_position_embeddings": 16}
    config = transformers.ReformerConfig(**sizes, **axes, attn_layers=["local"], vocab_size=40, is_decoder=True)
    base, expert = transformers.ReformerModelWithLMHead(config), transformers.ReformerModelWithLMHead(config)
    base.save_pretrained(tmp_path / "base")
    expert.save_pretrained(tmp_path / "expert")
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(tmp_path / "base"), "adapter": 64}
    values = {**recipe, "experts": {"a": str(tmp_path / "expert")}, "out": str(tmp_path / "out")}
    made = merge({**values, "out": str(tmp_path / "whole")})
    (note,) = (note for note in made.notes if "PEFT" in note)
    assert re.search(r"does not load this adapter into Reformer.*ParameterList", note)
    made = merge({**values, "ignore": ["*position_embeddings*"]})
    assert not any("PEFT" in note for note in made.notes)
    loaded = peft.PeftModel.from_pretrained(
        transformers.ReformerModelWithLMHead.from_pretrained(tmp_path / "base"), tmp_path / "out"
    )
    merged, wanted = loaded.merge_and_unload().state_dict(), expert.state_dict()
    for name, value in wanted.items():
        if "position_embeddings" not in name:
            torch.testing.assert_close(merged[name], value, rtol=1e-4, atol=1e-5)
