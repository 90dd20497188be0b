"""Which models may be put together from blocks of others, and what their config.json then says."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mergeflow.errors import MergeflowError
from mergeflow.merging.architectures.cuts import Config
from mergeflow.merging.architectures.families import family_of
from mergeflow.merging.architectures.settings import comparable, filled, harmless

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
