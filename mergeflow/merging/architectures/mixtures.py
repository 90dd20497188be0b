"""Architectures of mixtures of experts that dense models can become: names of their tensors, and their config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mergeflow.errors import MergeflowError

_PARTS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Target:
    """A mixture's architecture."""

    model_type: str  # its name in config.json
    architecture: str  # the class of transformers
    router_name: str  # the router of block {block}
    expert_name: str  # matrix {part} of expert {expert} in block {block}
    count: str  # the key of the number of experts
    parts: tuple[str, ...] = _PARTS  # the dense model's matrices
    names: tuple[str, ...] = _PARTS
    shared: bool = False  # whether there is an expert that every token passes through

    def router(self, block: int) -> str:
        """Return the name of a router."""
        return self.router_name.format(block=block)

    def expert(self, block: int, expert: int, part: str) -> str:
        """Return the name of a matrix of an expert, of all numbered from 0; `part` is one of `parts`."""
        return self.expert_name.format(block=block, expert=expert, part=self.names[self.parts.index(part)])


_MIXTRAL = Target(
    "mixtral",
    "MixtralForCausalLM",
    "model.layers.{block}.block_sparse_moe.gate.weight",
    "model.layers.{block}.block_sparse_moe.experts.{expert}.{part}.weight",
    "num_local_experts",
    names=("w1", "w3", "w2"),
)
_QWEN = (
    "model.layers.{block}.mlp.gate.weight",
    "model.layers.{block}.mlp.experts.{expert}.{part}.weight",
    "num_experts",
)
TARGETS: dict[str, Target] = {
    "llama": _MIXTRAL,
    "mistral": _MIXTRAL,
    "qwen2": Target("qwen2_moe", "Qwen2MoeForCausalLM", *_QWEN, shared=True),
    "qwen3": Target("qwen3_moe", "Qwen3MoeForCausalLM", *_QWEN),
}
"""What a dense model of each `model_type` becomes."""

# What a dense model means where its config.json is silent, and the mixture's class would mean something else.
_SILENT = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_LEFT = ("attention_bias", "mlp_bias", "pretraining_tp", "max_window_layers", "layer_types", "sliding_window")


def mixture_config(
    dense: Mapping[str, Any], target: Target, experts: int, per_token: int, shared: bool
) -> dict[str, Any]:
    """Return the config.json of a mixture, in which a token passes through `per_token` experts.

    Where no expert is shared and the architecture has one all the same, its width is 1.
    """
    odd = [key for key in ("attention_bias", "mlp_bias", "use_sliding_window") if dense.get(key)]
    if odd:
        raise MergeflowError(f"the base's config.json has {odd[0]}: true, which a {target.model_type} cannot have.")
    config = {**_SILENT, **{key: value for key, value in dense.items() if key not in _LEFT}}
    if "rope_theta" not in dense and "rope_parameters" not in dense:
        config["rope_theta"] = 10000.0
    if "num_key_value_heads" not in dense and dense["model_type"] == "llama":
        config["num_key_value_heads"] = dense["num_attention_heads"]
    config |= {"model_type": target.model_type, "architectures": [target.architecture], target.count: experts}
    config |= {"num_experts_per_tok": per_token, "output_router_logits": False, "router_aux_loss_coef": 0.001}
    if target is _MIXTRAL:
        return config | {"sliding_window": dense.get("sliding_window") if dense["model_type"] == "mistral" else None}
    width = dense["intermediate_size"]
    config |= {"moe_intermediate_size": width, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config | ({"shared_expert_intermediate_size": width if shared else 1} if target.shared else {})
