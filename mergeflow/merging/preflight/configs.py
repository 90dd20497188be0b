"""config.json of base and experts: which differences change what the same weights compute."""

import re
from collections.abc import Mapping
from typing import Any

from mergeflow.merging.preflight.findings import Finding, difference

Config = Mapping[str, Any]
# Bookkeeping and training: no output of the merged model depends on it. Sizes of vocabularies and ids of tokens are
# compared with the tokenizers.
_IGNORED = re.compile(
    r"_name_or_path|transformers\w*_version|(?:torch_)?dtype|architectures|auto_map|use_cache|output_\w+|return_dict\w*"
    r"|\w*dropout\w*|\w+_pdrop|\w*drop_path\w*|initializer\w*|\w*init_std|pretraining_tp|gradient_checkpointing"
    r"|problem_type|finetuning_task|task_specific_params|\w+_loss_coef\w*|router_jitter_noise|quantization_config"
    r"|_?attn_implementation\w*|chunk_size_feed_forward|unsloth\w*|vocab_size|\w+_tokens?_(?:ids?|index)"
    r"|label2id|num_labels|prefix|tokenizer_class|summary_\w+|layer_norm_training|use_bfloat16|_\w+"
)
# The same weights compute something else.
_MEANING = re.compile(
    r"model_type|rope_(?:theta|scaling|parameters)\b.*|\w*rotary\w*|rope_interleave"
    r"|hidden_act\w*|activation\w*|\w+_activation\w*|feed_forward_proj|is_gated_act"
    r"|num_attention_heads|num_key_value_heads|n_heads?|num_heads|num_kv_heads|head_dim|d_kv|qk_\w+_head_dim"
    r"|num_experts_per_tok|num_experts_per_token|moe_top_?k|norm_topk_prob|routed_scaling_factor|scoring_func|topk_\w+"
    r"|\w*softcapping|query_pre_attn_scalar|\w+_multiplier|logits?_scaling|logit_scale|scale_\w+|scale_embedding"
    r"|position_embedding_type|alibi|relative_attention\w*|layer_types|use_parallel_residual|parallel_attn|multi_query"
    r"|new_decoder_architecture|clip_qkv|id2label"
)
_LABELS = re.compile(r"(?:^|\.)(?:classifier|score|classification_head|qa_outputs)\b")


def config_findings(base: Config, experts: Mapping[str, Config], tensors: Mapping[str, Any]) -> list[Finding]:
    """Return how the experts' settings differ from the base's.

    A setting that one config.json leaves out may have its default there, so it is compared where both have it.

    Args:
        base: The base's config.json; {} where there is none.
        experts: The experts' by name.
        tensors: The base's tensors by name.
    """
    own, others = _flat(base), {name: _flat(config) for name, config in experts.items()}
    labelled = any(_LABELS.search(name) for name in tensors)
    found = []
    for key in sorted({key for config in others.values() for key in config} & own.keys()):
        last = key.split(".")[-1] if not key.startswith("rope_") else key
        if _IGNORED.fullmatch(last) or (last.startswith("id2label") and not labelled):
            continue
        unlike = {name: config[key] for name, config in others.items() if key in config and config[key] != own[key]}
        if unlike:
            found.append(difference(key, own[key], unlike, bool(_MEANING.fullmatch(last))))
    return found


def _flat(config: Config, prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted names, the rotary embedding's under the same names whatever version wrote them."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if key in ("rope_scaling", "rope_parameters", "rope_theta"):
            continue
        if isinstance(value, Mapping) and key not in ("id2label", "label2id"):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found | {f"{prefix}{key}": value for key, value in _rotary(config).items()}


def _rotary(config: Config) -> dict[str, Any]:
    """Return θ and the scaling; a model with a rotary embedding and no scaling has the type `default`."""
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    theta = config.get("rope_theta", parameters.get("rope_theta"))
    if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
        return {"rope_parameters": scaling}  # of each kind of layer its own
    if theta is None and not scaling and not config.get("rope_scaling"):
        return {}
    given = {key: value for key, value in scaling.items() if key not in ("rope_theta", "type") and value is not None}
    kind = given.pop("rope_type", scaling.get("type", "default"))
    return {
        **({} if theta is None else {"rope_theta": float(theta)}),
        "rope_scaling": kind if not given else {"rope_type": kind, **dict(sorted(given.items()))},
    }
