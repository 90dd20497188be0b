"""Images as a modality: CLIP's image towers are merged, heads never.

Zero-shot heads are built once and stay frozen; of a base without texts heads are fitted to its features, and trained.
"""

from collections.abc import Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from mergeflow.checkpoints import write_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification, open_split, warm
from mergeflow.modalities.heads import Head, drawn_head, save_head
from mergeflow.modalities.vision.models import (
    ImageEncoder,
    build_head,
    find_weights,
    image_model,
    image_size_of,
    load_clip,
)
from mergeflow.modalities.vision.sections import DataSection, ModelSection
from mergeflow.modality import Base, Modality, Model


def build(section: ModelSection, record: Mapping[str, str]) -> Model:
    """Return the architecture's image tower with random weights; of the base's record nothing is needed."""
    return image_model(load_clip(section.architecture))


def check_base(section: ModelSection, data: DataSection, root: Path) -> str:
    """Check the names and settings of a base without reading it.

    Returns:
        What `load_clip` takes as `pretrained`: a local file or folder is named relative to the project folder.
    """
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
    """Write the pre-trained image tower, and one head for each task: zero-shot, or to be fitted and trained."""
    clip = load_clip(section.architecture, check_base(section, data, base.root))
    record = {"architecture": section.architecture, "pretrained": section.pretrained, "role": "base"}
    write_checkpoint(base.model, image_model(clip).state(), record)
    for done, (task, manifest) in enumerate(manifests.items(), start=1):
        names = manifest["class_names"]
        if section.head == "zero_shot":
            head = build_head(clip, names, manifest["templates"])
        else:
            head = drawn_head(task, names, clip.model.visual.output_dim)
        save_head(head, base.head(task))
        base.report("heads", done, len(manifests))


def blank(model: Model, section: ModelSection, data: DataSection, count: int, classes: int) -> Classification:
    """Return images without content, to predict memory; their head is frozen: a trained one needs little."""
    images = torch.zeros(count, data.image_size, data.image_size, 3, dtype=torch.uint8)
    encoder = model.module
    assert isinstance(encoder, ImageEncoder)
    head = Head(torch.zeros(classes, encoder.visual.output_dim), 1.0, [""] * classes)
    return Classification("blank", images, torch.zeros(count, dtype=torch.int64), head)


MODALITY = Modality(
    "vision",
    build,
    make_base,
    partial(open_split, "images"),
    tower="visual",
    architecture=attrgetter("architecture"),
    warm=warm,
    blank=blank,
    check_base=check_base,
)
