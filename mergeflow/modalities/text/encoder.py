"""An encoder of transformers: built from its configuration, loaded from a folder or the hub, pooled to features."""

import json
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.modalities.modules import activations, own_generator
from mergeflow.modalities.pretrained import (
    architecture_text,
    check_whole,
    load_pretrained,
    quiet,
    transformers,
)
from mergeflow.modalities.text.batches import Group, TokenBatch
from mergeflow.modalities.text.tokenizer import ASSETS

_ROUNDING = 1e-4  # of the largest feature; encoders that heed the mask differ by 1e-6


class TextEncoder(nn.Module):
    """Tokens in, one vector a text out; the weights have the names of transformers' own models with a head.

    Args:
        model: an encoder of `AutoModel`; a pooler that it has is taken off.
        pooling: `mean` over the tokens that are not padding, or the `first` token.
    """

    def __init__(self, model: Any, pooling: str) -> None:
        super().__init__()
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # a head of pre-training; without that head's weights it would be random
        self.part = str(model.base_model_prefix) or "encoder"
        self.add_module(self.part, model)
        self.pooling, self.width = pooling, int(model.config.hidden_size)

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return features [n, D] of a batch, in its rows' order."""
        return self.gathered(batch, [self.pooled(self._hidden(group), group) for group in batch.groups])

    def gathered(self, batch: TokenBatch, parts: Sequence[Tensor]) -> Tensor:
        """Join the outputs of a batch's groups, [n_g, ...] each, in the order of its rows, [n, ...]."""
        whole = torch.cat(list(parts)) if len(parts) > 1 else parts[0]
        return whole if batch.order is None else whole[batch.order]

    def pooled(self, hidden: Tensor, group: Group) -> Tensor:
        """Return one vector a text, [n, D], of its tokens' vectors [n, L, D]."""
        if self.pooling == "first":
            return hidden[:, 0]
        if group.mask is None:
            return hidden.mean(dim=1)
        mask = group.mask[:, :, None].to(hidden.dtype)
        return (hidden * mask).sum(dim=1) / mask.sum(dim=1)

    def _hidden(self, group: Group) -> Tensor:
        asked = {"input_ids": group.ids, "attention_mask": None if group.mask is None else group.mask.long()}
        if group.segments is not None:
            asked["token_type_ids"] = group.segments
        hidden: Tensor = self.get_submodule(self.part)(**asked)[0]
        return hidden


def watched(module: nn.Module, batch: TokenBatch, layers: Sequence[str]) -> dict[str, Tensor]:
    """Return the outputs of layers for a batch: of a layer that gives [n, L, D], the pooled [n, D]."""
    assert isinstance(module, TextEncoder)
    outputs = [_of_group(module, group, layers) for group in batch.groups]
    return {layer: module.gathered(batch, [output[layer] for output in outputs]) for layer in layers}


def _of_group(module: TextEncoder, group: Group, layers: Sequence[str]) -> dict[str, Tensor]:
    values = activations(module, layers, lambda: module(TokenBatch((group,), None)))
    return {layer: module.pooled(value, group) if value.ndim == 3 else value for layer, value in values.items()}


def build_encoder(config: str, pooling: str) -> TextEncoder:
    """Return the encoder of a configuration, its weights of no meaning."""
    values = json.loads(config)
    with quiet(), own_generator(0):
        architecture = transformers("AutoConfig").for_model(values.pop("model_type"), **values)
        return TextEncoder(transformers("AutoModel").from_config(architecture, dtype=torch.float32), pooling).eval()


def load_encoder(place: str, root: Path, pooling: str) -> tuple[TextEncoder, str]:
    """Load a pre-trained encoder."""
    model, lacking = load_pretrained("AutoModel", "the model", place, root, ASSETS)
    config = model.config
    decodes = any(getattr(config, name, False) for name in ("is_encoder_decoder", "is_decoder"))
    if decodes or hasattr(model, "decoder"):  # of T5 transformers builds both, whichever part was saved
        raise MergeflowError(
            f"model.pretrained '{place}' is a {config.model_type} with a decoder; expected an encoder."
        )
    if "attention_mask" not in signature(model.forward).parameters:
        raise MergeflowError(
            f"model.pretrained '{place}' is a {config.model_type}, whose features depend on a text's padding, since "
            "it takes no attention mask; expected an encoder that takes one, such as BERT."
        )
    check_whole(place, lacking)
    return TextEncoder(model, pooling).eval(), architecture_text(config.to_dict())


@torch.no_grad()
def check_length(encoder: TextEncoder, pad: int, max_length: int) -> None:
    """Refuse texts that may be longer than the positions that an encoder knows."""
    other = 0 if pad else 1
    try:
        encoder(TokenBatch((Group(torch.full((1, max_length), other), None, None),), None))
    except (IndexError, RuntimeError) as error:
        positions = getattr(encoder.get_submodule(encoder.part).config, "max_position_embeddings", "unknown")
        raise MergeflowError(
            f"data.max_length is {max_length}, which this encoder cannot take (its max_position_embeddings: "
            f"{positions}): lower it, or choose another base."
        ) from error


@torch.no_grad()
def check_padding(encoder: TextEncoder, pad: int, max_length: int, place: str) -> None:
    """Refuse an encoder whose features of a text depend on the padding after it, and so on what it is batched with.

    ConvBERT's convolutions look at padding, Nystromformer's landmarks are means over it; both take a mask.
    """
    config: Any = encoder.get_submodule(encoder.part).config
    text = torch.arange(max(1, max_length // 2))[None] % config.vocab_size
    text[text == pad] = 0 if pad else 1
    padded = torch.cat([text, torch.full((1, max_length - text.shape[1]), pad)], dim=1)
    mask = torch.arange(max_length)[None] < text.shape[1]
    alone = encoder(TokenBatch((Group(text, None, None),), None))
    beside_padding = encoder(TokenBatch((Group(padded, mask, None),), None))
    if float((alone - beside_padding).abs().max()) > _ROUNDING * float(alone.abs().max()):
        raise MergeflowError(
            f"model.pretrained '{place}': its features of a text depend on the padding after it, although it takes an "
            "attention mask; expected an encoder whose features do not, such as BERT."
        )
