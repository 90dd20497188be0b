"""Images as a modality: image towers of CLIP and image models of transformers are merged, heads never.

Zero-shot heads are built once and stay frozen; of a base without texts heads are fitted to its features, and trained.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import SECTION
from mergeflow.modalities.classification import Classification, open_split, warm
from mergeflow.modalities.heads import Head, drawn_head, save_head
from mergeflow.modalities.pretrained import check_folder
from mergeflow.modalities.vision.backbones import FILES, build_backbone, check_size, load_backbone
from mergeflow.modalities.vision.models import ASSETS, build_head, find_weights, image_model, image_size_of, load_clip
from mergeflow.modalities.vision.sections import DataSection, ModelSection
from mergeflow.modality import Base, Modality, Model, Network


def build(section: ModelSection, record: Mapping[str, str]) -> Model:
    """Return the architecture's image tower with random weights, or the model that the base's record describes."""
    if section.architecture is not None:
        return image_model(load_clip(section.architecture))
    if "config" not in record:
        raise MergeflowError("the base's weights have no record of an image model: run the stage `base` again.")
    return Network(build_backbone(record, section.pretrained))


def check_base(section: ModelSection, data: DataSection, root: Path) -> str:
    """Check the names and settings of a base without reading it; return what `load_clip` takes as `pretrained`.

    A local file or folder is named relative to the project folder.
    """
    if section.architecture is None:
        check_folder(section.pretrained, root, ASSETS, FILES)
        return section.pretrained
    local = root / section.pretrained
    pretrained = str(local) if local.exists() else section.pretrained
    find_weights(section.architecture, pretrained)
    size = image_size_of(section.architecture)
    if size != data.image_size:
        raise MergeflowError(
            f"data.image_size is {data.image_size}, but {section.architecture} takes {size}: set it to {size}."
        )
    return pretrained


def make_base(section: ModelSection, data: DataSection, manifests: Mapping[str, Any], base: Base) -> None:
    """Write the pre-trained weights, and one head for each task: zero-shot, or to be fitted and trained."""
    clip, record = None, {"pretrained": section.pretrained, "role": "base"}
    if section.architecture is None:
        backbone, described = load_backbone(section.pretrained, base.root)
        check_size(backbone, data.image_size, section.pretrained)
        model, record = Network(backbone), {**record, **described, SECTION: section.model_dump_json()}
    else:
        clip = load_clip(section.architecture, check_base(section, data, base.root))
        model, record = image_model(clip), {"architecture": section.architecture, **record}
    write_checkpoint(base.model, model.state(), record)
    for done, (task, manifest) in enumerate(manifests.items(), start=1):
        names = manifest["class_names"]
        if clip is not None and section.head == "zero_shot":
            head = build_head(clip, names, manifest["templates"])
        else:
            head = drawn_head(task, names, _width(model))
        save_head(head, base.head(task))
        base.report("heads", done, len(manifests))


def _width(model: Model) -> int:
    """Return the number of features that a head reads."""
    width: Any = model.module.width
    return int(width)


def blank(model: Model, section: ModelSection, data: DataSection, count: int, classes: int) -> Classification:
    """Return images without content, to predict memory; their head is frozen: a trained one needs little."""
    images = torch.zeros(count, data.image_size, data.image_size, 3, dtype=torch.uint8)
    head = Head(torch.zeros(classes, _width(model)), 1.0, [""] * classes)
    return Classification("blank", images, torch.zeros(count, dtype=torch.int64), head)


MODALITY = Modality(
    "vision",
    build,
    make_base,
    partial(open_split, "images"),
    tower=lambda section: "visual" if section.architecture else "",
    architecture=lambda section: section.architecture,
    warm=warm,
    blank=blank,
    check_base=check_base,
)
