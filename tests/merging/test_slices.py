"""Slices of layers: what comes out is a model of transformers' own class that runs the chosen blocks in their order."""

import inspect
import json
import re

import pytest
import torch
from torch import nn

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, merge
from mergeflow.merging.architectures.architecture import family_of
from mergeflow.merging.architectures.blocks import ENCODERS, STACKED
from mergeflow.merging.files.mergekit import converted
from tests.merging.tiny_models import CAUSAL, loaded, perturb, tiny

transformers = pytest.importorskip("transformers")
TOKENS = torch.tensor([[1, 5, 9, 2, 7]])
ROWS = {"llama": "model.layers", "mistral": "model.layers", "qwen2": "model.layers", "gpt2": "transformer.h"}
ROWS |= {"gemma2": "model.layers", "gpt_neox": "gpt_neox.layers"}


def saved(folder, name, seed=0, **changes):
    model = tiny(name, seed, **changes)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ROWS)
def test_a_frankenmerge_runs_the_chosen_blocks(name, tmp_path):
    """Blocks 0, 1 of a, then 1, 0 … of b: as a ModuleList put together by hand gives it."""
    a, b = (saved(tmp_path / place, name, seed) for seed, place in enumerate("ab"))
    slices = [{"model": f"{tmp_path}/a"}, {"model": f"{tmp_path}/b", "layers": [1, 2]}, {"model": f"{tmp_path}/b"}]
    assert (
        check_recipe({"slices": slices}).steps["slices"] == f"layers of {tmp_path}/a, {tmp_path}/b [1, 2], {tmp_path}/b"
    )
    merge({"slices": slices}, tmp_path / "tall")
    tall = loaded(tmp_path / "tall")
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
    tall = loaded(tmp_path / "tall", type(a))
    row, other = (next(part for part in model.modules() if isinstance(part, nn.ModuleList)) for model in (a, b))
    row.append(other[1])
    held = dict(a.named_parameters())
    for key, value in b.named_parameters():
        if not any(word in key for word in ("embed", "layer.", "layers.", "decoder.weight")):
            held[key].data.copy_(value)
    given = {"input_ids": TOKENS} if "vocab_size" in a.config else {"pixel_values": torch.rand(2, 3, 16, 16)}
    with torch.no_grad():
        torch.testing.assert_close(tall(**given)[0], a.eval()(**given)[0], rtol=1e-5, atol=1e-6)


def test_a_classifier_belongs_to_the_blocks_whatever_the_config_ties(tmp_path):
    """The rows of classes were the first model's wherever config.json ties a head, which this one is not."""
    for seed, place in enumerate("ab"):
        config = tiny("qwen2", tie_word_embeddings=True, num_labels=3).config
        torch.manual_seed(seed)
        transformers.Qwen2ForSequenceClassification(config).save_pretrained(tmp_path / place)
    merge({"slices": [{"model": f"{tmp_path}/{place}", "layers": [0, 1]} for place in "ab"]}, tmp_path / "tall")
    tall, b = (dict(open_checkpoint(tmp_path / place)) for place in ("tall", "b"))
    assert torch.equal(tall["score.weight"], b["score.weight"])


# Of each model with two stacks: what slices call them and their modules, and what comes behind their blocks.
PAIRED = {
    "encoder": ("encoder.block", ["encoder.final_layer_norm"]),
    "decoder": ("decoder.block", ["decoder.final_layer_norm", "lm_head"]),
}
SPEECH = {side: (f"model.{side}.layers", [f"model.{side}.layer_norm"]) for side in PAIRED}
TRANSLATOR = {side: (f"model.{side}.layers", []) for side in PAIRED}
CONTRAST = {
    "text_model": ("text_model.encoder.layers", ["text_model.final_layer_norm", "text_projection", "text_model.head"]),
    "vision_model": (
        "vision_model.encoder.layers",
        ["vision_model.post_layernorm", "visual_projection", "vision_model.head"],
    ),
}
SEEING = {
    "language_model": ("model.language_model.layers", ["model.language_model.norm", "lm_head"]),
    "vision_tower": ("model.vision_tower.encoder.layers", ["model.vision_tower.post_layernorm"]),
}
TWO = {**dict.fromkeys(("t5", "mt5", "umt5"), PAIRED), **dict.fromkeys(("bart", "marian"), TRANSLATOR)}
TWO |= {**dict.fromkeys(("whisper", "mbart", "pegasus", "m2m_100"), SPEECH), "clip": CONTRAST, "siglip": CONTRAST}
TWO |= dict.fromkeys(("llava", "gemma3"), SEEING)
TWO |= {"mistral3": SEEING | {"vision_tower": ("model.vision_tower.transformer.layers", [])}}
GIVEN = {
    "pixel_values": lambda: torch.rand(1, 3, 16, 16),
    "input_features": lambda: torch.rand(1, 8, 32),
    "input_ids": lambda: TOKENS,
    "decoder_input_ids": lambda: TOKENS.flip(1),
}


def outputs(name, model):
    """What a model says of inputs of every kind that it takes."""
    torch.manual_seed(3)
    taken = [key for key in GIVEN if key in inspect.signature(model.forward).parameters]
    given = {key: GIVEN[key]() for key in taken}
    if TWO[name].keys() == SEEING.keys():
        given["input_ids"] = torch.tensor([[1, *[39] * 4, 5, 7]])
    if name == "mistral3":
        given["image_sizes"] = torch.tensor([[16, 16]])
    if "use_cache" in inspect.signature(model.forward).parameters:
        given["use_cache"] = False
    with torch.no_grad():
        made = model(**given)
    return (made.text_embeds, made.image_embeds) if "text_embeds" in made else (made.logits,)


BY_DAY = ("t5", "bart", "whisper", "clip", "llava")  # each kind of pair with one stack too, the others at night
SLICED = [
    *((name, "both") for name in TWO),
    *(
        pytest.param(name, named, marks=() if name in BY_DAY else pytest.mark.nightly)
        for name in TWO
        for named in ("turned", "first", "second")
    ),
]


@pytest.mark.parametrize(("name", "named"), SLICED)
def test_slices_of_a_model_with_two_stacks(name, named, tmp_path):
    """Block 1 of a, then 0 and 1 of b: the other stack, and what lies in none, stay a's."""
    untied = {"tie_word_embeddings": False} if name == "mt5" else {}
    a, b = (saved(tmp_path / place, name, seed, **untied) for seed, place in enumerate("ab"))
    for model, place in ((a, "a"), (b, "b")):
        perturb(model, 0.1, len(place) + (model is b))  # norms and biases, too, are of one model
        model.save_pretrained(tmp_path / place)
    stacks = list(TWO[name])[named == "second" : 2 - (named == "first")]
    slices = [
        {"model": f"{tmp_path}/{place}", "stack": stack, "layers": layers}
        for stack in (reversed(stacks) if named == "turned" else stacks)
        for place, layers in (("a", [1, 2]), ("b", [0, 2]))
    ]
    merge({"slices": slices}, tmp_path / "tall")
    tall = loaded(tmp_path / "tall", type(a))
    hand = type(a)(tall.config)
    rows = tuple(TWO[name][stack][0] for stack in stacks)
    apart = {key: value for key, value in a.state_dict().items() if not key.startswith(rows) or ".0." in key}
    hand.load_state_dict(apart, strict=False)
    for stack in stacks:
        row, behind = TWO[name][stack]
        for block, (model, index) in zip(hand.get_submodule(row), ((a, 1), (b, 0), (b, 1)), strict=True):
            parts = model.get_submodule(row)[index].state_dict()
            shared = name in ("t5", "mt5")  # the first block of a has the distances of all
            parts = {key: value for key, value in parts.items() if not (shared and "relative" in key)}
            block.load_state_dict(parts, strict=not shared)
        for place in behind:
            if place in dict(a.named_modules()) and (place != "lm_head" or not a.config.tie_word_embeddings):
                hand.get_submodule(place).load_state_dict(b.get_submodule(place).state_dict())
    for made, expected in zip(outputs(name, tall), outputs(name, hand.eval()), strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["passthrough", "linear"])
@pytest.mark.parametrize("name", ["t5", "llava"])
def test_modules_of_mergekit_whose_slices_move_layers(name, method, tmp_path):
    """Each stack is block 1 of a, then those of b, or their means; what lies in neither is b's."""
    models = {place: saved(tmp_path / place, name, seed) for seed, place in enumerate("ab")}
    for seed, (place, model) in enumerate(models.items()):
        perturb(model, 0.1, seed)
        model.save_pretrained(tmp_path / place)
    names = {"t5": ("encoder", "decoder", "shared"), "llava": ("vision_tower", "text_decoder", "multi_modal_projector")}

    def source(place, *layers):
        range_ = {"layer_range": list(layers)} if layers else {}
        return {
            "model": f"{tmp_path}/{place}",
            **range_,
            **({"parameters": {"weight": 1}} if method == "linear" else {}),
        }

    ends = [source("a", 0, 2)] * (method == "linear") + [source("b", 0, 2)]
    slices = {"slices": [{"sources": [source("a", 1, 2)]}, {"sources": ends}]}
    modules = {**dict.fromkeys(names[name][:2], slices), names[name][2]: {"models": [source("b")]}}
    recipe, _ = converted([{"merge_method": method, "modules": modules}])
    merge(recipe, tmp_path / "tall")
    a, b = models.values()
    tall = loaded(tmp_path / "tall", type(a))
    hand, ends = type(a)(tall.config), type(a)(a.config)
    share = 0.5 if method == "linear" else 0.0
    first, last = a.state_dict(), b.state_dict()
    ends.load_state_dict({key: share * first[key] + (1 - share) * value for key, value in last.items()})
    unnamed = {key: value for key, value in last.items() if "shared" in key or "projector" in key}
    before = {key: value for key, value in first.items() if "embed" in key or "pre_l" in key or "relative" in key}
    hand.load_state_dict(before | unnamed, strict=False)
    for row, behind in TWO[name].values():
        for block, (model, index) in zip(hand.get_submodule(row), ((a, 1), (ends, 0), (ends, 1)), strict=True):
            parts = model.get_submodule(row)[index].state_dict()
            block.load_state_dict({key: value for key, value in parts.items() if "relative" not in key}, strict=False)
        for place in behind:
            if place != "lm_head" or not a.config.tie_word_embeddings:
                hand.get_submodule(place).load_state_dict(ends.get_submodule(place).state_dict())
    if name == "t5":
        hand.shared.load_state_dict(b.shared.state_dict())
    for made, expected in zip(outputs(name, tall), outputs(name, hand.eval()), strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-5)


def test_modules_that_mergekit_infers_are_called_as_in_memory(tmp_path):
    """LLaVA's files call them otherwise; mergekit has no table of it, and takes the names of its class."""
    models = [saved(tmp_path / place, "llava", seed) for seed, place in enumerate("ab")]
    shares = {"model.language_model.layers": 0.3, "model.vision_tower.encoder.layers": 0.6, "default": 0.9}

    def mean(share):
        weights = {"a": share, "b": 1 - share}
        return {"models": [{"model": f"{tmp_path}/{m}", "parameters": {"weight": weights[m]}} for m in weights]}

    modules = {module: mean(share) for module, share in shares.items()}
    recipe, _ = converted([{"merge_method": "linear", "modules": modules}])
    merge(recipe, tmp_path / "out")
    made = loaded(tmp_path / "out", type(models[0])).state_dict()
    a, b = (model.state_dict() for model in models)
    for name, tensor in made.items():
        share = next((share for module, share in shares.items() if name.startswith(f"{module}.")), 0.9)
        torch.testing.assert_close(tensor, share * a[name] + (1 - share) * b[name])


@pytest.mark.parametrize(
    ("name", "modules", "message"),
    [
        (
            "whisper",
            ("model.decoder.layers", "default"),
            "'model.decoder.* is of 'default'; here it is of the models of",
        ),
        ("t5", ("text_decoder", "multi_modal_projector"), "2 stacks .decoder.block, encoder.block. of 2; here"),
        ("llama", ("text_decoder", "vision_tower"), "move layers of 1 stacks .model.layers. of 1; here"),
    ],
)
def test_modules_whose_slices_no_stack_is(name, modules, message, tmp_path):
    saved(tmp_path / "a", name)
    slices = [{"sources": [{"model": f"{tmp_path}/a", "layer_range": layers}]} for layers in ([1, 2], [0, 2])]
    parts = {"slices": slices}, {"models": [{"model": f"{tmp_path}/a"}]}
    with pytest.raises(MergeflowError, match=f"merged in different ways.*{message}"):
        converted([{"merge_method": "passthrough", "modules": dict(zip(modules, parts, strict=True))}])


@pytest.mark.parametrize(
    ("name", "embedding"),
    [("t5", "shared.weight"), ("bart", "model.shared.weight"), ("gemma", "model.embed_tokens.weight")],
)
def test_copies_of_an_embedding_are_of_one_model(name, embedding, tmp_path):
    """torch's files hold all names, and config.json of a class that is not told says nothing of ties."""
    models = [tiny(name, seed, tie_word_embeddings=True) for seed in (0, 1)]
    for model, place in zip(models, "ab", strict=True):
        (tmp_path / place).mkdir()
        torch.save(model.state_dict(), tmp_path / place / "pytorch_model.bin")
        (tmp_path / place / "config.json").write_text(model.config.to_json_string())
        rewritten(tmp_path / place, architectures=None)
    stacks = ("encoder", "decoder") if name != "gemma" else (None, None)
    slices = [{"model": f"{tmp_path}/{place}", "stack": stack} for place, stack in zip("ab", stacks, strict=True)]
    merge({"slices": slices}, tmp_path / "tall")
    state, expected = dict(open_checkpoint(tmp_path / "tall")), models[0].state_dict()[embedding]
    assert all(torch.equal(state[key], expected) for key in state if "lm_head" in key or "embed_tokens" in key)
    assert torch.equal(state[embedding], expected)


def rewritten(folder, **sections):
    """Change a config.json: a value of None goes, a mapping takes the place of a section."""
    config = json.loads((folder / "config.json").read_text()) | sections
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize(
    ("name", "stack", "written", "expected"),
    [
        ("t5", "encoder", {"num_decoder_layers": None}, {"num_layers": 3, "num_decoder_layers": 2}),
        ("t5", "decoder", {"num_decoder_layers": None}, {"num_layers": 2, "num_decoder_layers": 3}),
        ("bart", "encoder", {"num_hidden_layers": 2}, {"encoder_layers": 3, "decoder_layers": 2}),
        ("bart", "model.decoder", {"num_hidden_layers": 2}, {"encoder_layers": 2, "decoder_layers": 3}),
        ("whisper", "decoder", {"begin_suppress_tokens": [7, 9]}, {"begin_suppress_tokens": [7, 9]}),
    ],
)
def test_configurations_as_older_models_have_them(name, stack, written, expected, tmp_path):
    model = saved(tmp_path / "a", name)
    rewritten(tmp_path / "a", **written)
    slices = [{"model": f"{tmp_path}/a", "stack": stack, "layers": layers} for layers in ([0, 2], [1, 2])]
    merge({"slices": slices}, tmp_path / "tall")
    config = json.loads((tmp_path / "tall/config.json").read_text())
    assert {key: config[key] for key in expected} == expected
    loaded(tmp_path / "tall", type(model))


def test_a_section_that_leaves_out_what_its_class_has_by_default(tmp_path):
    """As LLaVA 1.5's `text_config`, which does not say how many layers it has."""
    model = saved(tmp_path / "a", "llava")
    text = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 32)
    with torch.device("meta"):
        sizes = {"text_config": json.loads(model.config.text_config.to_json_string()) | text}
        large = tiny("llava", **sizes).state_dict()
    rows = {key: torch.zeros(value.shape) for key, value in large.items() if "vision" not in key}
    state = model.state_dict() | rows
    model.save_pretrained(tmp_path / "a", state_dict=state)
    shown = {key: value for key, value in sizes["text_config"].items() if key not in text}
    rewritten(tmp_path / "a", text_config=shown)
    slices = [{"model": f"{tmp_path}/a", "stack": "language_model", "layers": [0, 3]}]
    merge({"slices": slices}, tmp_path / "short")
    config = json.loads((tmp_path / "short/config.json").read_text())
    assert config["text_config"] == shown | {"num_hidden_layers": 3}


@pytest.mark.parametrize(
    ("name", "stack", "message"),
    [
        ("t5", None, "has 2 stacks of layers, .*decoder.*: a slice is of one. Name one, such as `stack: "),
        ("clip", "encoder", "2 stacks of layers, text_model, vision_model: `stack: encoder` is several of them"),
        ("llava", "language", "2 stacks of layers, language_model, vision_tower: `stack: language` is none of them"),
        ("llama", "decoder", "1 stack of layers, model: `stack: decoder` is none of them"),
    ],
)
def test_a_stack_that_is_unknown_or_not_named(name, stack, message, tmp_path):
    saved(tmp_path / "a", name)
    with pytest.raises(MergeflowError, match=message):
        check_recipe({"slices": [{"model": f"{tmp_path}/a", "stack": stack, "layers": [0, 1]}]})


def test_a_stack_may_be_within_a_module_of_another_s_name(tmp_path):
    """The blocks of a ViT in a VisionEncoderDecoderModel are encoder.encoder.layer."""
    encoder, decoder = tiny("vit").config, tiny("bert", is_decoder=True, add_cross_attention=True).config
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.VisionEncoderDecoderModel(config)
    model.save_pretrained(tmp_path / "a")
    merge({"slices": [{"model": f"{tmp_path}/a", "stack": "encoder", "layers": [1, 2]}]}, tmp_path / "short")
    short = loaded(tmp_path / "short", type(model))
    assert (short.config.encoder.num_hidden_layers, short.config.decoder.num_hidden_layers) == (1, 2)


def test_only_a_stack_of_tokens_needs_the_tokens_of_the_first_model(tmp_path):
    for seed, place in enumerate("ab"):
        saved(tmp_path / place, "whisper", seed, vocab_size=40 + 2 * seed)
    ears, mouths = ([{"model": f"{tmp_path}/{place}", "stack": stack} for place in "ab"]
                    for stack in ("encoder", "decoder"))  # fmt: skip
    merge({"slices": [mouths[0], ears[1]]}, tmp_path / "heard")
    heard, b = (open_checkpoint(tmp_path / place) for place in ("heard", "b"))
    assert torch.equal(heard["model.encoder.conv1.weight"], b["model.encoder.conv1.weight"])
    with pytest.raises(MergeflowError, match=r"the embedding of '.*/b', whose rows are of other tokens"):
        check_recipe({"slices": [ears[0], mouths[1]]})


def test_heads_of_attention_that_are_named_by_layer_are_said(tmp_path):
    saved(tmp_path / "a", "whisper")
    (tmp_path / "a/generation_config.json").write_text('{"alignment_heads": [[1, 0]]}')
    for stack, count in (("encoder", 0), ("decoder", 1)):
        checked = check_recipe({"slices": [{"model": f"{tmp_path}/a", "stack": stack, "layers": [0, 1]}]})
        assert sum("alignment_heads" in line for line in checked.warnings) == count


def test_a_tower_whose_layers_are_read_by_number_is_not_cut(tmp_path):
    saved(tmp_path / "a", "llava", vision_feature_layer=[-2, 1])
    with pytest.raises(MergeflowError, match=r"depends on its index \(vision_feature_layer"):
        check_recipe({"slices": [{"model": f"{tmp_path}/a", "stack": "vision_tower", "layers": [0, 1]}]})
    check_recipe({"slices": [{"model": f"{tmp_path}/a", "stack": "language_model", "layers": [0, 1]}]})


STACKS = [name for name in CAUSAL if family_of(name, ()).name in STACKED]


@pytest.mark.parametrize(
    "name", [name for name in STACKS if name not in ("jamba", "gpt_neo", "deepseek_v2", "deepseek_v3")]
)
def test_every_architecture_that_is_said_to_stack_does(name, tmp_path):
    saved(tmp_path / "a", name)
    merge({"slices": [{"model": f"{tmp_path}/a"}, {"model": f"{tmp_path}/a", "layers": [0, 1]}]}, tmp_path / "tall")
    with torch.no_grad():
        assert bool(loaded(tmp_path / "tall")(TOKENS).logits.isfinite().all())


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
    assert loaded(tmp_path / "out").config.num_hidden_layers == 3
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
        torch.testing.assert_close(loaded(tmp_path / "tall")(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


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
        ("albert", "model_type albert.*only from stacks of blocks that are known to be alike"),
        ("dinov2", "model_type dinov2.*only from stacks of blocks"),
        ("deepseek_v3", "depends on its index \\(first_k_dense_replace: 1"),
        ("gpt_neo", "depends on its index \\(attention_types"),
        ("jamba", "depends on its index \\(attn_layer_period: 8"),
        ("whisper", "depends on its index \\(use_weighted_layer_sum: True"),
    ],
)
def test_architectures_that_do_not_stack(name, message, tmp_path):
    saved(tmp_path / "a", name, use_weighted_layer_sum=True)
    stack = {"stack": "encoder"} if name == "whisper" else {}
    with pytest.raises(MergeflowError, match=message):
        check_recipe({"slices": [{"model": f"{tmp_path}/a", **stack, "layers": [0, 1]}]})


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
    assert loaded(tmp_path / "tall").config.num_hidden_layers == 3
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
