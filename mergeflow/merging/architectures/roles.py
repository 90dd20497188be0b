"""What a tensor does in its model, told by its name: one vocabulary that transformers, timm and open_clip share."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Literal, get_args

Role = Literal["attention", "mlp", "expert", "projection", "router", "embedding", "position", "head", "norm", "other"]
ROLES: tuple[Role, ...] = get_args(Role)
Word = Literal["attn_mlp", "mlp", "all"]
TREATED: dict[Word, tuple[Role, ...]] = {
    "attn_mlp": ("attention", "mlp", "expert"),
    "mlp": ("mlp", "expert"),
    "all": ("attention", "mlp", "expert", "projection"),
}
"""Roles that `matrices` takes. Embeddings, positions and heads are tables of rows that are looked up or compared, and a
router's rows are compared too: their singular directions have no meaning across rows."""

Patterns = tuple[tuple[str, Role], ...]
"""Regular expressions searched in the lower-case name, each with its role; the first that fits decides."""

# `B` is where a part of a name begins, `E` where it ends.
_B, _E = r"(?:^|\.)", r"(?:\.|$)"
_BLOCK = r"(?:(?:layers?|blocks?|encoders)\.\d+|\.head)\."
VOCABULARY: Patterns = (
    # A norm is told by the module that owns the parameter: dbrx keeps attention inside `norm_attn_norm`.
    (rf"{_B}\w*norm\w*\.\w+$|{_B}(?:ln|bn|\w+_ln)\w*\.\w+$|(?:attention|pos_conv_embed)\.\w*norm", "norm"),
    (r"num_batches_tracked$|logit_(?:scale|bias)$|layer_?scale|lambda_?\w*$|gamma_\w+$|\bls\d\.gamma$", "other"),
    (rf"{_B}router{_E}|shared_expert_gate\.|(?:mlp|moe|ffn|feed_forward)\.gate\.|expert_bias$", "router"),
    (rf"{_B}experts?{_E}|{_B}shared_experts?{_E}|(?:moe|\.mlp)\.(?:input|output)_linear\.", "expert"),
    # Not matrices, though they have two dimensions: biases of each head, scales, kernels of one channel each.
    (r"(?:attention_biases|bias_idxs|r_[wrs]_bias|\b(?:pos_)?bias_[uv])$", "position"),
    (r"_clip\.scale$|_sconv\.static_weight$", "other"),
    (r"relative_(?:attention_bias|position)|rel_embeddings|rel_pos|inv_freq|rotary_emb|alibi", "position"),
    (rf"embed_out\.|lm_head|predictions?\.|{_B}lm_predictions|vocab_(?:transform|projector)|final_logits_bias", "head"),
    (rf"classifier\.|classification_head|{_B}(?:score|qa_outputs|fc|head|head_dist)\.\w+$", "head"),
    (rf"{_B}\w+(?<!\.[qkv])_head\.\w+$|(?:^|(?<!mlp)\.)proj_out\.\w+$|{_B}logits_\w+\.\w+$", "head"),
    (r"\boutput_projection\.|^pred_layer\.|^lm_loss\.|(?:^|\bhead\.)decoder\.(?:weight|bias)$", "head"),
    (r"^output\.(?:weight|bias)$", "head"),
    # An encoder inside a module of embeddings (`embed_tokens_extend.image_embed…`) has blocks like any other.
    (rf"{_BLOCK}(?:(?!embed|position).)*(?:attn|attention)(?:(?!embed|position).)*$", "attention"),
    (rf"{_BLOCK}(?:(?!embed|position).)*(?:mlp|ffn|feed_forward)(?:(?!embed|position).)*$", "mlp"),
    (r"embeddings?_proj\w*\.|embed_proj\.|embedding_hidden_mapping_in|project_(?:in|out)\.", "projection"),
    (r"position|pos_(?:embed|conv_embed)|\bwpe\.", "position"),
    (r"embed(?:dings?)?(?:_in|_tokens)?(?:\b|_)|token_type|\bwte\.|shared\.weight$", "embedding"),
    (r"^transformer\.w\.weight$", "embedding"),  # CTRL
    (r"(?:cls|class|mask|distillation|register|dist)_(?:token|embedding)s?$", "embedding"),
    (r"\.probe$|\bconv_?(?:1|proj)\.", "embedding"),
    (rf"attn|attention|{_B}to_(?:q|k|v|kv|qkv|out)\.|{_B}(?:[qkvo]|qkv|query|key|value)_proj\.", "attention"),
    (rf"{_B}(?:queries|keys|values)\w*\.linear\.|\d\.(?:module\.)?projection\.linear\.", "attention"),
    (rf"token_mixer\.(?:qkv|proj)\.|{_B}head\.output_proj\.|{_B}assign\.proj\.", "attention"),
    (rf"{_B}temporal_(?:dense|fc)\.|{_B}\w+_self_att\.|{_B}factoratt_\w+\.|mhsa\.|{_B}xca\.", "attention"),
    (rf"{_B}adapter_modules\.\w+\.dense\d\.|{_B}\w+_inter\.dense\.", "mlp"),
    (r"mlp|ffn|ffw_|feed_forward|denserelu|(?:intermediate|output)(?:_\w+)?\.dense\.", "mlp"),
    (rf"(?:gate|up|down)_proj\.|{_B}linear_(?:up|down)\.|{_B}ff\d?\.|pwconv\d\.|pointwise_(?:conv|lin)\d\.", "mlp"),
    (r"^features\.\d+\.\d+\.block\.\d+\.weight$", "mlp"),  # torchvision's ConvNeXt
    (rf"{_B}fc(?:\d|_in|_out)\.|{_B}linear[12]\.|^layers\.\d+\.weight$", "mlp"),
    (r"a_log$|conv1d\.(?:weight|bias)$|dt_bias$|time_mix|time_decay|time_first|\.d$", "other"),
    (r"mixer\.|mamba\.|ssm\.|pooler\.|projector\.|projection\b|downsample\.|reduction\.|connector\.", "projection"),
    (rf"{_B}lin\d*\.weight$|{_B}proj$|(?:linear|dense|proj)\w*\.weight$|per_layer_input_gate\.", "projection"),
)  # fmt: skip


def role_of(name: str, shape: Sequence[int], patterns: Patterns = ()) -> Role | None:
    """Return a tensor's role by its name, or None where no pattern fits and it could be a matrix.

    Patterns of its architecture come before the shared ones; what is not 2-D, or has one row, is else `other`.

    Example:
        >>> role_of("model.layers.0.self_attn.q_proj.weight", (64, 64)), role_of("lm_head.weight", (999, 64))
        ('attention', 'head')
    """
    role = _named(name, patterns)
    return role if role is not None or (len(shape) == 2 and min(shape) > 1) else "other"


@cache
def _named(name: str, patterns: Patterns) -> Role | None:
    text = name.lower()
    return next((role for pattern, role in (*patterns, *VOCABULARY) if re.search(pattern, text)), None)
