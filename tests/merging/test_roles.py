"""Roles of tensors: every parameter of transformers' own classes, and what `matrices` takes of them."""

import re

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig

from mergeflow.errors import MergeflowError
from mergeflow.merging import check_recipe, configure, merge, prepare
from mergeflow.merging.architectures.architecture import (
    FAMILIES,
    ROLES,
    UNKNOWN,
    Architecture,
    architecture_of,
    family_of,
)
from mergeflow.merging.architectures.page import architectures_page
from mergeflow.merging.matrices import is_matrix
from tests.merging.tiny_models import CAUSAL, MASKED, NAMES, tiny


@pytest.fixture(scope="module")
def models():
    """Every architecture on the meta device: shapes and modules without numbers."""
    with torch.device("meta"):
        return {name: tiny(name) for name in NAMES}


def _architecture(model: nn.Module) -> Architecture:
    return architecture_of({}, model.config.to_dict())


def test_every_type_of_the_table_is_built_here():
    assert {kind for family in FAMILIES for kind in family.types} - set(NAMES) == {
        *("cohere2", "granite", "ernie4_5", "smollm3", "llama4")  # as cohere, llama, and llama4_text inside another
    }
    assert len(NAMES) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_a_role_that_fits_its_module(models, name):
    model = models[name]
    architecture = _architecture(model)
    assert architecture.family is not UNKNOWN
    owners = {f"{place}.{leaf}": module for place, module in model.named_modules() for leaf in ("weight", "bias")}
    for parameter, value in model.state_dict().items():
        role, owner = architecture.role(parameter, value.shape), type(owners.get(parameter)).__name__
        assert role in ROLES, (parameter, list(value.shape))
        if "Embedding" in owner:
            assert role in ("embedding", "position"), (parameter, role)
        elif owner in ("Linear", "Conv1D", "FalconLinear", "NonDynamicallyQuantizableLinear"):
            assert role not in ("embedding", "position", "norm", "other"), (parameter, role)
        elif "Norm" in owner:
            assert role == "norm", (parameter, role)
        elif "Router" in owner or "Gate" in owner:
            assert role == "router", (parameter, role)


# Each was a mean in silence (or, of LXMERT, refused) although it is part of attention or of an MLP.
PARTS = {
    "groupvit": ({"assign.proj": "attention"}, {}),
    "timesformer": ({"temporal_dense": "attention"}, {}),
    "xmod": ({"adapter_modules": "mlp"}, {"languages": ["en_XX", "de_DE"]}),
    "lxmert": ({"self_att": "attention", "inter.dense": "mlp"}, {}),
}


@pytest.mark.parametrize("family", PARTS)
def test_parts_of_attention_and_mlps_by_unusual_names(family):
    parts, changes = PARTS[family]
    config = AutoConfig.for_model(family, **changes)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    architecture = _architecture(model)
    for part, role in parts.items():
        names = [key for key, module in model.named_modules() if type(module) is nn.Linear and part in key]
        assert names
        assert {architecture.role(f"{name}.weight", (32, 32)) for name in names} == {role}


# Biases of each head [heads, n] were treated as matrices by spectral methods.
BIASES = (
    "levit.encoder.stages.0.layers.0.attention.attention_biases",
    "stages.1.blocks.0.mixer.m.attn.attention_biases",
    "encoder.layers.0.self_attn.bias_u",
    "encoder.layers.0.self_attn.pos_bias_v",
    "transformer.layer.0.rel_attn.r_w_bias",
    "layers.0.self_attn.q_l2_clip.scale",
)


@pytest.mark.parametrize("name", BIASES)
def test_biases_of_heads_are_no_matrices(name):
    assert not any(Architecture().treats(name, (4, 49), word) for word in ("attn_mlp", "mlp", "all"))
    assert Architecture().treats(f"{name.rpartition('.')[0]}.q_proj.weight", (4, 49), "attn_mlp")


# Of no family of the table: names alone tell. Once the first three had their head in
# `all`, jetmoe its experts and phi4_multimodal its image encoder in neither; the others were refused.
BY_NAME = (
    *("biogpt", "trocr", "xlm", "jetmoe", "phi4_multimodal", "gemma4_text"),
    *("recurrent_gemma", "qwen3_next", "glm4_moe", "lfm3", "convnextv2"),
)


@pytest.mark.parametrize("name", BY_NAME)
def test_names_tell_of_other_architectures_too(name):
    config = transformers.AutoConfig.for_model(name)
    for key in ("num_hidden_layers", "n_layers", "decoder_layers"):
        if hasattr(config, key):
            setattr(config, key, 4)
    if "layer_types" in vars(config):
        config.layer_types = config.layer_types[:4]
    kind = transformers.AutoModelForImageClassification if "conv" in name else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(config)
    architecture = _architecture(model)
    state, modules = model.state_dict(), dict(model.named_modules())
    roles = {key: architecture.role(key, value.shape) for key, value in state.items() if not key.endswith("bias")}
    assert None not in roles.values(), [key for key, role in roles.items() if role is None]
    in_blocks = re.compile(r"\b(?:layers|h)\.\d+\.")
    for key, module in modules.items():
        if type(module) is nn.Linear and in_blocks.search(f"{key}."):
            assert roles[f"{key}.weight"] in ("attention", "mlp", "projection", "expert", "router"), key
    for key in state:
        if state[key].ndim == 3 and ("experts" in key or ".mlp." in key):
            assert architecture.treats(key, state[key].shape, "attn_mlp"), key
    if kind is transformers.AutoModelForCausalLM:
        names = {id(value): key for key, value in model.named_parameters(remove_duplicate=False)}
        head = model.get_output_embeddings().weight
        assert roles[names[id(head)]] in ("head", "embedding"), names[id(head)]


IMAGE_MODELS = {
    "timm": (
        "vit_tiny_patch16_224",
        "swin_tiny_patch4_window7_224",
        "convnext_atto",
        "efficientformer_l1",
        "maxvit_pico_rw_256",
    ),
    "torchvision.models": ("resnet18", "vit_b_32", "swin_t", "swin_v2_t", "convnext_tiny", "mobilenet_v3_small"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("library", "name"), [(key, name) for key, names in IMAGE_MODELS.items() for name in names])
def test_linear_weights_of_image_models_have_a_role(library, name):
    """Their files bring no config.json: names alone tell."""
    made = pytest.importorskip(library)
    with torch.device("meta"):
        model = made.create_model(name) if library == "timm" else getattr(made, name)()
    architecture = architecture_of(model.state_dict())
    modules = dict(model.named_modules())
    linear = [key for key, module in modules.items() if type(module) is nn.Linear]
    roles = {key: architecture.role(f"{key}.weight", modules[key].weight.shape) for key in linear}
    strange = {key: role for key, role in roles.items() if role not in ("attention", "mlp", "projection", "head")}
    assert all(role == "position" and "cpb_mlp" in key for key, role in strange.items()), strange
    assert all(roles[key] == "head" for key in linear if modules[key].out_features == 1000)
    assert list(roles.values()).count("head") <= 2


@pytest.mark.parametrize("name", [*CAUSAL, *MASKED])
def test_tables_of_the_vocabulary_are_embedding_and_head(models, name):
    model = models[name]
    architecture = _architecture(model)
    names = {id(value): key for key, value in model.named_parameters(remove_duplicate=False)}
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    roles = {architecture.role(names[id(module)], module.shape) for module in (table, head)}
    assert roles == {"embedding", "head"} or (head is table and roles < {"embedding", "head"})
    assert not architecture.treats(names[id(table)], table.shape, "all")
    assert not architecture.treats(names[id(head)], head.shape, "all")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("mamba", "mamba2", "jamba")])
def test_attn_mlp_takes_every_matrix_of_every_block(models, name):
    """All Linear layers and experts inside the blocks but routers: none may be averaged by oversight."""
    model = models[name]
    architecture = _architecture(model)
    for parameter, value in model.state_dict().items():
        block = re.search(r"\b(?:layers?|h|blocks?|albert_layers)\.\d+\.", parameter)
        role = architecture.role(parameter, value.shape)
        if block and value.ndim in (2, 3) and min(value.shape) > 1 and not parameter.endswith("bias"):
            left = role in ("router", "position", "norm") or "downsample" in parameter or "conv_layers" in parameter
            assert architecture.treats(parameter, value.shape, "attn_mlp") != left, (parameter, role)
        if not block:
            inside = "head.attention" in parameter or "head.mlp" in parameter  # SigLIP pools by attention
            assert not architecture.treats(parameter, value.shape, "attn_mlp") or inside, (parameter, role)


def test_state_space_layers_are_projections(models):
    architecture = _architecture(models["mamba"])
    shapes = {name: value.shape for name, value in models["mamba"].state_dict().items()}
    taken = {name.split(".mixer.")[1] for name, shape in shapes.items() if architecture.treats(name, shape, "all")}
    assert taken == {"in_proj.weight", "x_proj.weight", "dt_proj.weight", "out_proj.weight"}
    assert not any(architecture.treats(name, shape, "attn_mlp") for name, shape in shapes.items())


@pytest.mark.parametrize("name", ["mixtral", "granitemoe", "vit", "swin", "gpt_neox", "phimoe"])
def test_names_on_disk_have_the_roles_of_those_in_memory(name, tmp_path):
    """transformers saves some architectures under older names, and experts in a list."""
    from mergeflow.checkpoints import open_checkpoint

    model = tiny(name)
    model.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as saved:
        architecture = architecture_of(saved)
        assert architecture.family is family_of(model.config.model_type, ()) is not UNKNOWN
        counts = [
            {role: sum(value.numel() for key, value in state.items() if architecture.role(key, value.shape) == role)
             for role in ROLES}
            for state in (saved, model.state_dict())
        ]  # fmt: skip
    assert counts[0] == counts[1]


def test_mixtral_is_taken_whole(tmp_path):
    """12 of 53 matrices were, and the rest averaged without a word."""
    tiny("mixtral", num_hidden_layers=3).save_pretrained(tmp_path / "base")
    tiny("mixtral", 1, num_hidden_layers=3).save_pretrained(tmp_path / "a")
    recipe = {"method": "cart", "base": str(tmp_path / "base"), "experts": [str(tmp_path / "a")]}
    plan = check_recipe(recipe)
    assert {role: len(names) for role, names in plan.treatment.treated.items()} == {"attention": 12, "expert": 36}
    assert {role: len(names) for role, names in plan.treatment.left.items()} == {"router": 3, "embedding": 1, "head": 1}
    text = "\n".join(plan.lines())
    assert "treated       expert: 36 × model.layers.*.block_sparse_moe.experts.*.w1.weight" not in text
    assert "treated       expert: 12 × model.layers.*.block_sparse_moe.experts.*.w1.weight, 12 × " in text
    assert "not treated   router: 3 × model.layers.*.block_sparse_moe.gate.weight" in text
    assert "architecture  mixture (model_type mixtral)" in text
    merge(recipe, tmp_path / "out")
    assert text[text.index("architecture") :] in (tmp_path / "out" / "README.md").read_text()


def test_clip_is_treated_as_published():
    names = {
        "visual.transformer.resblocks.0.attn.in_proj_weight": ("attn_mlp", "all"),
        "visual.transformer.resblocks.0.mlp.c_fc.weight": ("attn_mlp", "all"),
        "visual.positional_embedding": ("all",),
        "visual.proj": ("all",),
        "positional_embedding": ("all",),
        "text_projection": (),
        "token_embedding.weight": (),
        "visual.trunk.blocks.0.attn.qkv.weight": ("attn_mlp", "all"),
    }
    for name, wanted in names.items():
        assert tuple(s for s in ("attn_mlp", "all") if is_matrix(name, (8, 8), s)) == wanted, name


def test_matrices_that_no_rule_knows_are_refused():
    base = {"body.0.weight": torch.zeros(4, 4), "body.1.weight": torch.zeros(4, 4), "body.1.bias": torch.zeros(4)}
    experts = {"a": {name: value + 1 for name, value in base.items()}}
    for selection in ("all", "attn_mlp"):
        with pytest.raises(MergeflowError, match=r"what 2 of 2 matrices are \(2 × body\.\*\.weight\).*patterns"):
            prepare(configure("tsv", {"matrices": selection}), base, experts)
    merged = prepare(configure("tsv", {"matrices": ["body.*"]}), base, experts).at(1.0)
    torch.testing.assert_close(merged["body.0.weight"], torch.ones(4, 4))


def test_the_page_of_architectures_has_every_family_and_role():
    page = architectures_page()
    for family in FAMILIES:
        assert f"| {family.name} | {', '.join(family.types)} |" in page
    for role in ROLES:
        assert f"| {role} | `" in page


def test_lines_places_heads_last_and_embeddings_first():
    from mergeflow.merging.architectures.blocks import depth

    shapes = {"embed_out.weight": (9, 4), "gpt_neox.embed_in.weight": (9, 4)}
    shapes |= {f"gpt_neox.layers.{i}.mlp.w.weight": (4, 4) for i in range(3)}
    assert [depth(name, shapes) for name in shapes] == [1.0, 0.0, 0.0, 0.5, 1.0]


def test_a_model_folder_brings_its_config_for_files_named_as_its_weights(tmp_path):
    from mergeflow.checkpoints import open_checkpoint

    tiny("bloom").save_pretrained(tmp_path)
    with open_checkpoint(tmp_path / "model.safetensors") as state:
        assert architecture_of(state).config["n_head"] == 4
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with open_checkpoint(tmp_path / "other.safetensors") as state:
        assert architecture_of(state).config == {}
    (tmp_path / "other.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MergeflowError, match=r"config\.json"):
        merge({"method": "cart", "base": str(tmp_path), "experts": [str(tmp_path)], "out": f"{tmp_path}2"})


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((f"backbone.layers.0.mixer.{part}_proj.weight", "attention") for part in "qkvo"),
        *(
            (f"{part}.weight", "attention")
            for part in ("serial_blocks1.0.factoratt_crpe.qkv", "stages.1.blocks.2.xca.proj")
        ),
        ("stages.3.blocks.4.e_mhsa.q.weight", "attention"),
        ("backbone.layers.1.mixer.up_proj.weight", "mlp"),
        ("backbone.layers.1.mixer.in_proj.weight", "projection"),  # Mamba's
        ("qformer.encoder.layer.0.intermediate_query.dense.weight", "mlp"),
        ("qformer.encoder.layer.0.output_query.dense.weight", "mlp"),
        ("levit.encoder.stages.0.layers.0.module.queries_keys_values.linear.weight", "attention"),
        ("levit.encoder.stages.0.layers.1.module.linear_up.linear.weight", "mlp"),
        ("head_dist.linear.weight", "head"),  # LeViT and RepViT of timm, whose heads begin with a norm
        ("head.head.l.weight", "head"),
        ("vision_tower.timm_model.stages.3.blocks.0.token_mixer.qkv.weight", "attention"),
        ("embed_tokens_extend.audio_embed.encoder.encoders.0.self_attn.q_proj.weight", "attention"),
        ("embed_tokens_extend.image_embed.img_processor.head.mlp.fc1.weight", "mlp"),
    ],
)
def test_names_that_spectral_methods_once_averaged_in_silence(name, role):
    assert Architecture().role(name, (64, 64)) == role


def test_attention_of_three_dimensions_is_refused():
    base = {f"layer.0.rel_attn.{part}": torch.randn(8, 2, 4) for part in "qkvo"}
    base |= {"layer.0.ff.layer_1.weight": torch.randn(8, 8), "layer.0.ff.layer_2.weight": torch.randn(8, 8)}
    experts = {name: {key: value + 1 for key, value in base.items()} for name in "ab"}
    with pytest.raises(MergeflowError, match="4 weights of attention or MLPs have three dimensions"):
        prepare(configure("cart"), base, experts)
    prepare(configure("cart", {"matrices": ["*.ff.*"]}), base, experts)


SIZES = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "depth")
# Tables of relative positions, routers, and what joins towers lie inside modules that are called attention or MLP.
LEFT = (
    r"rel_pos|relative_pos|position_bias|router|connector\.|merger\.|mask_embed|^.*seg_embed|"
    r"attention_biases$|bias_[uv]$|_clip\.scale$|_sconv\."
)


def _shrunken(config):
    for key in SIZES:
        if isinstance(config.__dict__.get(key), int):
            setattr(config, key, 2)
    if isinstance(config.__dict__.get("layer_types"), list):
        config.layer_types = config.layer_types[:2]
    for part in config.__dict__.values():
        if isinstance(part, transformers.PretrainedConfig):
            _shrunken(part)
    return config


def _of_blocks(model):
    """Every matrix inside a module that its class calls attention or MLP, by name, with its shape."""
    modules = dict(model.named_modules())
    for place, module in modules.items():
        parts = place.split(".")
        above = [type(modules[".".join(parts[: i + 1])]).__name__ for i in range(len(parts))]
        inside = any(re.search(r"Attention|MLP|FeedForward|FFN|DenseReluDense", owner) for owner in above)
        skipped = isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Embedding) or "Norm" in above[-1]
        for leaf, value in module.named_parameters(recurse=False) if inside and not skipped else ():
            if value.ndim > 1 and min(value.shape) > 1 and not leaf.endswith("bias"):
                yield f"{place}.{leaf}", tuple(value.shape)


@pytest.mark.nightly
def test_no_matrix_of_attention_or_mlp_of_any_family_is_left_in_silence():
    """Of all classes of transformers that a default configuration builds: treated, refused, or no such matrix."""
    built, silent = 0, {}
    for kind in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        try:
            with torch.device("meta"):
                model = transformers.AutoModel.from_config(_shrunken(AutoConfig.for_model(kind)))
        except Exception:  # classes that are parts of others, or need more than a configuration
            continue
        built += 1
        architecture = _architecture(model)
        roles = {name: (architecture.role(name, shape), shape) for name, shape in _of_blocks(model)}
        if any(role is None or (len(shape) == 3 and role in ("attention", "mlp")) for role, shape in roles.values()):
            continue  # refused
        silent |= {
            f"{kind}: {re.sub(r'[0-9]+', '*', name)}": role
            for name, (role, _) in roles.items()
            if role not in ("attention", "mlp", "expert") and not re.search(LEFT, name)
        }
    assert built > 400
    assert not silent
