"""Image models of transformers as bases: their own classifiers' features, through experts, merge and serving."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from mergeflow.data import load_manifest
from mergeflow.errors import MergeflowError
from mergeflow.modalities.heads import load_head
from mergeflow.modalities.served import SERVED
from mergeflow.modalities.serving import read_model
from mergeflow.modalities.vision.backbones import build_backbone, check_size, load_backbone
from mergeflow.modalities.vision.images import encode_png
from registry.artifacts import ModelFiles, save_pyfunc
from tests.project_folder import run_pipeline, write_project

SIZE = 32
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
PATCHES = {**COMMON, "image_size": SIZE, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
WINDOWS: dict[str, Any] = {"image_size": SIZE, "patch_size": 4, "window_size": 4}
WINDOWS |= {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
BOTH = {"text_config": COMMON, "vision_config": PATCHES}
FAMILIES: dict[str, dict[str, Any]] = {
    "vit": PATCHES,
    "deit": PATCHES,
    "beit": PATCHES,
    "vit_msn": PATCHES,
    "dinov2": {**PATCHES, "mlp_ratio": 2},
    "dinov2_with_registers": {**PATCHES, "mlp_ratio": 2},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "convnext": {**STAGES, "num_stages": 2},
    "convnextv2": {**STAGES, "num_stages": 2},
    "resnet": {**STAGES, "embedding_size": 8, "layer_type": "basic"},
    "regnet": {**STAGES, "embedding_size": 8, "groups_width": 4},
    "bit": {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [1, 1]},
    "mobilenet_v2": {"image_size": SIZE, "depth_multiplier": 0.35},
    "levit": {
        "image_size": 64,
        "hidden_sizes": [16, 32, 48],
        "num_attention_heads": [2, 2, 2],
        "depths": [1, 1, 1],
        "key_dim": [8, 8, 8],
    },
    "focalnet": {
        "image_size": SIZE,
        "embed_dim": 16,
        "depths": [1, 1],
        "focal_levels": [1, 1],
        "focal_windows": [3, 3],
    },
    "clip": BOTH,
    "siglip": BOTH,
}
POOLED = ("dinov3_vit", "clip_vision_model", "siglip_vision_model")


def make_model(folder: Path, family: str, settings: dict[str, Any], classes: int = 5) -> Any:
    """Save a model with drawn weights and its image processor; return it."""
    config: Any = transformers.AutoConfig.for_model(family, **settings, num_labels=classes)
    table: Any = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
    architecture = table[type(config)] if type(config) in table else transformers.MODEL_MAPPING[type(config)]
    torch.manual_seed(0)
    model = (architecture[0] if isinstance(architecture, tuple) else architecture)(config).eval()
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(image_mean=MEAN, image_std=STD).save_pretrained(folder)
    return model


def draw_images(size: int, count: int = 3) -> torch.Tensor:
    return torch.randint(0, 256, (count, size, size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def normalised(images: torch.Tensor, *channels: tuple[float, ...]) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in channels or (MEAN, STD))
    return (images.permute(0, 3, 1, 2).float() / 255 - mean) / std


@pytest.mark.parametrize("family", FAMILIES)
def test_a_classifier_reads_the_features_as_its_own(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, family, FAMILIES[family])
    backbone, record = load_backbone(str(tmp_path), tmp_path)
    images = draw_images(FAMILIES[family].get("image_size", SIZE))
    classifier = next(part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features == 5)
    with torch.no_grad():
        features = backbone(images)
        torch.testing.assert_close(classifier(features), model(pixel_values=normalised(images)).logits)
        assert features.shape == (3, backbone.width)
        torch.testing.assert_close(deepcopy(backbone)(images), features)
    stored = model.state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in backbone.state_dict().items())
    assert len(stored) == len(backbone.state_dict()) + 2  # the classifier's weight and bias

    again = build_backbone(record, family)
    again.load_state_dict(backbone.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(again(images), features)


@pytest.mark.parametrize("family", POOLED)
def test_a_family_without_a_classifier_gives_what_it_pools(family: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, family, PATCHES)
    backbone, _ = load_backbone(str(tmp_path), tmp_path)
    images = draw_images(SIZE)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), model(pixel_values=normalised(images)).pooler_output)
    assert backbone.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_convnext", "test_mambaout"])
def test_a_model_of_timm_gives_what_its_classifier_reads(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5).eval()
    timm.models.save_for_hf(model, tmp_path, safe_serialization=True)
    backbone, record = load_backbone(str(tmp_path), tmp_path)
    images = draw_images(model.default_cfg["input_size"][-1])
    batch = normalised(images, model.default_cfg["mean"], model.default_cfg["std"])
    again = build_backbone(record, name)
    again.load_state_dict(backbone.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model.get_classifier()(backbone(images)), model(batch), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(again(images), backbone(images))


PROCESSORS: dict[str, Any] = {
    "efficientnet": transformers.EfficientNetImageProcessor(image_mean=MEAN, image_std=STD),
    "efficientnet offset": transformers.EfficientNetImageProcessor(rescale_offset=True, rescale_factor=1 / 127.5),
    "efficientnet features": transformers.EfficientNetImageProcessor(include_top=False, image_std=STD),
    "mobilevit": transformers.MobileViTImageProcessor(),
    "not normalised": transformers.ViTImageProcessor(do_normalize=False),
    "not rescaled": transformers.BitImageProcessor(do_rescale=False, image_mean=[99, 100, 101], image_std=[9, 8, 7]),
    "one number": transformers.ConvNextImageProcessor(image_mean=0.4, image_std=0.2),
}


@pytest.mark.parametrize("processor", PROCESSORS)
def test_pixels_are_those_of_the_image_processor(processor: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, "vit", PATCHES)
    PROCESSORS[processor].save_pretrained(tmp_path)
    backbone, record = load_backbone(str(tmp_path), tmp_path)
    images = draw_images(SIZE)
    again = build_backbone(record, processor)
    again.load_state_dict(backbone.state_dict())
    pictures = [Image.fromarray(image.numpy()) for image in images]
    pixels = PROCESSORS[processor](pictures, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        for module in (backbone, again):
            torch.testing.assert_close(model.classifier(module(images)), model(pixel_values=pixels).logits)


def test_a_bare_encoder_is_a_base_too(tmp_path: Path) -> None:
    model = make_model(tmp_path / "whole", "vit", PATCHES)
    model.vit.save_pretrained(tmp_path / "bare")
    (tmp_path / "bare/preprocessor_config.json").write_bytes((tmp_path / "whole/preprocessor_config.json").read_bytes())
    whole, bare = (load_backbone(name, tmp_path)[0] for name in ("whole", "bare"))
    images = draw_images(SIZE)
    with torch.no_grad():
        assert torch.equal(whole(images), bare(images))


def test_what_is_no_base_is_refused_by_name(tmp_path: Path) -> None:
    def refused(place: str, message: str, size: int = SIZE) -> None:
        with pytest.raises(MergeflowError, match=message):
            check_size(load_backbone(place, tmp_path)[0], size, place)

    refused("resnet50", r"no folder 'resnet50'; expected one with .* or the hub's OWNER/NAME")
    make_model(tmp_path / "two", "swiftformer", {"image_size": SIZE})
    refused("two", r"with 2 classifiers \(head, dist_head\); expected one")
    make_model(tmp_path / "vit", "vit", PATCHES)
    refused("vit", "data.image_size is 48, which the model of 'vit' does not take .*: set it to 32", 48)
    fixed = timm.create_model("vit_tiny_patch16_224", depth=1)
    timm.models.save_for_hf(fixed, tmp_path / "timm", safe_serialization=True)
    refused("timm", r"model of 'timm' does not take \(Input height .*: set it to 224", 48)
    make_model(tmp_path / "mae", "vit_mae", PATCHES)
    refused("mae", r"'mae' does not take \(.* 'pooler_output'\): choose another")
    model = make_model(tmp_path / "yolos", "yolos", {**PATCHES, "image_size": [SIZE, SIZE]})
    model.pooler = None
    model.save_pretrained(tmp_path / "yolos")
    refused("yolos", "the model of 'yolos' lacks the weights pooler.dense.bias, pooler")

    make_model(tmp_path / "null", "vit", PATCHES)
    processor = {"image_processor_type": "ViTImageProcessor", "image_mean": None, "do_normalize": True}
    (tmp_path / "null/preprocessor_config.json").write_text(json.dumps(processor))
    refused("null", r"the image processor of 'null' cannot be read \(TypeError")
    for mean, std in (([0.5], [0.5]), (MEAN, [0.2, 0.0, 0.3])):
        transformers.ViTImageProcessor(image_mean=mean, image_std=std).save_pretrained(tmp_path / "null")
        refused("null", "the image processor of 'null' cannot be read .*no normalisation")
    make_model(tmp_path / "grey", "vit", {**PATCHES, "num_channels": 1})
    refused("grey", "'grey' takes images of 1 channels, but a project's have 3: choose")

    weights = tmp_path / "vit/model.safetensors"
    state = load_file(weights)
    shortened = {name: value for name, value in state.items() if "layernorm.weight" not in name}
    save_file(shortened, weights, {"format": "pt"})
    refused("vit", "the model of 'vit' lacks the weights vit.layernorm.weight: save it whole")
    (tmp_path / "vit/preprocessor_config.json").unlink()
    save_file(state, weights, {"format": "pt"})
    refused("vit", "the image processor of 'vit' cannot be read.*preprocessor_config")


def draw_task(folder: Path, channel: int) -> None:
    """Write pictures whose class is whether one channel of noise is bright."""
    chance = np.random.default_rng(channel)
    for split, count in {"train": 32, "validation": 16, "test": 16}.items():
        for name, level in {"dark": 40, "bright": 200}.items():
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count // 2):
                pixels = chance.integers(90, 160, (SIZE, SIZE, 3)).astype(np.uint8)
                pixels[..., channel] = level
                Image.fromarray(pixels).save(place / f"{number}.png")


@pytest.mark.parametrize(
    ("family", "regime"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("vit", "steps"), ("resnet", "linearised"))),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("vit", "linearised"), ("resnet", "steps"))),
    ],
)
def test_a_base_goes_through_experts_merge_and_serving(family: str, regime: str, tmp_path: Path) -> None:
    root = tmp_path / "project"
    model = make_model(root / "inputs/base", family, FAMILIES[family])
    for channel, task in enumerate(("red", "green")):
        draw_task(root / "inputs" / task, channel)
    values = {
        "tasks": {"red": "folder:inputs/red", "green": "folder:inputs/green"},
        "data": {"image_size": SIZE},
        "model": {"modality": "vision", "pretrained": "inputs/base", "head": "probed"},
        "sweep": {"average": {"scale": [1.0]}, "ties": {"keep": [0.2], "scale": [1.0]}},
    }
    settings = {"regime": regime, "steps": 6, "batch_size": 8, "learning_rate": 0.001, "save_every": 6}
    write_project(root, values, settings)
    outputs = run_pipeline(root, ("prepare", "base", "multitask", "finetune", "vectors", "sweep", "select")) / "outputs"

    base = load_file(outputs / "base/model.safetensors")
    expert = load_file(next((outputs / "experts/red").glob("model*.safetensors")))
    assert any(not torch.equal(base[name], expert[name]) for name in base)
    assert all(torch.equal(base[name], expert[name]) for name in base if "running" in name)
    merged = load_file(outputs / "merged/ties.safetensors")
    model.load_state_dict({**model.state_dict(), **merged})

    with safe_open(outputs / "base/model.safetensors", framework="pt") as file:
        record = file.metadata()
    save_pyfunc(
        root / "served",
        ModelFiles(
            weights=outputs / "merged/ties.safetensors",
            heads={task: outputs / f"experts/{task}/head.safetensors" for task in ("red", "green")},
            model=yaml.safe_load((root / "params.yaml").read_text())["model"],
            decoding=load_manifest(outputs / "data/manifests/red")["decoding"],
            record=record,
            transforms={},
        ),
    )
    required = (root / "served/requirements.txt").read_text()
    assert "\ntransformers==" in required
    assert "\ntimm==" in required
    loaded = read_model(root / "served/artifacts/model", torch.device("cpu"))
    images = draw_images(SIZE, 2)
    pictures = [encode_png(Image.fromarray(image.numpy())) for image in images]
    answers = SERVED.get("vision").answer(loaded, {"task": ["red"] * 2, "image": pictures})
    head = load_head(outputs / "experts/red/head.safetensors")
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    classifier = next(name for name, part in linear.items() if part.out_features == 5)
    model.set_submodule(classifier, head)
    with torch.no_grad():
        expected = model(pixel_values=normalised(images)).logits.softmax(dim=1)
    probabilities = torch.tensor([[row[name] for name in head.class_names] for row in answers["probabilities"]])
    torch.testing.assert_close(probabilities, expected, atol=1e-5, rtol=1e-4)
