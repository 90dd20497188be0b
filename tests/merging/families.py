"""Every family of transformers that can be built small: its own class, from its own configuration with fewer of all."""

from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

# Sizes by the names that configurations give them; whatever a configuration has of these is made small.
_SIZES = {
    32: """hidden_size d_model n_embd dim embed_dim embedding_size encoder_hidden_size decoder_hidden_size
        projection_dim hidden_dim d_embed word_embed_proj_dim text_embed_dim vision_embed_dim attention_hidden_size
        encoder_embed_dim image_size""",
    48: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner d_inner moe_intermediate_size
        shared_expert_intermediate_size ffn_hidden_size decoder_intermediate_size encoder_intermediate_size mlp_dim
        feed_forward_proj_dim intermediate_size_mlp shared_intermediate_size""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers num_key_value_heads num_kv_heads n_kv_heads num_experts_per_tok moe_topk
        num_experts_per_token depth num_local_layers vision_layers text_layers decoder_num_hidden_layers
        encoder_num_hidden_layers moe_k topk""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_local_experts num_experts n_routed_experts moe_num_experts mamba_d_state state_size kv_lora_rank
        decoder_num_attention_heads encoder_num_attention_heads num_queries num_query_tokens""",
    8: """head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim attention_head_dim mamba_d_head mamba_headdim
        q_lora_rank patch_size""",
    16: "num_mel_bins max_source_positions max_target_positions",
    64: "vocab_size max_position_embeddings n_positions max_seq_len text_vocab_size codebook_size",
    1: """n_group topk_group num_key_value_groups n_shared_experts num_nextn_predict_layers first_k_dense_replace
        n_groups""",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
FAMILIES = tuple(modeling_auto.MODEL_MAPPING_NAMES)
_MOST = 3_000_000  # parameters of a model that is merged here


def shrunk(content: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values with small sizes."""
    small: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, dict) and key not in ("id2label", "label2id", "rope_parameters", "rope_scaling"):
            small[key] = shrunk(value)
        elif isinstance(value, int) and not isinstance(value, bool) and key in _SMALL:
            small[key] = min(value, _SMALL[key]) if value > 0 else value
        elif isinstance(value, int) and not isinstance(value, bool) and key.endswith("token_id"):
            small[key] = 0
        elif isinstance(value, list) and key == "layer_types":
            small[key] = value[-2:]
        elif key not in ("layer_types", "architectures", "transformers_version", "mlp_layer_types"):
            small[key] = value
    return small


def built(family: str, seed: int = 0, *, headed: bool = False) -> nn.Module | None:
    """Return a small model of a family with all its weights of visible size; None where none can be built so.

    Args:
        headed: Whether it has the head of a language model, where it is one.
    """
    heads = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if headed else {}
    name = heads.get(family, modeling_auto.MODEL_MAPPING_NAMES[family])
    try:
        kind = getattr(transformers, name if isinstance(name, str) else name[0])
        configuration = type(AutoConfig.for_model(family))
        content = shrunk(AutoConfig.for_model(family).to_dict())
        config = configuration.from_dict(content)
        with torch.device("meta"):
            if sum(value.numel() for value in kind(config).parameters()) > _MOST:
                return None
        torch.manual_seed(seed)
        model: nn.Module = kind(config).eval()
    except Exception:  # a configuration that does not shrink so; whatever its class raises then
        return None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(torch.randn(value.shape, generator=generator) * 0.2)
    return model
