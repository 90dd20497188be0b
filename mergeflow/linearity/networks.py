"""Build the module that checkpoints are weights of, from the name of its architecture, and read samples for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.checkpoints.reader import tied_names
from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.linearity.affine import Featured
from mergeflow.linearity.samples import Samples, read_images, read_prepared, read_texts
from mergeflow.modalities.text.places import from_place
from mergeflow.modality import Model, Network, check_fit

_TOKENS = 128  # of a text at most, and no more than the model has positions
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # torchvision's weights expect pixels normalised by these


@dataclass(frozen=True)
class Opened:
    """A module to load checkpoints into, and what it looks at.

    Attributes:
        model: The module, with any weights.
        read: A source and how many samples, to samples.
        prefix: What checkpoints of whole models put before the names of this part.
    """

    model: Model
    read: Callable[[str, int], Featured]
    prefix: str = ""

    def weights(self, path: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors that are the module's, floating-point ones in the module's type.

        Raises:
            MergeflowError: listing names that it lacks and other widths.
        """
        own = self.model.state()
        known = {name.removeprefix(self.prefix): name for name in state}
        found = {name: state[known[name]] for name in own if name in known}
        # Of names that share their weights, such as T5's three embeddings, a checkpoint has one.
        first = {name: name for name in own} | tied_names(own)
        stored = {first[name]: value for name, value in found.items()}
        found |= {name: stored[first[name]] for name in own if name not in found and first[name] in stored}
        if len(found) <= len(own) // 2:  # a list of all that is missing would fill a page
            missing = next(name for name in own if name not in found)
            raise MergeflowError(
                f"'{path}' has {len(found)} of the {len(own)} tensors of the model and lacks '{missing}', for example: "
                "it is of another architecture. Name checkpoints that were tuned from the base."
            )
        if found.keys() != own.keys() or any(found[name].shape != own[name].shape for name in own):
            check_fit(f"'{path}'", found, own)
        return {name: value.to(own[name].dtype) for name, value in found.items()}


def open_network(architecture: str, base: Mapping[str, Tensor]) -> Opened:
    """Return the module of an architecture.

    Args:
        architecture: An open_clip architecture or pocket-clip; `torchvision:NAME` of a residual net or any other of its
            classifiers; or a Hugging Face model folder with config.json, for encoders of texts and language models.
        base: Weights that the number of classes is read from.

    Raises:
        MergeflowError: no such architecture.
    """
    if architecture.startswith("torchvision:"):
        return _torchvision(architecture.removeprefix("torchvision:"), base)
    if (Path(architecture).expanduser() / "config.json").is_file():
        return _transformers(Path(architecture).expanduser())
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
    """Return for how many classes one of torchvision's classifiers was built, whatever the order of its tensors.

    Args:
        name: As torchvision calls it.
        base: Its weights.

    Raises:
        MergeflowError: they are not this net's.
    """
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
        from mergeflow.modalities.vision.decoding import image_decoding
        from mergeflow.modalities.vision.sources.kinds import open_samples

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
