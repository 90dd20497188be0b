"""transformers' own classes, built small from their configurations."""

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig

_PLAIN = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 40,
    "max_position_embeddings": 16,
}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
_GROUPED = {**_PLAIN, **_TOKENS, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {
    **_GROUPED,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
_LATENT = {
    **_EXPERTS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16, "vocab_size": 40}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 40}
_BART = {
    **_TOKENS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": 40,
    "max_position_embeddings": 16,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": 0,
}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}
_DEBERTA = {**_PLAIN, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
_MAMBA = {**_TOKENS, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 40}

Sizes = dict[str, Any]
CAUSAL: dict[str, Sizes] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text"), _GROUPED),
    **dict.fromkeys(("olmo", "olmo2", "stablelm", "cohere", "starcoder2", "phi3", "glm", "glm4"), _GROUPED),
    **dict.fromkeys(("olmo3", "ministral", "ministral3", "seed_oss", "helium", "arcee", "apertus"), _GROUPED),
    **dict.fromkeys(("nemotron", "exaone4", "vaultgemma", "cwm", "hunyuan_v1_dense"), _GROUPED),
    **dict.fromkeys(("mixtral", "qwen3_moe", "olmoe", "granitemoe", "phimoe"), _EXPERTS),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), _LATENT),
    **{name: {**_PLAIN, **_TOKENS} for name in ("phi", "gpt_neox", "persimmon")},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 24},
    "llama4_text": {**_EXPERTS, "intermediate_size_mlp": 48},
    "gpt_oss": _EXPERTS,
    "jamba": {**_EXPERTS, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "dbrx": {
        **_TOKENS,
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "vocab_size": 40,
        "max_seq_len": 16,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gptj": {**_GPT, "rotary_dim": 4},
    "codegen": {**_GPT, "n_head": 8, "rotary_dim": 4},
    "gpt_neo": {
        **_TOKENS,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "vocab_size": 40,
        "max_position_embeddings": 16,
    },
    "bloom": {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 40},
    "falcon": {**_PLAIN, **_TOKENS, "new_decoder_architecture": True, "num_kv_heads": 2},
    "mpt": {**_TOKENS, "d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 40, "max_seq_len": 16},
    "opt": {**_PLAIN, **_TOKENS, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "mamba": _MAMBA,
    "mamba2": {**_MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "modernbert-decoder": {**_PLAIN, **_TOKENS, "cls_token_id": 0, "sep_token_id": 0},
    "rwkv": {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 40, "attention_hidden_size": 32},
}
MASKED: dict[str, Sizes] = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta"), _PLAIN),
    **{name: {**_PLAIN, "embedding_size": 16} for name in ("electra", "albert")},
    "distilbert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 40},
    "deberta": _DEBERTA,
    "deberta-v2": {**_DEBERTA, "position_buckets": 8, "norm_rel_ebd": "layer_norm"},
    "modernbert": {**_PLAIN, **_TOKENS, "cls_token_id": 0, "sep_token_id": 0},
}
OTHERS: dict[str, tuple[str, Sizes]] = {
    **dict.fromkeys(("t5", "mt5"), ("AutoModelForSeq2SeqLM", _T5)),
    **dict.fromkeys(("bart", "mbart", "pegasus"), ("AutoModelForSeq2SeqLM", _BART)),
    **dict.fromkeys(("vit", "dinov2", "beit"), ("AutoModelForImageClassification", _VIT)),
    "deit": ("AutoModel", _VIT),
    "swin": (
        "AutoModelForImageClassification",
        {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "image_size": 16, "patch_size": 4, "window_size": 2},
    ),
    **{
        name: ("AutoModel", {"text_config": {**_PLAIN, **_TOKENS}, "vision_config": _VIT, "projection_dim": 16})
        for name in ("clip", "siglip")
    },
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        {**_BART, "max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8},
    ),
    "wav2vec2": (
        "AutoModel",
        {
            **_PLAIN,
            "conv_dim": [16, 16],
            "conv_stride": [2, 2],
            "conv_kernel": [3, 3],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embedding_groups": 4,
            "num_conv_pos_embeddings": 4,
        },
    ),
}
NAMES = (*CAUSAL, *MASKED, *OTHERS)
OTHERS |= {  # not of NAMES
    **dict.fromkeys(("marian", "m2m_100"), ("AutoModelForSeq2SeqLM", _BART)),
    "umt5": ("AutoModelForSeq2SeqLM", _T5),
    "resnet": ("AutoModel", {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"}),
    **{
        name: (
            "AutoModelForImageTextToText",
            {
                "text_config": {"model_type": text, **_GROUPED},
                "vision_config": {"model_type": vision, "head_dim": 8, **_VIT},
                "image_token_id": 39,
                **more,
            },
        )
        for name, text, vision, more in (
            ("llava", "llama", "clip_vision_model", {}),
            ("gemma3", "gemma3_text", "siglip_vision_model", {"mm_tokens_per_image": 4}),
            ("mistral3", "mistral", "pixtral", {"spatial_merge_size": 1}),
        )
    },
}
APART: dict[str, Sizes] = {  # not of NAMES
    "ctrl": {**_GPT, "dff": 48},
    "aria_text": {**_EXPERTS, "moe_num_experts": 4, "moe_topk": 2},
}


def tiny(name: str, seed: int = 0, **changes: Any) -> nn.Module:
    """Build a small model of an architecture, in evaluation mode; on the device that is set."""
    if name in OTHERS:
        kind, sizes = OTHERS[name]
    else:
        kind = "AutoModelForMaskedLM" if name in MASKED else "AutoModelForCausalLM"
        sizes = {**CAUSAL, **MASKED, **APART}[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(name, **{**sizes, **changes})
    model: nn.Module = getattr(transformers, kind).from_config(config)
    return model.eval()


def loaded(folder: Path, kind: Any = transformers.AutoModelForCausalLM) -> Any:
    """Load a model by its class, which must miss nothing and know all of its files."""
    model, loading = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    return model.eval()


def perturb(model: nn.Module, scale: float, seed: int) -> None:
    """Add scale · N(0, 1) to what is trained of a model, as of an adapter: those of PEFT begin as no change."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            if value.requires_grad:
                value.add_(scale * torch.randn(value.shape, generator=generator))
