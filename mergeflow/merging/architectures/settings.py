"""Settings of config.json in one form, whatever version of transformers wrote them and whichever were left out."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from mergeflow.checkpoints.folders import class_settings
from mergeflow.late import quiet
from mergeflow.merging.architectures.cuts import Config

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
