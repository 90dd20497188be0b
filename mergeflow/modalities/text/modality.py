"""Texts as a modality: encoders are merged; every task has a trained head, which is never merged."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mergeflow.checkpoints import write_checkpoint
from mergeflow.data import load_manifest, load_split
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import SECTION
from mergeflow.modalities.classification import Classification, Regression, check_classes, warm
from mergeflow.modalities.heads import Head, drawn_head, save_head
from mergeflow.modalities.metrics import find_metric, metric_of
from mergeflow.modalities.modules import activations, own_generator
from mergeflow.modalities.pretrained import (
    architecture_text,
    check_folder,
    check_prepared,
    check_whole,
    find_place,
    load_pretrained,
    quiet,
    transformers,
)
from mergeflow.modalities.text.sections import DataSection, ModelSection
from mergeflow.modalities.text.tokenizer import ASSETS, load_tokenizer
from mergeflow.modality import Base, Modality, Model, Network

# Padding that is computed rather than starting another group, in tokens. On one core, with 4 layers × 128 and batches
# of 256, an evaluation took .965 s with 0, .80 to .81 s with 32 to 128, and .84 s with 256.
SPARED = 64


@dataclass(frozen=True)
class Group:
    """Examples that are padded to one length.

    Attributes:
        ids: int64 [n, L].
        mask: bool [n, L], False where there is padding; None where there is none.
        segments: int64 [n, L]; None where the model takes none.
    """

    ids: Tensor
    mask: Tensor | None = None
    segments: Tensor | None = None

    def to(self, device: torch.device) -> "Group":
        mask, segments = (None if part is None else part.to(device) for part in (self.mask, self.segments))
        return Group(self.ids.to(device), mask, segments)


@dataclass(frozen=True)
class TokenBatch:
    """A batch: its groups, and `order`, int64 [n], which puts what they give one after the other in the rows' order."""

    groups: tuple[Group, ...]
    order: Tensor | None = None

    @classmethod
    def of(cls, ids: Tensor, mask: Tensor | None = None) -> "TokenBatch":
        """Return a batch of one group: ids and mask [n, L]."""
        return cls((Group(ids, mask),))

    def to(self, device: torch.device) -> "TokenBatch":
        order = None if self.order is None else self.order.to(device)
        return TokenBatch(tuple(group.to(device) for group in self.groups), order)


@dataclass(frozen=True)
class Tokens:
    """The tokens of N examples, which may lie on disk; indexed by rows it gives a `TokenBatch`.

    Attributes:
        ids: int32 [N, max_length].
        lengths: int64 [N], in memory.
        segments: uint8 [N, max_length]; None where the model takes none.
    """

    ids: np.ndarray
    lengths: np.ndarray
    segments: np.ndarray | None
    device: torch.device

    def __getitem__(self, rows: Tensor | slice) -> TokenBatch:
        numbers = np.arange(len(self.lengths))[rows] if isinstance(rows, slice) else rows.cpu().numpy()
        parts = list(groups(self.lengths[numbers]))
        order = None if len(parts) == 1 else torch.from_numpy(np.argsort(np.concatenate(parts))).to(self.device)
        return TokenBatch(tuple(self._group(numbers[part]) for part in parts), order)

    def _group(self, numbers: np.ndarray) -> Group:
        lengths = self.lengths[numbers]
        longest = int(lengths.max())
        mask = None if lengths.min() == longest else torch.from_numpy(np.arange(longest) < lengths[:, None])
        ids, segments = self.ids[numbers, :longest], None if self.segments is None else self.segments[numbers, :longest]
        return Group(_long(ids), mask, None if segments is None else _long(segments)).to(self.device)


@dataclass(frozen=True)
class BlankTokens:
    """Tokens without content, for predictions of memory: every example is as long as one may be."""

    length: int

    def __getitem__(self, rows: Tensor | slice) -> TokenBatch:
        assert isinstance(rows, Tensor)
        ids = torch.zeros(len(rows), self.length, dtype=torch.int64)
        return TokenBatch.of(ids, torch.ones_like(ids, dtype=torch.bool))


def _long(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))


def groups(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield which examples of lengths [n] are computed together, longest first; a group wastes at most 64 tokens.

    Example:
        >>> [part.tolist() for part in groups(np.array([300, 10, 290, 12]))]
        [[0, 2], [3, 1]]
    """
    falling = np.argsort(-lengths, kind="stable")
    if (lengths.max() - lengths).sum() <= SPARED:
        yield np.arange(len(lengths))
        return
    first = 0
    while first < len(falling):
        waste = np.cumsum(lengths[falling[first]] - lengths[falling[first:]])
        last = first + int(np.searchsorted(waste, SPARED, side="right"))
        yield falling[first:last]
        first = last


def stack(ids: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None, pad: int) -> Tokens:
    """Return tokens of a few examples in memory, on the processor; `pad` is the id that fills the rows."""
    lengths = np.array([len(row) for row in ids])

    def filled(rows: Sequence[Sequence[int]], value: int) -> np.ndarray:
        whole = np.full((len(rows), lengths.max()), value, np.int64)
        for row, values in enumerate(rows):
            whole[row, : len(values)] = values
        return whole

    cpu = torch.device("cpu")
    return Tokens(filled(ids, pad), lengths, None if segments is None else filled(segments, 0), cpu)


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
    parts: dict[str, list[Tensor]] = {layer: [] for layer in layers}
    for group in batch.groups:
        for layer, value in activations(module, layers, partial(module, TokenBatch((group,)))).items():
            parts[layer].append(module.pooled(value, group) if value.ndim == 3 else value)
    return {layer: module.gathered(batch, parts[layer]) for layer in layers}


def build_encoder(config: str, pooling: str) -> TextEncoder:
    """Build the encoder of a configuration; its weights are arbitrary."""
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
    check_whole(place, [name for name in lacking if "pooler." not in name])  # texts are pooled by the encoder's tokens
    return TextEncoder(model, pooling).eval(), architecture_text(config.to_dict())


@torch.no_grad()
def check_length(encoder: TextEncoder, pad: int, max_length: int) -> None:
    """Refuse texts that may be longer than the positions that an encoder knows."""
    other = 0 if pad else 1
    try:
        encoder(TokenBatch.of(torch.full((1, max_length), other)))
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
    alone, beside_padding = encoder(TokenBatch.of(text)), encoder(TokenBatch.of(padded, mask))
    if float((alone - beside_padding).abs().max()) > _ROUNDING * float(alone.abs().max()):
        raise MergeflowError(
            f"model.pretrained '{place}': its features of a text depend on the padding after it, although it takes an "
            "attention mask; expected an encoder whose features do not, such as BERT."
        )


def build(section: ModelSection, record: Mapping[str, str]) -> Model:
    """Build the encoder from the configuration in the base's record; its weights are arbitrary."""
    if "config" not in record:
        raise MergeflowError("the base's weights have no record of an encoder: run the stage `base` again.")
    return Network(build_encoder(record["config"], section.pooling))


def check_base(section: ModelSection, data: DataSection, root: Path) -> None:
    """Check that base and tokenizer exist; their content is not read."""
    find_place(data.tokenizer, root, ASSETS)
    check_folder(section.pretrained, root, ASSETS)


def make_base(section: ModelSection, data: DataSection, manifests: Mapping[str, Any], base: Base) -> None:
    """Write the encoder with its configuration and tokenizer in the record, and a drawn head for each task."""
    tokenizer = load_tokenizer(section.pretrained, base.root, data.max_length)
    check_prepared(manifests, tokenizer.digest, data.tokenizer, section.pretrained)
    encoder, config = load_encoder(section.pretrained, base.root, section.pooling)
    check_length(encoder, tokenizer.pad, data.max_length)
    check_padding(encoder, tokenizer.pad, data.max_length, section.pretrained)
    record = {"role": "base", SECTION: section.model_dump_json(), "config": config, "tokenizer": tokenizer.content}
    write_checkpoint(base.model, Network(encoder).state(), record)
    for done, (task, manifest) in enumerate(manifests.items(), start=1):
        save_head(drawn_head(task, manifest["class_names"], encoder.width), base.head(task))
        base.report("heads", done, len(manifests))


def open_examples(
    task: str, folder: Path, split: str, head: Head | None, device: torch.device
) -> Classification | Regression:
    """Return one prepared split; tokens stay on disk."""
    data = load_split(folder, split)
    check_classes(task, head, data.class_names)
    segments = data.arrays.get("segments")
    tokens = Tokens(data.ids, np.array(data.lengths, np.int64), segments, device)
    wanted = torch.from_numpy(np.array(data.labels if data.class_names else data.targets)).to(device)
    kind, metric = Classification if data.class_names else Regression, find_metric(metric_of(load_manifest(folder)))
    return kind(task, tokens, wanted, head, observe=watched, metric=metric)


def blank(model: Model, section: ModelSection, data: DataSection, count: int, classes: int) -> Classification:
    """Return texts without content, as long as they may be, with a trained head."""
    encoder = model.module
    assert isinstance(encoder, TextEncoder)
    head = drawn_head("blank", [""] * classes, encoder.width)
    return Classification("blank", BlankTokens(data.max_length), torch.zeros(count, dtype=torch.int64), head)


MODALITY = Modality("text", build, make_base, open_examples, warm=warm, blank=blank, check_base=check_base)
