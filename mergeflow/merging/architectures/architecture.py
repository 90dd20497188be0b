"""What each tensor is: its role by name, cuts of fused weights, the table of families, a model's architecture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from mergeflow.checkpoints.folders import config_of
from mergeflow.errors import MergeflowError
from mergeflow.late import torch

if TYPE_CHECKING:
    from torch import Tensor

# What a tensor does in its model, by its name: one vocabulary that transformers, timm and open_clip share.

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
    (rf"classifier\.|classification_head|{_B}(?:score|qa_outputs|fc|head(?:_dist)?(?:\.l(?:inear)?)?)\.\w+$", "head"),
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


# How fused weights are cut into the matrices they hold: one cut, and the rule that finds it from config.json.

Config = Mapping[str, Any]
Sizes = tuple[int, Sequence[int]]
ROWS, COLUMNS = -2, -1


@dataclass(frozen=True)
class Cut:
    """A fused weight: its axis holds `groups` times parts of the given sizes, side by side.

    There is one group, or as many as heads where each head has its own query, key and value.

    Example:
        >>> two_heads = Cut(ROWS, 2, (1, 1, 1))  # rows q0 k0 v0 q1 k1 v1
        >>> [part.flatten().tolist() for part in two_heads.split(torch.arange(6.0).reshape(6, 1))]
        [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """

    axis: int  # -2 for rows (a torch Linear), -1 for columns (a Conv1D, stored [in, out])
    groups: int
    sizes: tuple[int, ...]  # rows or columns of each part within one group

    def split(self, matrix: Tensor) -> list[Tensor]:
        """Return the parts of [..., m, n]; views where each lies in one piece."""
        if self.groups == 1:
            return list(matrix.split(self.sizes, self.axis))
        grouped = matrix.unflatten(self.axis, (self.groups, sum(self.sizes)))
        return [part.flatten(self.axis - 1, self.axis) for part in grouped.split(self.sizes, self.axis)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the fused weight [..., m, n] of its parts, in the order of `split`."""
        if self.groups == 1:
            return torch.cat(list(parts), self.axis)
        grouped = [part.unflatten(self.axis, (self.groups, -1)) for part in parts]
        return torch.cat(grouped, self.axis).flatten(self.axis - 1, self.axis)

    def __str__(self) -> str:
        """Say it in words, for `mergeflow check`."""
        sizes = "/".join(map(str, self.sizes)) if len(set(self.sizes)) > 1 else f"{len(self.sizes)} × {self.sizes[0]}"
        times = f", {self.groups} times in turn" if self.groups > 1 else ""
        return f"{'rows' if self.axis == ROWS else 'columns'} {sizes}{times}"


@dataclass(frozen=True)
class Form:
    """How a tensor is made of matrices [out, in]."""

    stacked: bool = False  # whether it is a stack of experts, [E, m, n]
    cut: Cut | None = None  # how each matrix is cut; None where it is whole
    transposed: bool = False  # whether it is stored as [in, out]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return the matrices of [..., m, n] or [..., E, m, n]; views where they can be."""
        matrices = tensor.unbind(-3) if self.stacked else [tensor]
        parts = [part for matrix in matrices for part in (self.cut.split(matrix) if self.cut else [matrix])]
        return [part.mT for part in parts] if self.transposed else parts

    def shapes(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return the shape [out, in] of each matrix of a tensor [..., m, n], in order of `split`; of a stack's one."""
        rows, columns = shape[-2:]
        parts = [(rows, columns)]
        if self.cut is not None:
            sizes = [self.cut.groups * size for size in self.cut.sizes]
            parts = [(size, columns) if self.cut.axis == ROWS else (rows, size) for size in sizes]
        return [(n, m) for m, n in parts] if self.transposed else parts

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor [..., m, n] or [..., E, m, n] of its matrices, in order of `split`; one is not copied."""
        if self.transposed:
            parts = [part.mT for part in parts]
        if self.cut is not None:
            each = len(self.cut.sizes)
            parts = [self.cut.join(parts[at : at + each]) for at in range(0, len(parts), each)]
        return torch.stack(list(parts), -3) if self.stacked else parts[0]


@dataclass(frozen=True)
class Rule:
    """What the cut of a fused weight follows from."""

    words: str  # the layout, for the page of architectures
    cut: Callable[[Config, int, int], Sizes]  # (config.json, lengths of the fused axis and of the other) → the cut
    axis: int = ROWS  # the fused axis
    always: bool = False  # whether it is cut without `split_qkv` too, because it is not a matrix as it stands

    def __call__(self, name: str, shape: Sequence[int], config: Config) -> Cut:
        """Return the cut of one tensor."""
        length, otherwise = shape[self.axis], "" if self.always else ", or leave `split_qkv: false`"
        try:
            groups, sizes = self.cut(config, length, shape[-3 - self.axis])
        except (KeyError, TypeError, ZeroDivisionError) as error:
            raise MergeflowError(
                f"tensor '{name}' is fused ({self.words}), and how depends on {error} of config.json, which is missing "
                f"or not a number. Put the model's config.json next to its weights{otherwise}."
            ) from None
        if groups * sum(sizes) != length or min(sizes) < 1:
            raise MergeflowError(
                f"tensor '{name}' has {length} {'rows' if self.axis == ROWS else 'columns'}, but its layout "
                f"({self.words}) gives {groups} × {list(sizes)}: config.json is of another model, or the layout is "
                f"another one. Correct it{otherwise}."
            )
        return Cut(self.axis, groups, tuple(sizes))


# The table: which `model_type` is of which family, and what each family names and fuses, and how.

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


# A model's family and its config.json, and what they say of each tensor.

Selected = Word | tuple[str, ...]


@dataclass(frozen=True)
class Architecture:
    """What a model's tensors are, by its line of the table and its config.json, empty where there is none."""

    family: Family = UNKNOWN
    config: Config = field(default_factory=dict)

    def role(self, name: str, shape: Sequence[int]) -> Role | None:
        """Return a tensor's role; None where its name says nothing and it could be a matrix."""
        return role_of(name, shape, self.family.roles)

    def is_wide(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a tensor is a matrix with both sides > 1, or a stack of such matrices of experts."""
        if name.endswith("bias") or min(shape[-2:], default=0) < 2:
            return False
        return len(shape) == 2 or (len(shape) == 3 and self.role(name, shape) == "expert")

    def treats(self, name: str, shape: Sequence[int], selection: Selected) -> bool:
        """Whether a selection, a word or glob patterns of names, takes a tensor as a matrix or a stack of matrices."""
        if not self.is_wide(name, shape):
            return False
        if isinstance(selection, tuple):
            return any(fnmatchcase(name, pattern) for pattern in selection)
        role = self.role(name, shape)
        return role in TREATED[selection] or (selection == "all" and role in self.family.also)

    def fused(self, name: str) -> Rule | None:
        """Return the rule by which a fused weight is cut, where one is known."""
        rules = (*self.family.fused, *(EVERYWHERE if "model_type" in self.config else BARE))
        return next((rule for pattern, rule in rules if re.search(pattern, name, re.IGNORECASE)), None)

    def form(self, name: str, shape: Sequence[int], split_fused: bool) -> Form:
        """Return how a treated tensor of a shape, [m, n] or [E, m, n], is made of matrices."""
        rule = self.fused(name)
        cut = rule(name, shape, self.config) if rule is not None and (split_fused or rule.always) else None
        transposed = self.family.transposed is not None and bool(re.search(self.family.transposed, name))
        return Form(len(shape) == 3, cut, transposed)


def architecture_of(state: Mapping[str, Tensor], config: Config | None = None) -> Architecture:
    """Return a model's architecture: by `model_type` of config.json, given or its folder's, or without one by names.

    Example:
        >>> architecture_of({}, {"model_type": "gpt2"}).family.name
        'gpt2'
    """
    if config is None:
        config = config_of(state)
    model_type = config.get("model_type")
    return Architecture(family_of(model_type if isinstance(model_type, str) else None, state), config)
