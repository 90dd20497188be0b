"""A few hundred samples without labels, from any source of images or a file of texts, as features are measured on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergeflow.data.arrays import array_file, load_split
from mergeflow.data.task import Example, Place, RawTask
from mergeflow.data.utf8 import decoded
from mergeflow.errors import MergeflowError
from mergeflow.modalities.activations import activations
from mergeflow.modality import Model, device_of

_UNSEEN_FIRST = ("test", "validation", "train")


@dataclass(frozen=True)
class Samples:
    """Inputs of a module without labels.

    Attributes:
        inputs: [N, ...].
        encode: Module and inputs to anything; a call of the module by default.
    """

    inputs: Tensor
    encode: Callable[[torch.nn.Module, Tensor], Any]

    def __len__(self) -> int:
        return len(self.inputs)

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return what the named submodules give for `rows`, [n, ...] each."""
        chosen = self.inputs[rows].to(device_of(model))
        return activations(model.module, layers, lambda: self.encode(model.module, chosen))


@dataclass(frozen=True)
class Sequences:
    """Texts as ids; a layer's feature is the mean over the tokens that are not padding.

    Of a model with a decoder, the decoder's feature is the one with which it generates the first token.

    Attributes:
        ids: int64 [N, T].
        mask: int64 [N, T], 0 where there is padding.

    Source:
        Ni et al. 2022, Sentence-T5, which Zhou et al. 2024 follow (B.1.3).
    """

    ids: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        """Return the features of the named blocks, [n, width] each."""
        ids, mask = self.ids[rows].to(device_of(model)), self.mask[rows].to(device_of(model))
        longest = int(mask.sum(1).max())
        ids, mask = ids[:, :longest], mask[:, :longest]
        asked: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        config: Any = model.module.config
        if config.is_encoder_decoder:
            asked["decoder_input_ids"] = torch.full_like(ids[:, :1], config.decoder_start_token_id)
        found = activations(model.module, layers, lambda: model.module(**asked))
        return {layer: _pooled(value, mask, "decoder." in f".{layer}") for layer, value in found.items()}


def _pooled(hidden: Tensor, mask: Tensor, decoder: bool) -> Tensor:
    if decoder and hidden.shape[1] == 1:
        return hidden[:, 0]
    kept = mask[:, :, None].to(hidden.dtype)
    return (hidden * kept).sum(1) / kept.sum(1)


def read_images(raw: RawTask, decode: Callable[[Example, str], Any], count: int) -> Tensor:
    """Return up to `count` images, uint8 [n, S, S, 3], spread evenly over one split; labels are not read.

    Args:
        raw: The source; its test split, else validation, else train.
        decode: As `Decoding.decode`.
        count: How many at most.

    Raises:
        MergeflowError: an image cannot be decoded, or the split is empty.
    """
    split = next(name for name in _UNSEEN_FIRST if name in raw.splits)
    total = raw.counts.get(split) or sum(1 for _ in raw.list_keys(split))
    chosen = set(_spread(total, count).tolist())
    images = []
    for index, example in enumerate(raw.splits[split]()):
        if index in chosen:
            seen = transformed(raw, example, Place(split, index, raw.seed))
            if seen is not None:
                images.append(decode(seen, f"source {raw.source}, split {split}, row {index}").arrays["images"])
    if not images:
        raise MergeflowError(f"source {raw.source} has no examples in its split {split}. Name another source.")
    return torch.from_numpy(np.stack(images))


def transformed(raw: RawTask, example: Example, place: Place) -> Example | None:
    """Return an example after the source's transforms, or None where they leave it out.

    Args:
        raw: The task, whose transforms are applied in order.
        example: As the source gives it.
        place: Where the example stands: split and index, which seed what is random.
    """
    seen: Example | None = example
    for transform in raw.transforms:
        seen = None if seen is None else transform.apply(seen, place)
    return seen


def read_prepared(folder: Path, count: int) -> Tensor:
    """Return images of a prepared task, spread evenly over the first of validation, test and train that is there.

    Args:
        folder: The prepared task.
        count: How many images at most.

    Returns:
        uint8 [N, height, width, 3] with N ≤ count.

    Raises:
        MergeflowError: the folder is not a prepared task of images.
    """
    split = next((name for name in ("validation", *_UNSEEN_FIRST) if array_file(folder, name, "images").exists()), None)
    if split is None:
        raise MergeflowError(f"{folder} has no prepared images. Name a source such as folder:{folder}.")
    images = load_split(folder, split).images
    return torch.from_numpy(images[_spread(len(images), count)])


def _spread(total: int, count: int) -> np.ndarray:
    """Return up to `count` row numbers, evenly spread: a source may go through its classes one after the other."""
    return np.unique(np.linspace(0, total - 1, num=min(count, total)).astype(int)) if total else np.empty(0, int)


def read_texts(path: Path, tokenizer: Any, count: int, length: int) -> Sequences:
    """Return the first `count` lines of a text file as ids, at most `length` tokens each.

    Args:
        path: The file, one text a line; empty lines are left out.
        tokenizer: Of transformers; it pads on the right, with its end token where it has no padding token.
        count: How many texts at most.
        length: Tokens per text at most; longer ones are cut.

    Raises:
        MergeflowError: there is no such file, it is not in UTF-8, or it has no lines.
    """
    if not path.is_file():
        raise MergeflowError(f"text:{path} does not exist; expected a file with one text a line.")
    lines = [line for line in decoded(path.read_bytes(), f"text:{path}").splitlines() if line.strip()][:count]
    if not lines:
        raise MergeflowError(f"text:{path} has no text; expected one text a line.")
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(lines, padding=True, truncation=True, max_length=length, return_tensors="pt")
    return Sequences(batch["input_ids"], batch["attention_mask"])
