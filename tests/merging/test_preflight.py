"""What model folders say of themselves is compared before a merge: refused where weights mean something else."""

import json
import re
import shutil

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, merge
from mergeflow.merging.architectures import blocks
from mergeflow.merging.architectures.blocks import check_alike
from mergeflow.merging.preflight import config_findings, merged_licence
from mergeflow.merging.vocabulary.companions import NAMED
from tests.merging.model_folders import OTHER, TEXT, llama, permuted, save, tokenizer


@pytest.fixture
def pair(tmp_path):
    """A base and an expert `a` of it."""
    words = tokenizer("BPE", TEXT, "<|end|>")
    for seed, name in enumerate(("base", "a")):
        save(tmp_path / name, llama(304, seed), words, eos_token="<|end|>")
    return tmp_path


def plan(folder, experts="a", **changes):
    paths = {name: str(folder / name) for name in experts}
    return {"method": "average", "base": str(folder / "base"), "experts": paths, "out": str(folder / "out"), **changes}


def edit(path, **changes):
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "remove"}))


def said(folder, *args, **changes):
    return [line for line in check_recipe(plan(folder, *args, **changes)).lines() if line.startswith("warning")]


def refused(folder, *args, **changes):
    with pytest.raises(MergeflowError) as error:
        check_recipe(plan(folder, *args, **changes))
    with pytest.raises(MergeflowError) as again:
        merge(plan(folder, *args, **changes))
    assert str(again.value) == str(error.value)
    return str(error.value)


def test_equal_folders_have_nothing_to_be_said_of(pair):
    assert said(pair) == []
    merge(plan(pair))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, "rope_theta: base 10000.0; 'a' 500000.0"),
        ({"rope_parameters": "remove", "rope_theta": 5e5}, "rope_theta: base 10000.0; 'a' 500000.0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling: base 'default'; 'a' {",
        ),
        ({"num_attention_heads": 4, "head_dim": 4}, "num_attention_heads: base 2; 'a' 4"),
        ({"hidden_act": "gelu"}, "hidden_act: base 'silu'; 'a' 'gelu'"),
        ({"model_type": "mistral"}, "model_type: base 'llama'; 'a' 'mistral'"),
    ],
)
def test_a_setting_that_changes_what_weights_compute_is_refused(pair, changes, line):
    edit(pair / "a/config.json", **changes)
    message = refused(pair)
    subject = line.split(":")[0]
    assert f"  - {line}" in message
    assert subject in message.split("allow: [")[1]
    assert any(line in text for text in said(pair, allow=["head_dim", f"{subject[:-1]}*"]))


def test_the_same_setting_of_another_version_is_the_same(pair):
    edit(pair / "a/config.json", rope_parameters="remove", rope_theta=10000, rope_scaling=None, torch_dtype="float32")
    edit(pair / "a/config.json", transformers_version="4.38.0", use_cache=False)
    assert said(pair) == []


# model_type, the setting that one side leaves out, its class's default, and another value.
LEFT_OUT = [
    ("llama", {"rope_theta": 10000.0}, {"rope_theta": 1e6}, "rope_theta"),
    ("llama", {"rope_scaling": None}, {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_scaling"),
    ("llama", {"rope_scaling": None}, {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4}}, {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta"),
    ("llama", {"hidden_act": "silu"}, {"hidden_act": "gelu"}, "hidden_act"),
    ("bert", {"hidden_act": "gelu"}, {"hidden_act": "relu"}, "hidden_act"),
    ("opt", {"do_layer_norm_before": True}, {"do_layer_norm_before": False}, "do_layer_norm_before"),
    ("mistral", {"sliding_window": 4096}, {"sliding_window": 128}, "sliding_window"),
    ("qwen2", {"use_sliding_window": False}, {"use_sliding_window": True, "sliding_window": 32}, "use_sliding_window"),
    ("gemma2", {"attn_logit_softcapping": 50.0}, {"attn_logit_softcapping": 10.0}, "attn_logit_softcapping"),
    ("gemma2", {"query_pre_attn_scalar": 256}, {"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
    ("mixtral", {"num_experts_per_tok": 2}, {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    ("gpt_neox", {"rotary_pct": 0.25}, {"rotary_pct": 1.0}, "rope_scaling|rotary_pct"),
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": 1e4}}, {"rope_parameters": {"rope_theta": None}}, "rope_theta"),
    ("roberta", {"pad_token_id": 1}, {"pad_token_id": 0}, "pad_token_id"),  # positions begin behind it
    ("t5", {"relative_attention_max_distance": 128}, {"relative_attention_max_distance": 64}, "relative_attention_max"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "default", "other", "subject"), LEFT_OUT)
def test_a_setting_left_out_is_its_class_s_default(kind, default, other, subject):
    """Whatever one config.json left out was not compared at all."""
    plain = {"model_type": kind, "hidden_size": 64}

    def refused_with(a, b):
        return [
            finding.text for finding in config_findings({**plain, **a}, {"a": {**plain, **b}}, {}) if finding.refused
        ]

    assert refused_with({}, default) == refused_with(default, {}) == []
    for lines in (refused_with({}, other), refused_with(other, {})):
        assert any(re.match(subject, line) and "(left out, " in line for line in lines), lines
    assert any(re.match(subject, line) for line in refused_with(default, other))


@pytest.mark.parametrize(
    ("kind", "setting", "value", "text"),
    [
        ("llama", "rms_norm_eps", 1e-3, "base 1e-06 (left out, LlamaConfig's default); 'a' 0.001"),
        ("phimoe", "router_jitter_noise", 0.3, "base 0.01 (left out, PhimoeConfig's default); 'a' 0.3"),
    ],
)
def test_a_number_left_out_that_is_no_meaning_is_warned_of(kind, setting, value, text):
    findings = config_findings({"model_type": kind}, {"a": {"model_type": kind, setting: value}}, {})
    assert [finding.text for finding in findings] == [f"{setting}: {text}"]


def test_a_setting_whose_default_nobody_here_knows_is_told(monkeypatch):
    pair = {"model_type": "llama"}, {"a": {"model_type": "llama", "rope_theta": 1e6, "custom": 3}}
    monkeypatch.setattr(blocks, "find_spec", lambda name: None)
    findings = config_findings(*pair, {})
    assert [finding.text for finding in findings] == [
        "rope_theta: 'a' 1000000.0; base leaves it out: not compared, no transformers here that knows the default",
        "settings: only config.json of 'a' says custom: not compared, no default here",
    ]
    assert not any(finding.refused for finding in findings)


# What was compared with nobody's word: model_type, both sides, what is told.
TOLD = [
    ("llama", {"pad_token_id": None}, {"pad_token_id": 2}, "pad_token_id: base none; 'a' 2"),  # a classifier's last one
    ("clip", {"text_config": {"eos_token_id": 2}}, {"text_config": {}}, "text_config.eos_token_id: base 2; 'a' 49"),
    ("mt5", {"decoder_start_token_id": 2}, {}, "decoder_start_token_id: base 2; 'a' 0 (left out"),
    ("mistral", {"sliding_window": None}, {}, "sliding_window: base none; 'a' 4096 (left out, Mistral"),
    ("gpt_neox", {}, {"head_dim": 4}, "settings: only config.json of 'a' says head_dim"),  # read, but with no default
    ("falcon", {}, {"output_attentions": True}, "output_attentions: base False (left out"),  # loses its causal mask
    ("speecht5", {}, {"speech_decoder_prenet_dropout": 0.1}, "speech_decoder_prenet_dropout: "),  # is never off
    ("llama", {"rope_theta": 1e4}, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta: base 1"),
    ("mine", {"scale": 1}, {"scale": 1, "shift": None}, "settings: only config.json of 'a' says shift"),
    ("llama", {"auto_map": {"AutoModel": "x.A"}}, {}, "settings: only config.json of the base says auto_map.AutoModel"),
    ("llama", {"architectures": ["A"]}, {"architectures": ["B"]}, "architectures: base ['A']; 'a' ['B']"),
    ("t5", {"prefix": "a"}, {"prefix": "b"}, "prefix: base 'a'; 'a' 'b'"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "base", "other", "line"), TOLD)
def test_every_setting_that_differs_is_told(kind, base, other, line):
    kind = {} if kind == "mine" else {"model_type": kind}
    texts = [finding.text for finding in config_findings({**kind, **base}, {"a": {**kind, **other}}, {})]
    assert any(text.startswith(line) for text in texts), texts


@pytest.mark.parametrize(
    ("kind", "key", "values"),
    [
        *(("bart", "encoder_attention_heads", (16, 8)), ("mt5", "dense_act_fn", ("relu", "gelu"))),
        *(("bert", "is_decoder", (False, True)), ("gemma3_text", "use_bidirectional_attention", (False, True))),
        *(("gpt_neo", "window_size", (256, 64)), ("xlnet", "attn_type", ("bi", "uni"))),
    ],
)
def test_heads_activations_and_masks_by_any_name_are_refused(kind, key, values):
    base, other = ({"model_type": kind, key: value} for value in values)
    assert [key] == [finding.subject for finding in config_findings(base, {"a": other}, {}) if finding.refused]


def test_a_null_that_its_class_computes_is_the_same_setting():
    """`head_dim: null`, as older Mistrals have it, was refused against the number."""
    base = {"model_type": "mistral", "hidden_size": 64, "num_attention_heads": 4, "head_dim": None}
    assert not config_findings(base, {"a": {**base, "head_dim": 16}}, {})
    assert config_findings(base, {"a": {**base, "head_dim": 8}}, {})[0].refused


def test_forms_of_both_versions_of_transformers_are_the_same_setting():
    old = {"model_type": "qwen2", "rope_theta": 1e6, "use_sliding_window": False, "sliding_window": 4096}
    new = {
        "model_type": "qwen2",
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 32,
    }
    assert not [finding for finding in config_findings(old, {"a": new}, {}) if finding.refused]
    two = {"num_hidden_layers": 2}
    check_alike({"old": old | two, "new": new | two | {"layer_types": ["full_attention"] * 2}}, "num_hidden_layers")
    with pytest.raises(MergeflowError, match=r"rope_theta is 10000.0 in 'b' and 1000000.0 in 'a'"):
        check_alike({"a": old | two, "b": {"model_type": "qwen2"} | two}, "num_hidden_layers")


def test_other_settings_are_warned_of_experts_together(pair):
    save(pair / "b", llama(304, 2), tokenizer("BPE", TEXT, "<|end|>"), eos_token="<|end|>")
    for name in "ab":
        edit(pair / name / "config.json", rms_norm_eps=1e-5, max_position_embeddings=4096)
    assert said(pair, "ab") == [
        "warning       max_position_embeddings: base 2048; 'a', 'b' 4096",
        "warning       rms_norm_eps: base 1e-06; 'a', 'b' 1e-05",
    ]
    assert merge(plan(pair, "ab")).warnings[0] == "max_position_embeddings: base 2048; 'a', 'b' 4096"


def test_other_preprocessing_is_warned_of(pair):
    for name, mean in (("base", [0.5, 0.5, 0.5]), ("a", [0.48, 0.46, 0.41])):
        values = {"image_mean": mean, "size": {"height": 8}, name: 1}
        (pair / name / "preprocessor_config.json").write_text(json.dumps(values))
    assert said(pair) == [
        "warning       preprocessing.image_mean: base [0.5, 0.5, 0.5]; 'a' [0.48, 0.46, 0.41]; the result has the "
        "base's preprocessor_config.json",
        "warning       preprocessing: preprocessor_config.json of 'a' and the base do not both say a, base; the result "
        "has the base's",
    ]
    (pair / "base/preprocessor_config.json").unlink()
    assert (
        "preprocessing: 'a' has a preprocessor_config.json (a, image_mean, size.height), and the base" in said(pair)[0]
    )


def test_a_class_of_other_defaults_and_settings_of_tokenizers_are_told(pair):
    """An image processor's class gives what its file leaves out, and a tokenizer's settings act on its tokens."""
    for name, kind, side in (("base", "CLIPImageProcessorFast", "right"), ("a", "ViTFeatureExtractor", "left")):
        key = "feature_extractor_type" if name == "a" else "image_processor_type"
        (pair / name / "preprocessor_config.json").write_text(json.dumps({key: kind, "do_rescale": True}))
        edit(pair / name / "tokenizer_config.json", padding_side=side, backend=name)
    assert [line.partition("; the")[0] for line in said(pair)] == [
        "warning       preprocessing.type: base 'CLIP'; 'a' 'ViT'",
        "warning       tokenizer.padding_side: base 'right'; 'a' 'left'",
    ]
    assert [line.partition(":")[0] for line in said(pair, tokenizer_source="a")] == ["warning       preprocessing.type"]


def test_other_prompts_and_lengths_of_sentence_transformers_are_warned_of(pair):
    for name in ("base", "a"):
        prompts = {"__version__": {"pytorch": name}, "prompts": {"query": f"{name}: "}}
        (pair / name / "config_sentence_transformers.json").write_text(json.dumps(prompts))
        (pair / name / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": len(name)}))
    assert [line.partition("; the")[0] for line in said(pair)] == [
        "warning       preprocessing.max_seq_length: base 4; 'a' 1",
        "warning       preprocessing.prompts.query: base 'base: '; 'a' 'a: '",
    ]


def test_arguments_of_timm_s_classes_are_compared():
    base = {"architecture": "vit_tiny_patch16_224", "global_pool": "token", "model_args": {"img_size": 32}}
    findings = config_findings(base, {"e": {**base, "model_args": {"img_size": 32, "qk_norm": True}}}, {})
    assert [finding.text.partition(":")[0] for finding in findings] == ["model_args.qk_norm"]
    assert not findings[0].refused
    assert [finding.refused for finding in config_findings(base, {"e": {**base, "global_pool": "avg"}}, {})] == [True]
    assert not config_findings(base, {"e": base}, {})


def test_rows_of_other_tokens_are_refused_with_the_way_out(pair):
    words = tokenizer("BPE", TEXT)
    order = [*range(10), *reversed(range(10, words.get_vocab_size()))]
    save(pair / "a", llama(304, 1), permuted(words, order))
    save(pair / "b", llama(304, 2), tokenizer("BPE", OTHER))
    message = refused(pair, "ab")
    assert re.search(r"  - tokenizer: 'a' has 290 tokens in other rows; `tokenizer_source: union`", message)
    assert re.search(r"tokenizer: 'b' has (\d+ tokens? in other rows and )?\d+ rows of other tokens \('", message)
    assert len(message) < 700
    check_recipe(plan(pair, "ab", allow=["tokenizer"]))
    check_recipe(plan(pair, "ab", tokenizer_source="union"))


def test_new_tokens_are_warned_of_and_other_sizes_refused(pair):
    save(pair / "a", llama(304, 1), tokenizer("BPE", TEXT, "<|end|>", "<|im_start|>"), eos_token="<|im_start|>")
    assert said(pair) == [
        "warning       tokenizer: 'a' has 1 token more ('<|im_start|>'); `tokenizer_source: union` (or a) keeps them",
        "warning       eos_token: base '<|end|>'; 'a' '<|im_start|>'; `tokenizer_source: a` takes an expert's",
    ]
    assert said(pair, tokenizer_source="a") == []
    save(pair / "a", llama(320, 1), tokenizer("BPE", TEXT, "<|end|>"), eos_token="<|end|>")
    message = refused(pair)
    assert "tokenizer: 'a' has 320 rows for tokens, the base 304; `tokenizer_source: union`" in message
    assert "has tensor 'lm_head.weight' of shape [320, 16]" in message
    check_recipe(plan(pair, tokenizer_source="base"))


def test_what_ends_an_answer_is_compared(pair):
    for name, end in (("base", 2), ("a", [2, 7])):
        values = {"eos_token_id": end, f"output_{'scores' if name == 'a' else 'attentions'}": False}  # other versions
        (pair / name / "generation_config.json").write_text(json.dumps(values))
    (line,) = said(pair)
    assert "generation.eos_token_id: base 2; 'a' [2, 7]; the result has the base's generation_config.json" in line
    assert said(pair, tokenizer_source="a") == []  # the result has that of 'a'
    (pair / "base/generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.5}')
    (pair / "a/generation_config.json").unlink()  # then transformers takes what config.json says
    edit(pair / "a/config.json", eos_token_id=2)
    assert "generation_config.json of 'a' and the base do not both say temperature" in said(pair)[-1]
    (pair / "base/generation_config.json").rename(pair / "a/generation_config.json")
    edit(pair / "base/config.json", eos_token_id=2)
    assert "'a' has a generation_config.json (temperature), and the base and the result have none" in said(pair)[-1]
    (pair / "a/generation_config.json").write_text('{"eos_token_id": 7}')
    assert "generation.eos_token_id: base 2; 'a' 7; the result has the base's config.json" in said(pair)[-1]


def test_tokens_without_tokenizer_json_are_compared(pair):
    """Lists of tokens in another order were merged row by row, without a word."""
    for name in ("base", "a"):
        (pair / name / "tokenizer.json").unlink()
        (pair / name / "vocab.txt").write_text("\n".join(f"t{row}" for row in range(304)))
    assert not [line for line in said(pair) if "tokenizer" in line]
    (pair / "a/vocab.txt").write_text("\n".join(f"t{row}" for row in reversed(range(304))))
    assert "tokenizer: 'a' has 304 tokens in other rows" in refused(pair)
    (pair / "a/vocab.txt").unlink()
    (pair / "a/vocab.json").write_text(json.dumps({f"t{(row + 1) % 304}": row for row in range(304)}))
    assert "tokenizer: 'a' has 304 tokens in other rows" in refused(pair)
    for name in ("base", "a"):
        (pair / name / "tokenizer.model").write_bytes(name.encode())
    (pair / "a/vocab.json").unlink()
    assert "'a' has another tokenizer.model, not compared" in "".join(said(pair))


def test_added_tokens_and_files_that_no_list_tells_are_compared(pair):
    """The same SentencePiece model with other added tokens was merged row by row, without a word."""
    for name in ("base", "a"):
        (pair / name / "tokenizer.json").unlink()
        (pair / name / "tokenizer_config.json").unlink()
        (pair / name / "tokenizer.model").write_bytes(b"pieces")
        (pair / name / "added_tokens.json").write_text(json.dumps({f"<{name}>": 303}))
    assert "tokenizer: 'a' has 1 row of other tokens ('<a>')" in refused(pair)
    (pair / "a/added_tokens.json").write_text(json.dumps({"<base>": 303, "<a>": 302}))
    assert "tokenizer: 'a' has 1 token more ('<a>')" in "".join(said(pair))
    (pair / "a/added_tokens.json").write_text(json.dumps({"<base>": 303}))
    assert said(pair) == []
    (pair / "a/tokenizer.model").unlink()
    (pair / "a/spm.model").write_bytes(b"pieces")
    assert "tokenizer: 'a' has spm.model, the base tokenizer.model: not compared" in said(pair)[0]
    for file in ("spm.model", "qwen.tiktoken", "tekken.json", "vocab.bpe"):
        for name in ("base", "a"):
            (pair / name / "tokenizer.model").unlink(missing_ok=True)
            (pair / name / file).write_bytes(name.encode())
        assert f"'a' has another {file}, not compared" in said(pair)[0]
        [(pair / name / file).unlink() for name in ("base", "a")]


def test_ids_of_tokens_that_only_config_json_has_are_compared(pair):
    for name, start in (("base", 0), ("a", 2)):
        (pair / name / "generation_config.json").unlink(missing_ok=True)
        edit(pair / name / "config.json", decoder_start_token_id=start, output_multiplier=start)
    assert "- output_multiplier: base 0; 'a' 2" in refused(pair)
    assert "warning       decoder_start_token_id: base 0; 'a' 2" in said(pair, allow=["output_multiplier"])
    assert "decoder_start" not in "".join(said(pair, allow=["output_multiplier"], tokenizer_source="a"))


@pytest.mark.parametrize(
    ("file", "base", "other", "subject"),
    [
        ("open_clip_config.json", {"model_cfg": {}}, {"model_cfg": {"quick_gelu": True}}, "model_cfg.quick_gelu"),
        ("params.json", {"rope_theta": 1e4}, {"rope_theta": 1e6}, "rope_theta"),
        ("config.json", {"label_names": ["a", "b"]}, {"label_names": ["b", "a"]}, "label_names"),
        ("config.json", {"_class_name": "UNet", "act_fn": "silu"}, {"_class_name": "UNet", "act_fn": "gelu"}, "act_fn"),
    ],
)
def test_configurations_of_other_libraries_are_compared(tmp_path, file, base, other, subject):
    """An activation of open_clip's or diffusers', or a rotary base of params.json, was the base's without a word."""
    for name, values in (("base", base), ("a", other)):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name / "model.safetensors", {"w": torch.ones(2)})
        (tmp_path / name / file).write_text(json.dumps(values))
    assert f"- {subject}: " in refused(tmp_path)
    merge(plan(tmp_path, allow=[subject]))


def test_tokenizers_that_cut_otherwise_are_warned_of(pair):
    content = json.loads((pair / "a/tokenizer.json").read_text())
    content["pre_tokenizer"]["add_prefix_space"] = True
    content["model"]["merges"].reverse()
    content["added_tokens"][0]["lstrip"] = True
    (pair / "a/tokenizer.json").write_text(json.dumps(content))
    lines = said(pair)
    assert "'a' cuts text with another pre_tokenizer, merges" in lines[0]
    assert "added tokens: 'a' marks 1 differently ('<|end|>')" in lines[1]


STEPS = [{"path": path, "type": f"sentence_transformers.models.{path[2:]}"} for path in ("0_Transformer", "1_Pooling")]


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        ("tokenizer_config.json", {"extra_special_tokens": ["the"]}, "marks 1 differently ('the')"),
        ("tokenizer_config.json", {"model_max_length": 9}, "do not both say model_max_length"),
        ("special_tokens_map.json", {"eos_token": "the"}, "eos_token: base '<|end|>'; 'a' 'the'"),
        ("modules.json", STEPS, "modules.json of 'a' says Transformer, Pooling, the base's is missing"),
    ],
)
def test_what_files_beside_a_model_say_is_compared(pair, file, changes, words):
    (pair / "base/tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    shutil.copy(pair / "base/tokenizer_config.json", pair / "a")
    (pair / "a" / file).write_text(
        json.dumps(changes if isinstance(changes, list) else {"eos_token": "<|end|>", **changes})
    )
    assert words in "".join(said(pair))


def test_labels_of_a_head_in_another_order_are_refused(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, labels in {"base": ("no", "yes"), "a": ("yes", "no")}.items():
        config = BertConfig(vocab_size=30, id2label=dict(enumerate(labels)), label2id={}, **sizes)
        BertForSequenceClassification(config).save_pretrained(tmp_path / name)
    message = refused(tmp_path)
    assert "id2label: base {'0': 'no', '1': 'yes'}; 'a' {'0': 'yes', '1': 'no'}" in message
    assert "label2id" not in message
    edit(tmp_path / "a/config.json", id2label={"0": "no", "1": "yes"}, label2id={"yes": 0, "no": 1})
    edit(tmp_path / "a/config.json", problem_type="multi_label_classification")  # a pipeline's sigmoid
    assert [line.split(":")[0] for line in said(tmp_path)] == ["warning       label2id", "warning       problem_type"]


@pytest.mark.parametrize(
    ("head", "labels"),
    [
        *(("class_labels_classifier", 1), ("model.decoder.class_embed.0", 1), ("class_predictor", 1), ("fc", 1)),
        *(("logits_proj", 1), ("sequence_summary.summary", 1), ("lm_head", 0), ("embeddings.class_embedding", 0)),
    ],
)
def test_whose_labels_are_compared(head, labels):
    names = ({"id2label": {"0": "cat", "1": "dog"}}, {"a": {"id2label": {"0": "dog", "1": "cat"}}})
    assert len(config_findings(*names, {f"{head}.weight": None})) == labels


def card(folder, text):
    (folder / "README.md").write_text(f"---\n{text}\n---\n# Model\n")


def test_licences(pair):
    card(pair / "base", "license: apache-2.0")
    assert said(pair) == ["warning       licence: 'a' names none"]
    card(pair / "a", "license: mit")
    assert said(pair) == [
        "warning       licences differ: 'base' apache-2.0; 'a' mit; the result's card says apache-2.0"
    ]
    card(pair / "base", "license: other\nlicense_name: my-terms")
    card(pair / "a", "license: cc-by-nc-4.0")
    assert "licences conflict: 'base' my-terms; 'a' cc-by-nc-4.0: read their terms" in said(pair)[0]
    card(pair / "a", "license: [\n- x")  # a front matter that nobody can read says nothing
    assert "'a' names none" in said(pair)[0]
    free = {"license": "mit"}
    assert merged_licence({"base": free, "a": free}) == (free, None)


TEMPLATES = {"base": None, "a": "A {{ messages }}", "b": "B {{ messages }}", "c": "B {{ messages }}"}


@pytest.fixture
def templates(tmp_path):
    words = tokenizer("BPE", TEXT)
    for seed, (name, template) in enumerate(TEMPLATES.items()):
        save(tmp_path / name, llama(300, seed), words, chat_template=template)
    (tmp_path / "mine.jinja").write_text("mine {{ messages }}")
    return tmp_path


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, None),
        ("a", "A {{ messages }}"),
        ("auto", "B {{ messages }}"),
        ("mine.jinja", "mine {{ messages }}"),
        ("{{ x }}", "{{ x }}"),
    ],
)
def test_whose_chat_template_the_result_has(templates, choice, expected, monkeypatch):
    monkeypatch.chdir(templates)
    made = merge(plan(templates, "abc", chat_template=choice))
    assert AutoTokenizer.from_pretrained(made.path).chat_template == expected
    if choice == "mine.jinja":  # the record makes the same again, whatever became of the file
        (templates / choice).unlink()
        again = merge(json.loads(made.recipe.record()), out=templates / "again")
        assert AutoTokenizer.from_pretrained(again.path).chat_template == expected
    if choice is None:
        words = "'a', 'b', 'c' have one, the base has none; `chat_template: a` (or auto) chooses one"
        assert made.warnings == (f"chat_template: {words}",)


TALK = {
    "chatml": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>"
    "\n\nHo<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s> [INST] Hi [/INST] Ho</s>",
    "alpaca": "### Instruction:\nHi\n\n### Response:\nHo\n\n### Response:\n",
    "exaone": "[|system|][|endofturn|]\n[|user|]Hi\n[|assistant|]Ho[|endofturn|]\n[|assistant|]",
}


def test_formats_by_name_render_as_their_models_want(templates):
    (templates / "alpaca").mkdir()  # a folder is not a file
    made = merge(plan(templates, "a", chat_template="chatml"))
    loaded = AutoTokenizer.from_pretrained(made.path)
    loaded.bos_token, loaded.eos_token = "<s>", "</s>"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert TALK.keys() == NAMED.keys()
    for name, text in TALK.items():
        variables = {"chat_template": None if name == "chatml" else NAMED[name]}
        assert loaded.apply_chat_template(talk, tokenize=False, add_generation_prompt=True, **variables) == text
    messages = [{"role": "system", "content": "Be brief."}, *talk]
    text = loaded.apply_chat_template(messages, tokenize=False, chat_template=NAMED["mistral"])
    assert text == "<s> [INST] Be brief.\n\nHi [/INST] Ho</s>"
    with pytest.raises(MergeflowError, match=r"nor a known format \(chatml, llama3"):
        merge(plan(templates, "a", chat_template="chatmi"))


def test_templates_of_older_files_and_several_of_one_model(templates):
    named = [{"name": "default", "template": "D"}, {"name": "tools", "template": "T"}]
    (templates / "b/chat_template.jinja").unlink()
    edit(templates / "b/tokenizer_config.json", chat_template=named)
    edit(templates / "base/tokenizer_config.json", chat_template="old")
    made = merge(plan(templates, "ab", chat_template="b"))
    assert AutoTokenizer.from_pretrained(made.path).chat_template == {"default": "D", "tools": "T"}
    merged = merge({**plan(templates, "ab"), "base": str(made.path)}, out=templates / "kept")
    assert AutoTokenizer.from_pretrained(merged.path).chat_template == {"default": "D", "tools": "T"}


def test_templates_that_are_not_there(templates):
    assert "'base' has no chat template; 'a', 'b' has one" in refused(templates, "ab", chat_template="base")
    wrong = refused(templates, "ab", chat_template="chatmi")
    assert "neither a model of the merge (auto, base, a, b), nor a file, nor a Jinja template" in wrong
    file = str(templates / "out.safetensors")
    assert "`chat_template` makes a model folder" in refused(templates, "ab", chat_template="a", out=file)
    for name in "ab":
        (templates / name / "chat_template.jinja").unlink()
    assert "no model has a chat template" in refused(templates, "ab", chat_template="auto")
