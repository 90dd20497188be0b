"""Heads that are their embedding once more: found for transformers' classes, untied where an adapter parts the two."""

import json
from copy import deepcopy

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mergeflow.checkpoints import open_checkpoint
from mergeflow.checkpoints.names import copies_of_embedding
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, merge
from mergeflow.merging.files.vectors import extract
from tests.checkpoints.test_peft import added
from tests.merging.families import shrunk
from tests.merging.tiny_models import CAUSAL, MASKED, perturb, tiny

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = torch.arange(3, 15)[None]
TIED = sorted({*CAUSAL, *MASKED, "t5", "bart", "whisper"} - {"mamba2", "rwkv", "dbrx", "jamba", "deberta"})


@pytest.mark.parametrize("name", TIED)
def test_copies_are_those_that_transformers_ties(tmp_path, name):
    model = tiny(name, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as state:
        copies = copies_of_embedding(json.loads((tmp_path / "config.json").read_text()), state)
    tensors = model.state_dict()
    for copy, source in copies.items():
        assert tensors[copy].data_ptr() == tensors[source].data_ptr(), (copy, source)
    assert any(copy.endswith("weight") for copy in copies)


def small(name, **changes):
    """A small model of a class."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind(kind.config_class.from_dict(shrunk(kind.config_class().to_dict()) | changes))


def merged(folder, wrapped, spread):
    """Save an adapter with other weights, merge it into the base; the folder of the result."""
    perturb(wrapped, spread, 2)
    wrapped.save_pretrained(folder / "adapter")
    return added(folder)


def averaged(folder):
    """Give the base and an expert the same part; what config.json of the result says of ties."""
    recipe = {"method": "average", "base": str(folder / "base"), "experts": [str(folder / "expert")]}
    merge({**recipe, "out": str(folder / "out")})
    return json.loads((folder / "out/config.json").read_text())["tie_word_embeddings"]


def trained(folder, tied, **config):
    """Save a base and an adapter; return the logits that PEFT gives, without merging."""
    model = tiny("llama", tie_word_embeddings=tied)
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **config)
    wrapped = peft.get_peft_model(type(model).from_pretrained(folder / "base"), config)
    perturb(wrapped, 0.3, 2)
    wrapped.save_pretrained(folder / "adapter")
    return type(model), wrapped.eval()(TOKENS).logits


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [3, 5]},
    ],
    ids=["head", "embedding", "saved-head", "both", "lora", "head-and-tokens"],
)
@pytest.mark.parametrize("out", ["model", "adapter", "vector"])
def test_one_of_two_tied_weights_changed_by_an_adapter_stays_changed_alone(tmp_path, config, out):
    cls, wanted = trained(tmp_path, True, **config)
    recipe = {
        "method": "task_arithmetic",
        "args": {"scale": 1.0},
        "base": str(tmp_path / "base"),
        "experts": {"a": str(tmp_path / "adapter")},
    }
    assert "which are tied: the result has both" in "\n".join(check_recipe(recipe).lines())
    if out == "vector":
        extract(tmp_path / "base", tmp_path / "adapter", tmp_path / "a.safetensors")
        recipe["experts"] = {"a": str(tmp_path / "a.safetensors")}
    merge({**recipe, **({"adapter": 8} if out == "adapter" else {}), "out": str(tmp_path / "out")})
    if out == "adapter":
        loaded = peft.PeftModel.from_pretrained(cls.from_pretrained(tmp_path / "base"), tmp_path / "out")
    else:
        loaded = cls.from_pretrained(tmp_path / "out")
        assert loaded.config.tie_word_embeddings is False
    torch.testing.assert_close(loaded.eval()(TOKENS).logits, wanted, rtol=1e-4, atol=1e-4)


def test_an_adapter_of_tables_that_stay_tied_changes_both(tmp_path):
    """Factors of the embedding alone were written, which PEFT does not tie to the head: they are stored whole."""
    cls, wanted = trained(tmp_path, True, target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True)
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(tmp_path / "base"), "adapter": 8}
    merge({**recipe, "experts": {"a": str(tmp_path / "adapter")}, "out": str(tmp_path / "out")})
    loaded = peft.PeftModel.from_pretrained(cls.from_pretrained(tmp_path / "base"), tmp_path / "out").eval()
    torch.testing.assert_close(loaded(TOKENS).logits, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["T5", "LongT5", "Pop2Piano"])
def test_an_untied_t5_scales_as_before_also_where_an_older_file_does_not_say_it(tmp_path, name):
    model = small(f"{name}ForConditionalGeneration")
    model.save_pretrained(tmp_path / "base")
    kind = type(model)
    file = tmp_path / "base/config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: content[key] for key in content.keys() - {"scale_decoder_outputs"}}))
    wrapped = peft.get_peft_model(kind.from_pretrained(tmp_path / "base"), peft.LoraConfig(target_modules=["shared"]))
    out = merged(tmp_path, wrapped, 0.1)
    given = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
    output, wanted = kind.from_pretrained(out).eval()(**given), wrapped.eval()(**given)
    torch.testing.assert_close(output.logits, wanted.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", ["once", "twice"])
@pytest.mark.parametrize("target", ["head", "attention", "table"])
@pytest.mark.parametrize(
    ("name", "table", "head", "attention"),
    [("RobertaForCausalLM", "word_embeddings", "decoder", "query"), ("CTRLLMHeadModel", "w", "lm_head", "Wq"),
     ("GPT2LMHeadModel", "wte", "lm_head", "c_attn")],
)  # fmt: skip
def test_retrained_tokens_of_a_tied_table_are_its_heads_too(tmp_path, name, table, head, attention, target, stored):
    """Whatever the class calls them, and whether its file holds the head or not; LoRA changes the table alone."""
    model = small(name)  # biases of the head are 0
    model.save_pretrained(tmp_path / "base")
    copy, origin = next(pair for pair in model.all_tied_weights_keys.items() if pair[0].endswith("weight"))
    if stored == "twice":
        tensors = load_file(tmp_path / "base/model.safetensors")
        save_file({**tensors, copy: tensors[origin].clone()}, tmp_path / "base/model.safetensors", {"format": "pt"})
    modules = {"head": [head], "attention": [attention], "table": [attention, table]}[target]
    config = peft.LoraConfig(
        target_modules=modules, trainable_token_indices=None if target == "table" else {table: [5, 9]}
    )
    wrapped = peft.get_peft_model(model, config).eval()
    out = merged(tmp_path, wrapped, 0.3)
    output = type(model).from_pretrained(out).eval()(TOKENS)
    torch.testing.assert_close(output.logits, wrapped(TOKENS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layers", [None, [1]])
def test_an_adapter_of_one_block_of_several_tied_ones_changes_it_alone(tmp_path, layers):
    """Zamba's file holds its shared block once; PEFT adapts every copy of it apart."""
    sizes = {"num_hidden_layers": 4, "n_mamba_heads": 8, "mamba_headdim": 8, "num_mem_blocks": 1,
             "num_attention_heads": 4, "attention_hidden_size": 64, "attention_head_dim": 16,
             "hybrid_layer_ids": [1, 3], "layers_block_type": ["mamba", "hybrid"] * 2}  # fmt: skip
    model = small("Zamba2ForCausalLM", **sizes)
    model.save_pretrained(tmp_path / "base")
    kind = type(model)
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], layers_to_transform=layers)
    wrapped = peft.get_peft_model(kind.from_pretrained(tmp_path / "base"), config).eval()
    out = merged(tmp_path, wrapped, 0.3)
    output, wanted = kind.from_pretrained(out).eval()(TOKENS), wrapped(TOKENS)
    torch.testing.assert_close(output.logits, wanted.logits, rtol=1e-4, atol=1e-4)


def test_an_untied_head_that_a_class_would_compute_otherwise_is_refused(tmp_path):
    model = small("SwitchTransformersForConditionalGeneration")
    model.save_pretrained(tmp_path / "base")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"])).save_pretrained(tmp_path / "a")
    recipe = {"method": "average", "base": str(tmp_path / "base"), "experts": [str(tmp_path / "a")]}
    with pytest.raises(MergeflowError, match=r"a head of its own, which switch_transformers does not scale"):
        check_recipe(recipe)


def test_a_head_and_its_embedding_that_change_alike_stay_tied(tmp_path):
    model = tiny("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    model.save_pretrained(tmp_path / "expert")
    assert averaged(tmp_path) is True
    with open_checkpoint(tmp_path / "out") as state:
        assert "lm_head.weight" not in state


@pytest.mark.parametrize("name", ["MarianMTModel", "BertForMaskedLM"])
def test_a_tied_weight_that_parts_is_said_to_be_untied_whatever_the_class_calls_it(tmp_path, name):
    model = small(name, decoder_vocab_size=64)
    copy, origin = next(pair for pair in model.all_tied_weights_keys.items() if pair[0].endswith("weight"))
    model.save_pretrained(tmp_path / "base")
    tensors = load_file(tmp_path / "base/model.safetensors")
    for folder, change in (("base", 0), ("expert", 1)):
        model.save_pretrained(tmp_path / folder)
        stored = {**tensors, copy: tensors[origin] + change}
        save_file(stored, tmp_path / folder / "model.safetensors", {"format": "pt"})
    assert averaged(tmp_path) is False


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_a_head_untied_by_an_adapter_that_brings_tokens_is_said_to_be_untied(tmp_path, saved):
    model = tiny("llama", tie_word_embeddings=True)
    rows = model.config.vocab_size
    wider = deepcopy(model)
    wider.resize_token_embeddings(rows + 3)
    wrapped = peft.get_peft_model(wider, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=saved))
    with torch.no_grad():
        for name, value in wrapped.named_parameters():
            value.add_(0.3 * torch.randn(value.shape) if "modules_to_save" in name else 0)
    for folder, source, new in (("base", model, []), ("a", wrapped, ["x1", "x2", "x3"])):
        source.save_pretrained(tmp_path / folder)
        words = Tokenizer(WordLevel({f"t{at}": at for at in range(rows)}, unk_token="t0"))
        words.add_tokens(new)
        words.save(str(tmp_path / folder / "tokenizer.json"))
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "tokenizer_source": "union"}
    recipe |= {"base": str(tmp_path / "base"), "experts": [str(tmp_path / "a")], "out": str(tmp_path / "out")}
    merge(recipe)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    logits = type(model).from_pretrained(tmp_path / "out").eval()(TOKENS).logits
    torch.testing.assert_close(logits[..., :rows], wrapped.eval()(TOKENS).logits[..., :rows], rtol=1e-4, atol=1e-4)
