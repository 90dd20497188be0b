"""The module that checkpoints are weights of, and a few hundred samples without labels for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mergeflow.checkpoints.formats import expanded
from mergeflow.checkpoints.reader import tied_names
from mergeflow.data.arrays import array_file, load_split
from mergeflow.data.locations import decoded
from mergeflow.data.task import Example, Place, RawTask, transformed
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.linearity.affine import Featured
from mergeflow.modalities.modules import activations
from mergeflow.modalities.pretrained import from_place
from mergeflow.modality import Model, Network, check_fit, device_of

_UNSEEN_FIRST = ("test", "validation", "train")


@dataclass(frozen=True)
class Samples:
    """Inputs [N, ...] of a module without labels, and how they are given to it."""

    inputs: Tensor
    encode: Callable[[torch.nn.Module, Tensor], Any]

    def __len__(self) -> int:
        return len(self.inputs)

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        chosen = self.inputs[rows].to(device_of(model))
        return activations(model.module, layers, lambda: self.encode(model.module, chosen))


@dataclass(frozen=True)
class Sequences:
    """Texts as ids; a layer's feature is the mean over the tokens that are not padding.

    Of a model with a decoder, the decoder's feature is the one with which it generates the first token.

    Source: Ni et al. 2022, Sentence-T5, which Zhou et al. 2024 follow (B.1.3).
    """

    ids: Tensor  # int64 [N, T]
    mask: Tensor  # int64 [N, T], 0 where there is padding

    def __len__(self) -> int:
        return len(self.ids)

    def features(self, model: Model, rows: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
        ids, mask = self.ids[rows].to(device_of(model)), self.mask[rows].to(device_of(model))
        longest = int(mask.sum(1).max())
        ids, mask = ids[:, :longest], mask[:, :longest]
        asked: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        config: Any = model.module.config
        if config.is_encoder_decoder:
            asked["decoder_input_ids"] = torch.full_like(ids[:, :1], config.decoder_start_token_id)
        hidden = activations(model.module, layers, lambda: model.module(**asked))
        return {layer: _pooled(value, mask, "decoder." in f".{layer}") for layer, value in hidden.items()}


def _pooled(hidden: Tensor, mask: Tensor, decoder: bool) -> Tensor:
    if decoder and hidden.shape[1] == 1:
        return hidden[:, 0]
    weights = mask[:, :, None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


def read_images(raw: RawTask, decode: Callable[[Example, str], Any], count: int) -> Tensor:
    """Return up to `count` images, uint8 [n, S, S, 3], spread evenly over test, else validation, else train."""
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


def read_prepared(folder: Path, count: int) -> Tensor:
    """Return images of a prepared task, uint8 [n, S, S, 3], spread evenly over validation, else test, else train."""
    split = next((name for name in ("validation", *_UNSEEN_FIRST) if array_file(folder, name, "images").exists()), None)
    if split is None:
        raise MergeflowError(f"{folder} has no prepared images. Name a source such as folder:{folder}.")
    images = load_split(folder, split).images
    return torch.from_numpy(images[_spread(len(images), count)])


def _spread(total: int, count: int) -> np.ndarray:
    """Return up to `count` row numbers, evenly spread: a source may go through its classes one after the other."""
    return np.unique(np.linspace(0, total - 1, num=min(count, total)).astype(int)) if total else np.empty(0, int)


def read_texts(path: Path, tokenizer: Any, count: int, length: int) -> Sequences:
    """Return the first `count` lines of a text file that are not empty as ids, cut at `length` tokens each.

    transformers' tokenizer pads on the right, with its end token where it has no padding token.
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
    if not batch["input_ids"].numel():
        raise MergeflowError(
            f"text:{path}: the model's tokenizer makes no tokens of it. Put the tokenizer's files, such as "
            "tokenizer.json, into the folder that --architecture names."
        )
    return Sequences(batch["input_ids"], batch["attention_mask"])


_TOKENS = 128  # of a text at most, and no more than the model has positions
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # torchvision's weights expect pixels normalised by these


@dataclass(frozen=True)
class Opened:
    """A module to load checkpoints into, with any weights, and what it looks at."""

    model: Model
    read: Callable[[str, int], Featured]  # a source and how many samples, to samples
    prefix: str = ""  # what checkpoints of whole models put before the names of this part

    def weights(self, path: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors that are the module's, floating-point ones in the module's type."""
        expected = self.model.state()
        stored_names = {name.removeprefix(self.prefix): name for name in state}
        weights = {name: state[stored_names[name]] for name in expected if name in stored_names}
        # Of names that share their weights, such as T5's three embeddings, a checkpoint has one.
        first = {name: name for name in expected} | tied_names(expected)
        stored = {first[name]: value for name, value in weights.items()}
        weights |= {name: stored[first[name]] for name in expected if name not in weights and first[name] in stored}
        if len(weights) <= len(expected) // 2:  # a list of all that is missing would fill a page
            missing = next(name for name in expected if name not in weights)
            raise MergeflowError(
                f"'{path}' has {len(weights)} of the {len(expected)} tensors of the model and lacks '{missing}', for "
                "example: it is of another architecture. Name checkpoints that were tuned from the base."
            )
        if weights.keys() != expected.keys() or any(weights[name].shape != expected[name].shape for name in expected):
            check_fit(f"'{path}'", weights, expected)
        return {name: value.to(expected[name].dtype) for name, value in weights.items()}


def open_network(architecture: str, base: Mapping[str, Tensor]) -> Opened:
    """Return the module of an architecture, with as many classes as the base's weights.

    It is open_clip's or pocket-clip; `torchvision:NAME` of a residual net or any other of its classifiers; or a Hugging
    Face model folder with config.json, for encoders of texts and language models.
    """
    if architecture.startswith("torchvision:"):
        return _torchvision(architecture.removeprefix("torchvision:"), base)
    if ((folder := expanded(architecture)) / "config.json").is_file():
        return _transformers(folder)
    from mergeflow.modalities.vision.models import image_model, load_clip

    clip = load_clip(architecture)
    return Opened(image_model(clip), _pictures(clip.image_size, lambda module, images: module(images)))


def _torchvision(name: str, base: Mapping[str, Tensor]) -> Opened:
    from torchvision import models

    if name not in models.list_models(models):
        raise unknown_name("architecture of torchvision", name, models.list_models(models))
    net: nn.Module = models.get_model(name, weights=None, num_classes=count_classes(name, base))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (_MEAN, _STD))

    def encode(module: nn.Module, images: Tensor) -> Any:
        return module((images.permute(0, 3, 1, 2).float() / 255 - mean.to(images.device)) / std.to(images.device))

    return Opened(Network(net), _pictures(224, encode))


def count_classes(name: str, base: Mapping[str, Tensor]) -> int:
    """Return for how many classes one of torchvision's classifiers was built, whatever the order of its tensors."""
    from torchvision import models

    with torch.device("meta"):
        two, three = (models.get_model(name, weights=None, num_classes=count).state_dict() for count in (2, 3))
    last = next(key for key, value in two.items() if value.ndim == 1 and value.shape != three[key].shape)
    if last not in base or base[last].ndim != 1:
        raise MergeflowError(
            f"the base has no '{last}', which holds a number for each class of torchvision:{name}. Name the "
            "architecture that it was trained with."
        )
    return len(base[last])


def _pictures(size: int, encode: Callable[[nn.Module, Tensor], Any]) -> Callable[[str, int], Featured]:
    def read(source: str, count: int) -> Featured:
        from mergeflow.modalities.vision.preparation import image_decoding, open_samples

        if Path(source).is_dir():
            return Samples(read_prepared(Path(source), count), encode)
        return Samples(read_images(open_samples(source), image_decoding(size).decode, count), encode)

    return read


def _transformers(folder: Path) -> Opened:
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    config: Any = AutoConfig.from_pretrained(folder)
    if getattr(config, "vocab_size", None) is None or getattr(config, "vision_config", None) is not None:
        raise MergeflowError(
            f"{folder / 'config.json'} is of the kind '{config.model_type}', which does not read texts alone; expected "
            "an encoder, an encoder-decoder or a language model. Image towers go by open_clip's or torchvision's names."
        )
    # Whatever the checkpoint has: rounding to bfloat16 is more than what is compared.
    net: Any = AutoModel.from_config(config, dtype=torch.float32)
    # The pooler sees none of the blocks' features, and checkpoints with a head of their own lack it.
    if getattr(net, "pooler", None) is not None:
        net.pooler = None

    def read(source: str, count: int) -> Featured:
        if not source.startswith("text:"):
            raise MergeflowError(f"'{source}' is not a file of texts; expected text:FILE with one text a line.")
        length = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
        tokenizer = from_place("the tokenizer", str(folder), lambda: AutoTokenizer.from_pretrained(folder))
        return read_texts(Path(source.removeprefix("text:")), tokenizer, count, length)

    return Opened(Network(net), read, f"{net.base_model_prefix}." if net.base_model_prefix else "")
