"""Adapters that PEFT itself writes, on models of transformers: the same weights as PEFT's own merge."""

import json
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergeflow.checkpoints import check_compatible, open_checkpoint, write_checkpoint
from mergeflow.checkpoints.align_names import fit_inputs
from mergeflow.errors import MergeflowError
from mergeflow.merging import merge
from mergeflow.merging.files.vectors import extract, negate
from tests.merging.families import built
from tests.merging.tiny_models import perturb, tiny

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

llama, gpt2, t5, bart, bert, roberta, distilbert = (
    partial(tiny, name)
    for name in "llama gpt2 t5 bart bert roberta distilbert".split()  # noqa: SIM905
)
llama_tied = partial(tiny, "llama", tie_word_embeddings=True)


def classifier():
    """GPT-2 with a head of as many labels as it is wide, so that `score` and `c_proj` are square."""
    return transformers.GPT2ForSequenceClassification(tiny("gpt2", num_labels=32).config)


def judge():
    """RoBERTa with a head of two modules, which PEFT retrains whole."""
    return transformers.RobertaForSequenceClassification(tiny("roberta", num_labels=3).config)


def translator():
    """GPT-2 behind BERT: all weights of its cross-attention's queries are square."""
    text = tiny("gpt2", add_cross_attention=True).config
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert().config, text)
    return transformers.EncoderDecoderModel(config=both)


class Convolutions(torch.nn.Module):
    """Convolutions over one, two and three dimensions, of kernels of every shape, and one in groups."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.line, self.plane = torch.nn.Conv1d(5, 7, 3), torch.nn.Conv2d(6, 8, (3, 2), stride=2)
        self.point, self.square = torch.nn.Conv2d(4, 4, 1, bias=False), torch.nn.Conv2d(4, 4, 2)
        self.space, self.grouped = torch.nn.Conv3d(3, 4, (1, 2, 3)), torch.nn.Conv1d(8, 8, 3, groups=4)
        self.c_proj = torch.nn.Conv1d(6, 6, 1)


def first_gpt():
    torch.manual_seed(1)
    config = transformers.OpenAIGPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=40)
    return transformers.OpenAIGPTLMHeadModel(config)


def trained(model, folder, **config):
    """Save the model and an adapter with random weights; the state dict of PEFT's own merge."""
    model.save_pretrained(folder / "base")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, **config))
    perturb(wrapped, 0.3, 2)
    wrapped.save_pretrained(folder / "adapter")
    return wrapped.merge_and_unload().state_dict()


def added(folder, out="out", **more):
    """Merge an adapter into the base; the path of the result."""
    recipe = {"method": "task_arithmetic", "args": {"scale": 1.0}, "base": str(folder / "base")}
    merge({**recipe, "experts": {"a": str(folder / "adapter")}, "out": str(folder / out), **more})
    return folder / out


def check(made, expected, atol=1e-6):
    """Compare the tensors that are made with those of the same names."""
    for name, value in made.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=atol)


def whole(base, state):
    """The adapted model's weights from the base and the adapter as a task vector."""
    total = {name: base[name].float() for name in base}
    for name in state:
        total[name] = state[name] if name in state.absolute else total[name] + state[name]
    return total


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (llama, {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
        (llama, {"target_modules": "all-linear", "use_dora": True, "use_rslora": True}),
        (llama, {"target_modules": ["q_proj", "lm_head"]}),
        (llama, {"target_modules": ["lm_head"], "use_dora": True}),
        (llama, {"target_modules": ["v_proj", "embed_tokens"]}),
        (llama, {"target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"lm_head": 2}}),
        (gpt2, {"target_modules": ["c_attn"], "use_dora": True, "fan_in_fan_out": True}),
        (gpt2, {"target_modules": ["c_attn", "wte"], "fan_in_fan_out": True}),
        (gpt2, {"target_modules": ["c_attn"], "bias": "all", "fan_in_fan_out": True}),
        (gpt2, {"target_modules": ["c_proj"], "bias": "lora_only", "fan_in_fan_out": True}),
        (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3]}),
        (llama, {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [3], "lm_head": [39, 4]}}),
        (gpt2, {"target_modules": ["c_attn"], "trainable_token_indices": [0, 39], "fan_in_fan_out": True}),
        (distilbert, {"target_modules": ["q_lin"], "bias": "all", "trainable_token_indices": {"word_embeddings": [3]}}),
        (classifier, {"target_modules": ["c_proj", "score"]}),
        (classifier, {"target_modules": ["c_proj", "score"], "use_dora": True}),
        (gpt2, {"target_modules": ["c_proj", "c_attn"], "fan_in_fan_out": False}),
        (gpt2, {"target_modules": [], "target_parameters": ["attn.c_proj.weight", "c_attn.weight"]}),
        (llama, {"target_modules": ["q_proj"], "target_parameters": ["embed_tokens.weight", "o_proj.weight"]}),
        (gpt2, {"target_modules": ["c_attn"], "lora_bias": True, "fan_in_fan_out": True}),
        (gpt2, {"target_modules": ["c_proj"], "lora_bias": True, "bias": "lora_only", "use_rslora": True}),
        (translator, {"target_modules": "all-linear"}),
        (judge, {"target_modules": ["query"], "bias": "all", "task_type": "SEQ_CLS"}),
        (llama, {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"],
                 "rank_pattern": {r"layers\.\d\.self_attn\.q": 3}, "alpha_pattern": {r"^model.layers.0.*v_proj": 5}}),
    ],
    ids=["dora", "dora-all", "head", "dora-head", "embedding", "both", "dora-gpt2", "wte", "bias-all", "bias-lora",
         "tokens", "tokens-head", "tokens-tied", "tokens-biases", "square", "square-dora", "said-wrongly", "parameters",
         "parameters-and-modules", "lora-bias", "lora-bias-and-bias", "gpt2-within", "biases-of-a-head",
         "patterns"],
)  # fmt: skip
def test_dora_heads_embeddings_and_biases(tmp_path, model, config):
    expected = trained(model(), tmp_path, **config)
    with open_checkpoint(tmp_path / "base") as base, open_checkpoint(tmp_path / "adapter") as adapter:
        fit = fit_inputs(base, {"a": adapter})
        check_compatible(fit.base, fit.experts)
        total = whole(fit.base, fit.experts["a"])
        assert any(not torch.equal(total[name], base[name].float()) for name in fit.experts["a"])
        tied = fit.base.infos.keys() - base.infos.keys()  # a head that PEFT's merge leaves tied
        check({name: total[name] for name in total.keys() - tied}, expected)


def test_parameters_without_their_modules_become_modules_of_a_sum(tmp_path):
    """PEFT adapts Conv1D's weight [in, out] as it lies, and the module by its transpose."""
    expected = trained(gpt2(), tmp_path, target_modules=[], target_parameters=["attn.c_proj.weight", "wte.weight"])
    base = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    made = peft.PeftModel.from_pretrained(base, added(tmp_path, adapter=4)).merge_and_unload()
    check(made.state_dict(), expected)


RAW = {
    "plain": (llama, {"target_modules": ["q_proj", "embed_tokens"]}),
    "dora": (llama, {"target_modules": ["q_proj"], "use_dora": True}),
    "saved": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tokens": (llama, {"target_modules": ["q_proj"], "trainable_token_indices": [7, 3]}),
    "tokens-tied": (gpt2, {"target_modules": ["c_attn"], "trainable_token_indices": [7, 3]}),
    "tokens-of-head": (llama_tied, {"target_modules": ["lm_head"], "trainable_token_indices": {"embed_tokens": [7]}}),
    "biases": (gpt2, {"target_modules": ["c_attn"], "bias": "all", "lora_bias": True}),
    "experts": (partial(tiny, "qwen2_moe"), {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
}


@pytest.mark.parametrize("kind", RAW)
@pytest.mark.parametrize("whole_model", [False, True], ids=["adapter", "model"])
def test_names_that_peft_has_in_memory(tmp_path, kind, whole_model):
    """A loop of one's own that saves `state_dict()` names the adapter in each key, and may save the base with it."""
    model, config = RAW[kind]
    wrapped = peft.get_peft_model(model(), peft.LoraConfig(r=4, lora_alpha=6, **config), adapter_name="own")
    perturb(wrapped, 0.3, 2)
    model().save_pretrained(tmp_path / "base")
    wrapped.save_pretrained(tmp_path)
    raw = {
        name: value.clone()
        for name, value in wrapped.state_dict().items()
        if whole_model or "own" in name or ("bias" in name and kind == "biases")
    }
    (tmp_path / "raw").mkdir()
    save_file(raw, tmp_path / "raw/adapter_model.safetensors")
    shutil.copy(tmp_path / "own/adapter_config.json", tmp_path / "raw")
    saved, named = (added(tmp_path, f"{each}-out", experts=[str(tmp_path / each)]) for each in ("own", "raw"))
    as_saved, as_named = (load_file(folder / "model.safetensors") for folder in (saved, named))
    torch.testing.assert_close(as_named, as_saved, rtol=0, atol=1e-7)


def test_two_adapters_in_one_file_are_refused(tmp_path):
    tensors = {f"base_model.model.mlp.lora_{side}.{name}.weight": torch.ones(2, 2)
               for side in "AB" for name in ("first", "second")}  # fmt: skip
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    peft.LoraConfig(r=2, target_modules=["mlp"]).save_pretrained(tmp_path)
    with pytest.raises(MergeflowError, match=r"holds several adapters \(first, second\).*save_pretrained"):
        open_checkpoint(tmp_path)


CONVOLUTIONS = ["line", "plane", "point", "square", "space", "c_proj"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"plane": 3}, "alpha_pattern": {"line": 5}},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "bias": "all"},
        {"fan_in_fan_out": True},
        {"modules_to_save": ["grouped"]},
        {"lora_bias": True, "target_modules": ["line", "plane", "square", "space"]},
    ],
    ids=["plain", "rslora", "dora", "dora-rslora", "said-wrongly", "saved", "lora-bias"],
)
def test_convolutions(tmp_path, settings):
    model = Convolutions()
    write_checkpoint(tmp_path / "base.safetensors", model.state_dict())
    model.save_pretrained = lambda folder: None
    expected = trained(model, tmp_path, **{"target_modules": CONVOLUTIONS, **settings})
    base = {"base": str(tmp_path / "base.safetensors")}
    outs = [added(tmp_path, "out.safetensors", **base)]
    if "use_dora" not in settings:
        again = added(tmp_path, "again", **base, adapter={"rank": 4})
        outs.append(added(tmp_path, "again.safetensors", **base, experts={"a": str(again)}))
        peft.PeftModel.from_pretrained(Convolutions(), again).merge_and_unload()
    before = load_file(tmp_path / "base.safetensors")
    for merged in map(load_file, outs):
        assert sum(not torch.equal(merged[name], before[name]) for name in before) >= len(CONVOLUTIONS)
        check(merged, expected)


def test_a_convolution_in_groups_is_refused_as_peft_refuses_it(tmp_path):
    model = Convolutions()
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["grouped"])).save_pretrained(tmp_path)
    with pytest.raises(MergeflowError, match=r"a grouped convolution, which PEFT cannot merge either"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj", "o_proj"], "use_dora": True},
        {"target_modules": "all-linear", "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["k_proj"]},
        {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["k_proj"]},
    ],
    ids=["dora", "dora-all", "saved-beside-lora", "saved-beside-dora"],
)
@pytest.mark.parametrize(("family", "said"), [("nomic_bert", False), ("nomic_bert", True), ("gte", False)])
def test_weights_that_the_base_s_file_holds_fused(tmp_path, family, said, config):
    """Query, key and value are one tensor of the file; what an adapter does not touch of it stays."""
    expected = trained(built(family), tmp_path, **config)
    file = tmp_path / "adapter/adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "fan_in_fan_out": said}))
    check(type(built(family)).from_pretrained(added(tmp_path)).state_dict(), expected, atol=1e-5)


def test_listed_experts_given_whole_are_no_part_of_a_stack(tmp_path):
    """DoRA of transformers 4's listed experts on a base that stacks them."""
    model = tiny("mixtral")
    model.save_pretrained(tmp_path / "base", save_original_format=False)
    base = load_file(tmp_path / "base/model.safetensors")
    stack = next(name for name in base if name.endswith("layers.0.mlp.experts.gate_up_proj"))
    count, rows, columns = base[stack].shape
    factors = {}
    for module in (f"model.layers.0.block_sparse_moe.experts.{i}.{w}" for i in range(count) for w in ("w1", "w3")):
        factors[f"{module}.lora_A.weight"] = torch.ones(2, columns)
        factors[f"{module}.lora_B.weight"] = torch.ones(rows // 2, 2)
        factors[f"{module}.lora_magnitude_vector"] = torch.ones(rows // 2)
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "use_dora": True}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    save_file({f"base_model.model.{name}": value for name, value in factors.items()},
              tmp_path / "adapter/adapter_model.safetensors")  # fmt: skip
    with (
        open_checkpoint(tmp_path / "base") as stacked,
        open_checkpoint(tmp_path / "adapter") as adapter,
        pytest.raises(MergeflowError, match=r"holds it in the stack 'model\.layers\.0\.mlp\.experts\.gate_up_proj'"),
    ):
        fit_inputs(stacked, {"a": adapter})


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_each_weight_is_turned_as_the_base_has_it_whatever_the_adapter_says(tmp_path, said, biases):
    expected = trained(classifier(), tmp_path, target_modules=["c_attn", "c_proj", "score"])
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "fan_in_fan_out": said}))
    with open_checkpoint(tmp_path / "base") as base, open_checkpoint(tmp_path / "adapter") as adapter:
        total = whole(base, fit_inputs(base, {"a": adapter}).experts["a"])
        check(total, expected)
        held = {name: base[name] for name in base if biases or not name.endswith("bias")}
    write_checkpoint(tmp_path / "b.safetensors", held)  # without config.json
    with open_checkpoint(tmp_path / "b.safetensors") as base, open_checkpoint(tmp_path / "adapter") as adapter:
        with pytest.raises(MergeflowError, match=r"adapts the square 'score.weight'"):
            fit_inputs(base, {"a": adapter})
        adapter.infos.pop("score.weight")
        adapter.entries.pop("score.weight")
        total = fit_inputs(base, {"a": adapter}, ignore=["score.weight"]).experts["a"]
        check({name: base[name] + total[name] for name in total}, expected)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (llama, {"target_modules": "all-linear", "use_dora": True}),
        (gpt2, {"target_modules": ["c_attn"], "trainable_token_indices": [0, 39], "fan_in_fan_out": True}),
        (llama, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ],
    ids=["dora", "tokens", "saved"],
)
def test_the_task_vector_of_an_adapter_is_what_it_changes_of_its_base(tmp_path, model, config):
    expected = trained(model(), tmp_path, **config)
    extract(tmp_path / "base", tmp_path / "adapter", tmp_path / "tau.safetensors")
    with open_checkpoint(tmp_path / "base") as base, open_checkpoint(tmp_path / "tau.safetensors") as tau:
        assert tau.is_task_vector
        check(whole(base, tau), expected)
    with open_checkpoint(tmp_path / "tau.safetensors") as tau:
        moved = {name: -value for name, value in tau.items()}
    negate(tmp_path / "tau.safetensors", tmp_path / "minus.safetensors")
    with open_checkpoint(tmp_path / "minus.safetensors") as minus:
        assert all(torch.equal(minus[name], value) for name, value in moved.items())


TIED = {"t5": (t5, "q", "shared", "lm_head"), "bart": (bart, "q_proj", "shared", "lm_head"),
        "bert": (bert, "query", "word_embeddings", "decoder"),
        "roberta": (roberta, "query", "word_embeddings", "decoder"),
        "openai-gpt": (first_gpt, "c_attn", "tokens_embed", "lm_head")}  # fmt: skip


@pytest.mark.parametrize("way", ["target_modules", "modules_to_save"])
@pytest.mark.parametrize("table", ["embedding", "head", "towers"])
@pytest.mark.parametrize("name", TIED)
def test_an_adapter_of_one_of_several_tied_tables_computes_what_peft_does_with_it(tmp_path, name, table, way):
    """All that the class ties is then stored: embeddings of towers and a head's bias were left to chance."""
    make, plain, embedding, head = TIED[name]
    tables = {"embedding": [embedding], "head": [head], "towers": ["encoder.embed_tokens", "decoder.embed_tokens"]}
    towered = name in ("t5", "bart")
    if table == "towers" and not towered:
        return
    model, tokens = make(), torch.arange(3, 15)[None]
    with torch.no_grad():
        for value in model.parameters():
            value.add_(0.2 * torch.randn_like(value))
    trained(
        model, tmp_path, **{"target_modules": [plain]} | {way: [*([plain] if way[0] == "t" else []), *tables[table]]}
    )
    loaded, loading = type(model).from_pretrained(added(tmp_path), output_loading_info=True)
    assert not loading["missing_keys"]
    wrapped = peft.PeftModel.from_pretrained(type(model).from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    given = {"input_ids": tokens} | ({"decoder_input_ids": tokens + 5} if towered else {})
    logits, other = (each.eval()(**given).logits for each in (loaded, wrapped))
    torch.testing.assert_close(logits, other, rtol=1e-4, atol=1e-4)


def test_tables_that_peft_was_to_tie_and_did_not_are_refused(tmp_path):
    trained(llama_tied(), tmp_path / "llama", target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True)
    open_checkpoint(tmp_path / "llama" / "adapter").close()
    trained(t5(), tmp_path, target_modules=["q", "lm_head"], ensure_weight_tying=True)
    with pytest.raises(MergeflowError, match="made with ensure_weight_tying, but its factors of"):
        open_checkpoint(tmp_path / "adapter")


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    trained(gpt2(), tmp_path, target_modules=["c_attn"], trainable_token_indices=[3, 39])
    file = tmp_path / "adapter" / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "trainable_token_indices": [3, 40]}))
    with open_checkpoint(tmp_path / "base") as base, open_checkpoint(tmp_path / "adapter") as adapter:
        with pytest.raises(MergeflowError, match=r"wte.weight.*\[41, 32\].*\[40, 32\]"):
            fit_inputs(base, {"a": adapter}).check()
        with pytest.raises(MergeflowError, match="together with its base"):
            adapter["transformer.wte.weight"]
    file.write_text(json.dumps({**config, "trainable_token_indices": [3]}))
    with pytest.raises(MergeflowError, match="one row for each token of `trainable_token_indices`"):
        open_checkpoint(tmp_path / "adapter")


def test_a_dora_without_its_base_is_not_a_model(tmp_path):
    trained(llama(), tmp_path, target_modules=["q_proj"], use_dora=True)
    adapter = open_checkpoint(tmp_path / "adapter")
    with pytest.raises(MergeflowError, match="together with its base"):
        adapter["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"], "trainable_token_indices": [3, 41]},
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [41], "lm_head": [41]}},
    ],
    ids=["plain", "embedding", "both", "saved", "saved-embedding", "tokens", "tokens-of-both"],
)
def test_what_peft_stores_for_an_extended_vocabulary(tmp_path, config):
    """Tables of more rows come whole with the adapter, in several forms."""
    model = llama()
    model.save_pretrained(tmp_path / "before")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "before")
    model.resize_token_embeddings(43)
    expected = trained(model, tmp_path, **config)
    with open_checkpoint(tmp_path / "base") as base, open_checkpoint(tmp_path / "adapter") as adapter:
        fit = fit_inputs(base, {"a": adapter})
        fit.check()
        check(whole(fit.base, fit.experts["a"]), expected)
