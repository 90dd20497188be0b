"""config.json of base and experts: which differences change what the same weights compute."""

import re
from collections.abc import Mapping
from typing import Any

from mergeflow.merging.architectures.cuts import Config
from mergeflow.merging.architectures.settings import comparable, flattened
from mergeflow.merging.preflight.findings import Default, Finding, difference

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
    r"|new_decoder_architecture|clip_qkv|id2label|use_sliding_window|sliding_window\w*|attention_chunk_size|no_rope\w*"
)
_LABELS = re.compile(r"(?:^|\.)(?:classifier|score|classification_head|qa_outputs)\b")


def config_findings(base: Config, experts: Mapping[str, Config], tensors: Mapping[str, Any]) -> list[Finding]:
    """Return how the experts' settings differ from the base's; what a config.json leaves out has its class's default.

    Args:
        base: The base's config.json; {} where there is none.
        experts: The experts' by name.
        tensors: The base's tensors by name.
    """
    experts = {name: config for name, config in experts.items() if config}
    if not base or not experts:
        return []
    labelled = any(_LABELS.search(name) for name in tensors)

    def counts(key: str) -> bool:
        last = _last(key)
        return not (_IGNORED.fullmatch(last) or (last.startswith("id2label") and not labelled))

    names = {"": base, **experts}  # no expert has an empty name
    given = {name: flattened(config) for name, config in names.items()}
    settings, classes = comparable(names, counts)
    own = settings.pop("")
    found = []
    for key in sorted({key for config in settings.values() for key in config} | own.keys()):
        if not counts(key):
            continue
        meaning = bool(_MEANING.fullmatch(_last(key)))
        unlike = {
            name: Default(one[key], classes.get(name, "")) if key not in given[name] else one[key]
            for name, one in settings.items()
            if key in one and key in own and one[key] != own[key]
        }
        if unlike:
            mine = Default(own[key], classes.get("", "")) if key not in given[""] else own[key]
            found.append(difference(key, mine, unlike, meaning))
        elif meaning and not classes:
            found += _not_compared(key, own, settings)
    return found


def _not_compared(key: str, own: Config, experts: Mapping[str, Config]) -> list[Finding]:
    """Return that a setting is left out in some config.json, and that nothing here knows the default."""
    values = {"base": own.get(key), **{f"'{name}'": config.get(key) for name, config in experts.items()}}
    out = [name for name, config in (("base", own), *((f"'{n}'", c) for n, c in experts.items())) if key not in config]
    written = {name: value for name, value in values.items() if value not in (None, "default")}
    if not out or not written:
        return []
    told = "; ".join(f"{name} {value!r:.60}" for name, value in written.items())
    reason = "no transformers here that knows the default" if own.get("model_type") else "config.json has no model_type"
    return [Finding(key, f"{key}: {told}; {', '.join(out)} leaves it out: not compared, {reason}")]


def _last(key: str) -> str:
    return key if key.startswith("rope_") else key.split(".")[-1]
