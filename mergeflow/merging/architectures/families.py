"""The table of architectures: which `model_type` is of which family, and what each family names and fuses, and how."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mergeflow.merging.architectures.cuts import COLUMNS, Config, Rule, Sizes
from mergeflow.merging.architectures.roles import Patterns, Role

Fused = tuple[tuple[str, Rule], ...]
"""Regular expressions searched in the name of a fused weight, each with the rule of its cut."""


@dataclass(frozen=True)
class Family:
    """Architectures that name and fuse their weights alike."""

    name: str  # what `mergeflow check` calls it
    types: tuple[str, ...]  # the `model_type`s of config.json
    fused: Fused = ()  # its fused weights beside `in_proj_weight` of torch's own attention, which all families share
    roles: Patterns = ()  # patterns of names that mean something else here than elsewhere
    sign: str | None = None  # a name that only this family has, for state dicts without config.json
    also: tuple[Role, ...] = ()  # roles that `matrices: all` takes here besides the usual ones
    transposed: str | None = None  # names of weights that are stored as [in, out]


def size(config: Config, *keys: str) -> int:
    """Return a size of config.json under the first of its names that is there."""
    for key in keys:
        if isinstance(config.get(key), int) and not isinstance(config.get(key), bool):
            return int(config[key])
    raise KeyError(keys[0])


def heads(config: Config) -> int:
    """Return the number of attention heads."""
    return size(config, "num_attention_heads", "n_head", "n_heads", "num_heads")


def _equal(count: int) -> Callable[[Config, int, int], Sizes]:
    return lambda config, length, _: (1, [length // count] * count)


def _per_head(config: Config, length: int, _: int) -> Sizes:
    return heads(config), [length // (3 * heads(config))] * 3


def _grouped(config: Config, length: int, _: int) -> Sizes:
    """Query heads, then key heads, then value heads."""
    queries = heads(config)
    given = {**config, **(config.get("attn_config") or {})}
    keys = size(given, "num_key_value_heads", "kv_n_heads")
    width = length // (queries + 2 * keys)
    return 1, [queries * width, keys * width, keys * width]


def _falcon(config: Config, length: int, _: int) -> Sizes:
    queries = heads(config)
    if config.get("new_decoder_architecture"):
        groups = size(config, "num_kv_heads")
        width = length // (queries + 2 * groups)
        return groups, [queries // groups * width, width, width]
    if config["multi_query"]:
        width = length // (queries + 2)
        return 1, [queries * width, width, width]
    return _per_head(config, length, _)


def _bigcode(config: Config, length: int, _: int) -> Sizes:
    if not config["multi_query"]:
        return _per_head(config, length, _)
    width = size(config, "n_embd", "hidden_size")
    return 1, [width, (length - width) // 2, (length - width) // 2]


def _dbrx_experts(config: Config, length: int, _: int) -> Sizes:
    count = size(config["ffn_config"], "moe_num_experts")
    return 1, [length // count] * count


THIRDS = Rule("query, key and value: thirds of the rows", _equal(3))
COLUMN_THIRDS = Rule("query, key and value: thirds of the columns", lambda config, _, rows: (1, [rows] * 3), COLUMNS)
PER_HEAD = Rule("query, key and value of each head in turn", _per_head)
GROUPED = Rule("all query heads, then all key heads, then all value heads", _grouped)
FALCON = Rule("of each group of heads (or head, or once) its queries, its key, its value", _falcon)
BIGCODE = Rule("all queries, then the one key and the one value; or each head in turn", _bigcode)
CODEGEN = Rule("query, value and key of each quarter of the heads in turn", lambda _, rows, __: (4, [rows // 12] * 3))
HALVES = Rule("gate and up: halves of the rows", _equal(2))
COLUMN_HALVES = Rule("gate and up: halves of the columns", _equal(2), COLUMNS)
COLUMN_PAIRS = Rule("gate and up: columns in turn", lambda _, columns, __: (columns // 2, [1, 1]), COLUMNS)
LATENT_DOWN = Rule(
    "latent key/value, then the rotary key",
    lambda config, *_: (1, [size(config, "kv_lora_rank"), size(config, "qk_rope_head_dim")]),
)
LATENT_UP = Rule(
    "key and value of each head in turn",
    lambda config, *_: (heads(config), [size(config, "qk_nope_head_dim"), size(config, "v_head_dim")]),
)
DBRX_EXPERTS = Rule("the experts below each other", _dbrx_experts, always=True)

# Torch's own attention and, in state dicts of timm and DINO, `attn.qkv` hold query, key and value below each other.
EVERYWHERE: Fused = ((r"\bin_proj_weight$", THIRDS),)
BARE: Fused = (*EVERYWHERE, (r"(?:attn|attention)\.qkv\.weight$", THIRDS))
# Names by which fused weights go, whatever the family: where no rule knows such a weight, `split_qkv` is refused.
LOOKS_FUSED = re.compile(r"qkv|query_key_value|c_attn|w_pack|gate_up|in_proj_weight|kv_b_proj", re.IGNORECASE)
_STACKED: Fused = ((r"experts\.gate_up_proj$", HALVES), (r"moe\.input_linear\.weight$", HALVES))
_LATENT: Fused = ((r"\.kv_a_proj_with_mqa\.weight$", LATENT_DOWN), (r"\.kv_b_proj\.weight$", LATENT_UP))
_IN_OUT_EXPERTS = r"experts\.(?:gate_up_proj|down_proj)$"
_CLIP: Patterns = ((r"text_projection", "head"), (r"visual\.head\.proj|visual\.proj$|visual_projection", "projection"))

FAMILIES: tuple[Family, ...] = (
    Family(
        "llama",
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo", "olmo2", "stablelm", "cohere",
         "cohere2", "granite", "ernie4_5", "smollm3", "olmo3", "ministral", "ministral3", "seed_oss", "helium", "arcee",
         "apertus", "nemotron", "exaone4", "vaultgemma", "cwm", "hunyuan_v1_dense"),
    ),
    Family("mixture", ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "granitemoe", "jamba"), _STACKED),
    Family("deepseek", ("deepseek_v2", "deepseek_v3"), _STACKED + _LATENT),
    Family(
        "llama4", ("llama4", "llama4_text"), ((r"experts\.gate_up_proj$", COLUMN_HALVES),), transposed=_IN_OUT_EXPERTS
    ),
    Family("gpt_oss", ("gpt_oss",), ((r"experts\.gate_up_proj$", COLUMN_PAIRS),), transposed=_IN_OUT_EXPERTS),
    Family(
        "dbrx", ("dbrx",), ((r"attn\.wqkv\.weight$", GROUPED), (r"experts\.mlp\.(?:w1|v1|w2)$", DBRX_EXPERTS)),
        sign=r"norm_attn_norm\.attn\.Wqkv\.weight$", transposed=r"experts\.mlp\.w2$",
    ),
    Family("phi", ("phi",)),
    Family("phi3", ("phi3",), ((r"\.qkv_proj\.weight$", GROUPED), (r"\.gate_up_proj\.weight$", HALVES))),
    Family("glm", ("glm", "glm4"), ((r"\.gate_up_proj\.weight$", HALVES),)),
    Family(
        "gpt2", ("gpt2",), ((r"\.c_attn\.weight$", COLUMN_THIRDS),), sign=r"\bh\.\d+\.attn\.c_attn\.weight$",
        transposed=r"\.(?:c_attn|q_attn|c_proj|c_fc)\.weight$",
    ),
    Family("gpt_bigcode", ("gpt_bigcode",), ((r"\.c_attn\.weight$", BIGCODE),)),
    Family("gpt_neo", ("gpt_neo", "gptj")),
    Family("codegen", ("codegen",), ((r"\.qkv_proj\.weight$", CODEGEN),)),
    Family("gpt_neox", ("gpt_neox", "persimmon", "bloom"), ((r"\.query_key_value\.weight$", PER_HEAD),)),
    Family("falcon", ("falcon",), ((r"\.query_key_value\.weight$", FALCON),)),
    Family("mpt", ("mpt",), ((r"\.wqkv\.weight$", THIRDS),), sign=r"(^|\.)blocks\.\d+\.attn\.Wqkv\.weight$"),
    Family("opt", ("opt",)),
    Family("starcoder2", ("starcoder2",)),
    Family("bert", ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "albert", "deberta-v2")),
    Family("deberta", ("deberta",), ((r"attention\.self\.in_proj\.weight$", PER_HEAD),)),
    Family(
        "modernbert", ("modernbert", "modernbert-decoder"), ((r"\.wqkv\.weight$", THIRDS), (r"\.wi\.weight$", HALVES)),
        roles=((r"^(?:lm_)?head\.dense\.", "head"),),
        sign=r"(^|\.)layers\.\d+\.attn\.Wqkv\.weight$",
    ),
    Family("t5", ("t5", "mt5")),
    Family("bart", ("bart", "mbart", "pegasus")),
    Family("vit", ("vit", "deit", "dinov2", "beit", "swin")),
    # Published results on CLIP treat its position tables as matrices (2-D and not the text's tables): so do we.
    Family("clip", ("clip", "siglip"), roles=_CLIP, also=("position",),
           sign=r"resblocks\.|text_projection|positional_embedding$|\bvisual\.(?:proj|conv1|trunk|attnpool)\b"),
    Family("whisper", ("whisper",)),
    Family("wav2vec2", ("wav2vec2",)),
    Family("mamba", ("mamba", "mamba2")),
    Family("rwkv", ("rwkv",)),
)  # fmt: skip
UNKNOWN = Family("unknown", ())


def family_of(model_type: str | None, names: Iterable[str]) -> Family:
    """Return a model's family by its `model_type`, or without one by a name that only one family has.

    Example:
        >>> family_of("bloom", ()).name, family_of(None, ["visual.conv1.weight"]).name
        ('gpt_neox', 'clip')
    """
    if model_type is not None:
        return next((family for family in FAMILIES if model_type in family.types), UNKNOWN)
    signed = [family for family in FAMILIES if family.sign is not None]
    for name in names:
        for family in signed:
            if re.search(str(family.sign), name):
                return family
    return UNKNOWN
