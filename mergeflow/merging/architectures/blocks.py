"""Blocks of a model: how deep each lies, which may move to another model, and what their config.json then says."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from mergeflow.checkpoints.folders import class_settings
from mergeflow.errors import MergeflowError
from mergeflow.late import quiet
from mergeflow.merging.architectures.architecture import Architecture, Config, family_of

BLOCK = re.compile(r"^(.*?)\b(?:resblocks|blocks|block|layers|layer|h)\.(\d+)\.")
# Families of decoders in which a block does not depend on its index, but for what the tables below say.
STACKED = (
    *("llama", "mixture", "deepseek", "gpt_oss", "dbrx", "phi", "phi3", "glm", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("codegen", "gpt_neox", "falcon", "mpt", "opt", "starcoder2", "mamba"),
)
# The same of encoders, by `model_type`: other members of their families share or tell apart their blocks.
ENCODERS = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "vit", "deit")
# Models of an encoder and a decoder, whose numbers of blocks stand in one config.json.
PAIRS = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper")
# Stacks of models of text and pictures, whose settings have a section of their own, as those of any decoder above may.
TOWERS = ("clip_text_model", "clip_vision_model", "siglip_text_model", "siglip_vision_model", "pixtral")
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PAIR_COUNTS = {"encoder": ("encoder_layers", "num_layers"), "decoder": ("decoder_layers", "num_decoder_layers")}
_SECTIONS = {"vision_config": r"vis|image", "text_config": r"text|language"}
# What a block is depends on its index by these keys; they are harmless with these values.
_BY_INDEX: dict[str, tuple[Any, ...]] = {
    "first_k_dense_replace": (0,),
    "attn_layer_period": (),
    "attention_types": (),
    "interleave_moe_layer_step": (1,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "scale_attn_by_inverse_layer_idx": (False,),
    "rescale_every": (0,),
    "use_weighted_layer_sum": (False,),
    # Whose output the language model reads, counted from the end or in a list.
    "vision_feature_layer": tuple(range(-99, 0)),
    "vision_feature_layers": (),
}
# Without a list per block these have a rule by index of their own.
_LISTED = {
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "cohere2", "gpt_oss", "olmo3", "ministral", "exaone4", "vaultgemma", "cwm"),
        "layer_types",
    ),
    "smollm3": "no_rope_layers",
}
# What may differ between models whose blocks run in one: the first one's counts.
_FREE = re.compile(
    r"token_id|^(?:architectures|auto_map|max_position_embeddings|n_positions|n_ctx|max_window_layers|id2label|label2id"
    r"|problem_type|task_specific_params|projection_dim|(?:begin_)?suppress_tokens|forced_decoder_ids)$"
)


def settings_of(config: Config, stack: str) -> tuple[str, Config]:
    """Return the section of config.json that describes a stack, "" where it is the whole, and its settings."""
    places = {
        key: match.start()
        for key, value in config.items()
        if isinstance(value, Mapping) and (match := re.search(_SECTIONS.get(key, f"^{re.escape(key)}\\b"), stack))
    }
    if not places:
        layers = {"num_decoder_layers": config.get("num_decoder_layers") or config.get("num_layers")}
        return "", {**config, **(layers if config.get("model_type") in PAIRS and layers["num_decoder_layers"] else {})}
    section = min(places, key=lambda key: places[key])
    if not any(key in config[section] for key in COUNTS):
        config = (filled(config) or (config, ""))[0]
    read = [key for key in config if key.startswith("vision_feature_layer") and section == "vision_config"]
    return section, {**config[section], **{key: config[key] for key in read}}


def count_key(config: Config, stack: str, blocks: int, path: str) -> str:
    """Return the key of settings that holds the number of blocks, where they may be put one behind the other."""
    model_type = config.get("model_type")
    if family_of(str(model_type), ()).name not in STACKED and model_type not in (*ENCODERS, *PAIRS, *TOWERS):
        kind = f"model_type {model_type}" if model_type else "no config.json with a model_type"
        raise MergeflowError(
            f"'{path}' ({kind}): layers can be taken only from stacks of blocks that are known to be alike, such as "
            "those of llama, qwen2, gpt2, bert, vit, t5 or clip in a folder with config.json; `mergeflow docs "
            "architectures` lists them, and says why others are refused."
        )
    counts = _PAIR_COUNTS["decoder" if "decoder" in stack else "encoder"] if model_type in PAIRS else COUNTS
    key = next((key for key in counts if key in config), None)
    if key is None or config[key] != blocks:
        raise MergeflowError(
            f"'{path}' has {blocks} blocks, but config.json says {config.get(key or '', 'nothing of it')}: "
            "it is of another model."
        )
    odd = [name for name, harmless in _BY_INDEX.items() if name in config and config[name] not in (None, *harmless)]
    needed = _LISTED.get(str(model_type)) or ("layer_types" if config.get("use_sliding_window") else None)
    if needed and not isinstance(config.get(needed), list):
        raise MergeflowError(
            f"'{path}': what a block of a {model_type} attends to depends on its index, and config.json has no list "
            f"`{needed}`. Load and save the model with a newer transformers, which writes it."
        )
    if odd:
        raise MergeflowError(
            f"'{path}': what a block is depends on its index ({', '.join(f'{name}: {config[name]}' for name in odd)} "
            "in config.json), so its layers cannot be moved."
        )
    return key


def stacked_config(configs: Sequence[Config], key: str, chosen: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return the new number of blocks of a stack, and of every list that has one entry per block the chosen ones.

    `chosen` has a model's index and a block's there for each block; the first model counts where `configs` may differ.
    """
    config = configs[0]
    changes: dict[str, Any] = {key: len(chosen)}
    if key == "encoder_layers" and "num_hidden_layers" in config:
        changes["num_hidden_layers"] = len(chosen)
    for name, value in config.items():
        per_block = isinstance(value, list) and len(value) == config[key] and not _FREE.search(name)
        if per_block and name != "mlp_only_layers":
            changes[name] = [configs[model][name][block] for model, block in chosen]
    return changes


def check_alike(configs: Mapping[str, Config], key: str) -> None:
    """Check that blocks of several models can run in one: nothing that a block computes differs in config.json."""

    def counts(name: str) -> bool:
        return not (harmless(name) or _FREE.search(name.split(".")[-1]))

    settings, classes = comparable(configs, counts)
    (first, head), *others = settings.items()
    faults = []
    numbers = {key, *(sum(_PAIR_COUNTS.values(), COUNTS) if head.get("model_type") in PAIRS else ())}
    for path, config in others:
        # A class passes over a setting that only one side has beside its defaults.
        for name in sorted(head.keys() & config.keys() if classes else {*head, *config}):
            a, b = head.get(name), config.get(name)
            per_block = isinstance(a, list) and isinstance(b, list) and (len(a), len(b)) == (head[key], config.get(key))
            if a != b and name not in numbers and not per_block and counts(name):
                faults.append(f"{name} is {b!r:.60} in '{path}' and {a!r:.60} in '{first}'")
    if faults:
        listed = "\n  - ".join(faults)
        raise MergeflowError(f"layers of these models cannot run in one model; config.json differs:\n  - {listed}")


# Where a tensor stands in its model: how deep its block lies, from 0 for the first to 1 for the last.

# Towers whose lists have a name of their own beside BLOCK's: LXMERT's pictures and pairs, Idefics' cross-attention.
_OWN_LIST = re.compile(
    r"^(.*?)\b(?:[rx]_layers|(?:gated_cross_attn|encoder|decoder|spatial|temporal|auxiliary|albert)_layers)\.(\d+)\."
)
# Outside the blocks a transformer has what makes tokens of its input, and behind them norms, projections and heads.
_FIRST = re.compile(
    r"embed|token|stem|(?:class|segment)_(?:pos_)?emb\b|feature_(?:extractor|projection)\.|subsampl|"
    r"\binput_(?:linear|layer|ff|conditioner|proj)|(?:encoder|tower)\.conv\d?\.|^conv\d\.|"
    r"\b(?:conv1|conv_proj|patch|pos|wte|wpe|shared|ln_pre|pre_?la?ye?r_?norm|norm_pre|la?ye?r_?norm_pre)(?:\b|_)"
)
# Of these names some are behind the blocks all the same: LFM2's last norm, a neck's convolutions.
_BEHIND = re.compile(r"(?:^|\.)embedding_norm\.|\bneck\.")


def block_of(name: str) -> re.Match[str] | None:
    """Match a tensor of a block: its tower, and its index there."""
    return BLOCK.match(name) or _OWN_LIST.match(name)


def _tower(block: re.Match[str]) -> str:
    return block.group(1) if block.re is BLOCK else block.string[: block.start(2)]


def depth(name: str, shapes: Mapping[str, Any], architecture: Architecture | None = None) -> float:
    """Return l/(L−1) of a tensor: its block's index among its tower's blocks; 0 before the blocks, 1 after them.

    Outside the blocks embeddings and positions come before, heads after them; of other tensors their names tell.

    Example:
        >>> shapes = {f"visual.resblocks.{i}.w": () for i in range(5)}
        >>> depth("visual.resblocks.1.w", shapes), depth("visual.ln_post.bias", shapes), depth("visual.conv1.w", shapes)
        (0.25, 1.0, 0.0)
    """
    block = block_of(name)
    if not block:
        role = (architecture or Architecture()).role(name, shapes.get(name, ()))
        first = role in ("embedding", "position") or _FIRST.search(name.lower())
        return 0.0 if first and role != "head" and not _BEHIND.search(name) else 1.0
    tower = _tower(block)
    blocks = [int(match.group(2)) for other in shapes if (match := block_of(other)) and _tower(match) == tower]
    return int(block.group(2)) / max(max(blocks), 1)


# Settings of config.json in one form, whatever version of transformers wrote them and whichever were left out.

# Keys that no output of a merged model depends on, by reason; every other key that differs is told. The nightly
# tests/merging/test_settings.py changes every key of every family: an output that changes without a word is a wrong
# entry here.
_HARMLESS = {
    "where a model comes from": r"_?name_or_path|_commit_hash|_from_model_config|unsloth\w*"
    r"|\w*transformers\w*_version|_diffusers_version",
    "how numbers are stored and computed": r"(?:torch_)?dtype|use_bfloat16|quantization_config(?:\..*)?|pretraining_tp"
    r"|_?(?:attn|experts)_implementation\w*|chunk_size_feed_forward",
    "what a call gives with its result": r"use_cache|return_dict\w*"
    r"|output_(?:hidden_states|scores|past|(?:\w+_)?logits)",
    "training alone": r"gradient_checkpointing|layer_norm_training|finetuning_task"
    r"|(?!token_|speech_decoder_prenet_)\w*dropout\w*|\w+_pdrop|\w*drop_path\w*|initializer\w*|\w*init_std"
    r"|\w+_loss_coef\w*",
    "sizes of tables, which are compared themselves": r"vocab_size|num_labels",
    "tokens, which are compared themselves": r"tokenizer_class",
}
_HARMLESS_KEY = re.compile(rf"(?:.*\.)?(?:{'|'.join(_HARMLESS.values())})")


def harmless(key: str) -> bool:
    """Whether no output of a merged model depends on a setting, by its dotted name.

    Example:
        >>> harmless("text_config.attention_dropout"), harmless("token_dropout")
        (True, False)
    """
    return bool(_HARMLESS_KEY.fullmatch(key))


def comparable(
    configs: Mapping[str, Config], counts: Callable[[str], bool]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the settings of models by dotted names, and the classes whose defaults fill what was left out.

    transformers, which is slow to import, is asked only where a setting that counts is missing or null on one side:
    there are no classes where the settings are as they were read.
    """
    flat = {name: flattened(config) for name, config in configs.items()}
    keys = {key for config in flat.values() for key in config if counts(key)}
    if all(len({(key in config, config.get(key) is None) for config in flat.values()}) == 1 for key in keys):
        return flat, {}
    made = {name: pair for name, config in configs.items() if (pair := filled(config))}
    if len(made) < len(configs):
        return flat, {}
    flat = {name: flattened(config) for name, (config, _) in made.items()}
    return flat, {name: cls for name, (_, cls) in made.items()}


def filled(config: Config) -> tuple[Config, str] | None:
    """Return a config.json with the defaults of its class, and the class; None where transformers cannot say them."""
    if find_spec("transformers") is None:
        return None
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = str(config.get("model_type"))
    if kind not in CONFIG_MAPPING:
        return None
    with quiet("transformers", logging.CRITICAL):
        try:
            made = CONFIG_MAPPING[kind].from_dict(class_settings(config))
            return json.loads(json.dumps(made.to_dict(), default=str)), type(made).__name__
        except Exception:  # whatever a class says of settings that it does not like: then they are compared as they are
            return None


def flattened(config: Config, prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted names, the rotary embedding's under the same names whatever version wrote them.

    Example:
        >>> flattened({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}, "vision": {"depth": 2}})
        {'vision.depth': 2, 'rope_theta': 10000.0, 'rope_scaling': 'default'}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("rope_scaling", "rope_parameters", "rope_theta"):
            continue
        if isinstance(value, Mapping) and key not in ("id2label", "label2id"):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    if config.get("use_sliding_window") is False:
        flat |= {f"{prefix}{key}": None for key in ("sliding_window", "max_window_layers") if key in config}
    return flat | {f"{prefix}{key}": value for key, value in _rotary(config).items()}


def vocab_sizes(config: Config) -> list[int]:
    """Return every `vocab_size` of config.json, those of its parts too."""
    sizes = [config["vocab_size"]] if isinstance(config.get("vocab_size"), int) else []
    return sizes + [size for part in config.values() if isinstance(part, dict) for size in vocab_sizes(part)]


def _rotary(config: Config) -> dict[str, Any]:
    """Return θ and the scaling; a model with a rotary embedding and no scaling has the type `default`."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        return {"rope_parameters": scaling}  # of each kind of layer its own
    theta = scaling.get("rope_theta", config.get("rope_theta"))  # transformers prefers the inner one
    if theta is None and not scaling and not config.get("rope_scaling"):
        return {}
    given = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type") and value is not None}
    kind = given.pop("rope_type", scaling.get("type", "default"))
    without = {"rope_theta": None} if "rope_theta" in scaling else {}  # null: no rotary embedding (OLMo Hybrid)
    return {
        **(without if theta is None else {"rope_theta": theta}),
        "rope_scaling": kind if not given else {"rope_type": kind, **dict(sorted(given.items()))},
    }
