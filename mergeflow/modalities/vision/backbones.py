"""Image models of transformers and timm as bases: ViT, DINO, Swin, ConvNeXt, ResNet …, without their classifiers."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.errors import MergeflowError
from mergeflow.modalities.modules import own_generator
from mergeflow.modalities.pretrained import (
    architecture_text,
    check_whole,
    find_place,
    from_place,
    load_pretrained,
    quiet,
    transformers,
)

ASSETS = Path(__file__).with_name("assets")
FILES = "config.json, model.safetensors and preprocessor_config.json"
_RGB = 3
_TIMM = "timm_wrapper"


@dataclass(frozen=True)
class Pixels:
    """How pixels are normalised: (rescale · x − mean) / std for each channel, x in 0 … 255; with `flip` to BGR."""

    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    flip: bool = False

    def __post_init__(self) -> None:
        if len(self.mean) != _RGB or len(self.std) != _RGB or min(self.rescale, *self.std) <= 0:
            raise ValueError(f"({self.rescale} · x − {self.mean}) / {self.std} is no normalisation of three channels")


class Backbone(nn.Module):
    """uint8 images in, features out: what the family's own classifier reads, or what it pools where it has none.

    The weights have the names of the family's `…ForImageClassification`, or of its model where there is none, so
    transformers reads an expert or a merge with the base's config.json; the linear classifier alone is taken off.

    Args:
        model: Such a model, made for one class; its classifier is replaced in place.
        place: What an error message calls the model.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, model: Any, pixels: Pixels, place: str) -> None:
        super().__init__()
        self.width = _take_off_classifier(model, place) if _classifies(model.config) else _pooled_width(model, place)
        self._flip = pixels.flip
        self._model = (model,)  # in a tuple it is no part of its own: its parts are this module's, under their names
        for name, part in model.named_children():
            self.add_module(name, part)
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (pixels.mean, pixels.std))
        self.register_buffer("mean", mean / pixels.rescale, persistent=False)
        self.register_buffer("scale", pixels.rescale / std, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return features [B, D] of uint8 images [B, S, S, 3]."""
        pixels = (images.to(self.scale.device).permute(0, 3, 1, 2).float() - self.mean) * self.scale
        output = self._model[0](pixel_values=pixels.flip(1) if self._flip else pixels)
        features: Tensor = output.logits if "logits" in output else output.pooler_output
        return features.flatten(1)


def _classifies(config: Any) -> bool:
    """Whether transformers has a class with a classifier for a configuration; timm's own models come without one."""
    return config.model_type != _TIMM and type(config) in transformers("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING")


def _take_off_classifier(model: Any, place: str) -> int:
    """Put nothing in the place of the only linear layer with one output; return the number of its inputs."""
    classifiers = [
        name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part.out_features == 1
    ]
    if len(classifiers) != 1:
        raise MergeflowError(
            f"model.pretrained '{place}' is a {type(model).__name__} with {len(classifiers)} classifiers "
            f"({', '.join(classifiers) or 'none is linear'}); expected one, as ViT, Swin, ConvNeXt and ResNet have."
        )
    width = int(model.get_submodule(classifiers[0]).in_features)
    model.set_submodule(classifiers[0], nn.Identity())
    return width


def _pooled_width(model: Any, place: str) -> int:
    """Return the number of pooled features of a family without a classifier of its own."""
    if model.config.model_type == _TIMM:
        return int(getattr(model.timm_model, "head_hidden_size", None) or model.timm_model.num_features)
    sizes = getattr(model.config, "hidden_size", None) or getattr(model.config, "hidden_sizes", None)
    if model.main_input_name != "pixel_values" or sizes is None:
        raise MergeflowError(
            f"model.pretrained '{place}' is a {model.config.model_type}; expected an image model of transformers, "
            "such as ViT, DINOv2, Swin, ConvNeXt or ResNet."
        )
    return int(sizes if isinstance(sizes, int) else sizes[-1])


def load_backbone(place: str, root: Path) -> tuple[Backbone, dict[str, str]]:
    """Load a pre-trained image model; return with it what the base's record needs to build it again."""
    source = find_place(place, root, ASSETS, FILES)
    config: Any = from_place("the model", place, lambda: transformers("AutoConfig").from_pretrained(source), FILES)
    if (channels := getattr(config, "num_channels", _RGB)) != _RGB:
        raise MergeflowError(
            f"model.pretrained '{place}' takes images of {channels} channels, but a project's have 3: choose another."
        )
    config.num_labels = 1  # of the classifier, which is taken off
    if config.model_type == _TIMM:  # timm writes it here too, where it clashes with that of transformers
        config.model_args = {name: value for name, value in (config.model_args or {}).items() if name != "num_classes"}
    classifies = _classifies(config)
    auto = "AutoModelForImageClassification" if classifies else "AutoModel"
    options = {"config": config, "ignore_mismatched_sizes": True}
    model, lacking = load_pretrained(auto, "the model", place, root, ASSETS, FILES, **options)
    # How pixels are normalised alone: sizes are the project's own affair.
    processor = transformers("AutoImageProcessor")
    pixels = from_place("the image processor", place, lambda: _pixels_of(processor.from_pretrained(source)), FILES)
    record = {
        "class": type(model).__name__,
        "config": architecture_text(model.config.to_dict()),
        "pixels": json.dumps(asdict(pixels)),
    }
    backbone = Backbone(model, pixels, place).eval()
    missing = sorted(set(lacking) & backbone.state_dict().keys())
    if classifies:  # such a model reads no pooler, or one that is a mere norm; alone the pooler is a layer, drawn anew
        missing = [name for name in missing if "pooler." not in name]
    check_whole(place, missing)
    return backbone, record


def build_backbone(record: Mapping[str, str], place: str) -> Backbone:
    """Return the model that a base's record describes; its weights are arbitrary."""
    values = json.loads(record["config"])
    with quiet(), own_generator(0):
        config = transformers("AutoConfig").for_model(values.pop("model_type"), **values)
        model = transformers(record["class"])(config)
    return Backbone(model, Pixels(**json.loads(record["pixels"])), place).eval()


def _pixels_of(processor: Any) -> Pixels:
    if (timm := getattr(processor, "data_config", None)) is not None:
        return Pixels(1 / 255, _channels(timm["mean"]), _channels(timm["std"]))
    rescale = float(processor.rescale_factor) if getattr(processor, "do_rescale", True) else 1.0
    mean, std = (0.0,) * _RGB, (1.0,) * _RGB
    if getattr(processor, "do_normalize", True):
        mean, std = _channels(processor.image_mean), _channels(processor.image_std)
    if getattr(processor, "rescale_offset", False):  # EfficientNet: one is subtracted of what was rescaled
        mean = tuple(value + 1 for value in mean)
    if getattr(processor, "include_top", False):  # EfficientNet: what was normalised is divided again
        std = tuple(a * b for a, b in zip(std, _channels(processor.image_std), strict=True))
    return Pixels(rescale, mean, std, bool(getattr(processor, "do_flip_channel_order", False)))


def _channels(value: Any) -> tuple[float, ...]:
    return (float(value),) * _RGB if isinstance(value, int | float) else tuple(map(float, value))


@torch.no_grad()
def check_size(backbone: Backbone, image_size: int, place: str) -> None:
    """Refuse a side of images, in pixels, that the model cannot take."""
    try:
        backbone(torch.zeros(1, image_size, image_size, _RGB, dtype=torch.uint8))
    except Exception as error:  # each family checks in its way, with assertions too, or returns no such features
        config = backbone._model[0].config
        timm = getattr(config, "pretrained_cfg", None) or {}
        size = getattr(config, "image_size", None) or timm.get("input_size", [None])[-1]
        side = size[0] if isinstance(size, list | tuple) and size else size
        way_out = f"set it to {side}" if side and side != image_size else "choose another base"
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise MergeflowError(
            f"data.image_size is {image_size}, which the model of '{place}' does not take ({reason}): {way_out}."
        ) from error
