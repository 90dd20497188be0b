"""Gram matrices of the inputs of every linear weight, as RegMean needs them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mergeflow.errors import MergeflowError
from mergeflow.evaluation.accuracy import in_batches
from mergeflow.modality import Model, Predictions


class _Totals:
    """Sums of XᵀX and of rows, by the weight's name."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.rows: dict[str, int] = {}

    def add(self, name: str, inputs: Tensor) -> None:
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).float()
        product = rows.T @ rows
        if name not in self.sums:
            self.sums[name], self.rows[name] = torch.zeros_like(product, dtype=torch.float64), 0
        self.sums[name] += product
        self.rows[name] += len(rows)


@torch.no_grad()
def input_grams(
    model: Model,
    examples: Predictions,
    *,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    r"""Return the Gram matrix of the inputs of every linear weight.

    G = 1/R Σ_r x_r x_rᵀ over all R rows (tokens of all examples) that enter a weight W [out, in]

    The mean, not the sum: experts with fewer examples or tokens count the same. Linear weights are those of `nn.Linear`
    and of self-attention: the fused in_proj (q, k and v see the same rows, so one Gram serves the 3d × d weight) and
    the out_proj, whose inputs are the joined heads. Convolutions, embeddings, norms and bare projections get none, and
    `regmean` averages them, as its authors do.

    Args:
        model: Its module is put into evaluation mode.
        examples: At least one; labels play no part.
        batch_size: Examples per forward pass.
        progress: Called with examples done and in all.

    Returns:
        [in, in] float32 by the weight's name, symmetric; products in float32, summed in float64.

    Raises:
        MergeflowError: the model has no linear weight.

    Source: Jin et al., Dataless knowledge fusion by merging weights (ICLR 2023), section 3.2.
    """
    model.module.eval()
    totals = _Totals()
    hooks = _watch(model.module, totals)
    try:
        done = 0
        for rows in in_batches(len(examples), batch_size):
            examples.log_p(model, rows)
            done += len(rows)
            if progress is not None:
                progress(done, len(examples))
    finally:
        for hook in hooks:
            hook.remove()
    if not totals.sums:
        raise MergeflowError("this model has no linear weight with inputs to measure: RegMean would be the average.")
    return {name: (total / totals.rows[name]).float().cpu() for name, total in totals.sums.items()}


def _watch(module: nn.Module, totals: _Totals) -> list[Any]:
    """Put hooks before every linear layer and every attention."""
    hooks = []
    for name, part in module.named_modules():
        if isinstance(part, nn.MultiheadAttention):
            hooks.append(part.register_forward_pre_hook(_attention_hook(name, totals), with_kwargs=True))
        elif isinstance(part, nn.Linear):
            hooks.append(part.register_forward_pre_hook(_linear_hook(f"{name}.weight", totals)))
    return hooks


def _linear_hook(name: str, totals: _Totals) -> Callable[..., None]:
    # The out_proj inside an attention is a Linear that is never called: its hook stays silent.
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        totals.add(name, args[0])

    return hook


def _attention_hook(name: str, totals: _Totals) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key, value = (
            args[at] if at < len(args) else kwargs[name] for at, name in enumerate(("query", "key", "value"))
        )
        # Attention to other rows (poolers): no single X multiplies the fused weight, so it has no Gram.
        if query is not key or key is not value or module.in_proj_weight is None:
            return
        totals.add(f"{name}.in_proj_weight", query)
        totals.add(f"{name}.out_proj.weight", _joined_heads(module, query, kwargs))

    return hook


def _joined_heads(module: Any, query: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return what enters out_proj: the attention with the identity in its place."""
    rows = query.transpose(0, 1) if module.batch_first and query.ndim == 3 else query
    identity = torch.eye(module.embed_dim, dtype=query.dtype, device=query.device)
    heads, _ = F.multi_head_attention_forward(
        rows,
        rows,
        rows,
        module.embed_dim,
        module.num_heads,
        module.in_proj_weight,
        module.in_proj_bias,
        module.bias_k,
        module.bias_v,
        module.add_zero_attn,
        0.0,
        identity,
        None,
        training=False,
        need_weights=False,
        attn_mask=kwargs.get("attn_mask"),
        key_padding_mask=kwargs.get("key_padding_mask"),
        is_causal=kwargs.get("is_causal", False),
    )
    return heads
