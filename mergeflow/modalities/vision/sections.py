"""The sections `model` and `data` of params.yaml for images."""

from typing import Literal

from pydantic import Field

from mergeflow.modalities.sections import Sections
from mergeflow.schema import Frozen


class ModelSection(Frozen, strict=True):
    """The common base.

    architecture: open_clip's name. pretrained: an open_clip tag, a local file with the weights, or a folder that
    open_clip saved. head: `zero_shot`, made of the class names by the text tower and frozen; or `probed`, fitted on the
    features of the base and trained, for a base whose text tower knows nothing of the classes.
    """

    modality: Literal["vision"] = "vision"
    architecture: str
    pretrained: str
    head: Literal["zero_shot", "probed"] = "zero_shot"


class DataSection(Frozen, strict=True):
    """How images are prepared. `image_size`: side of the decoded square images in pixels; the model's input size."""

    image_size: int = Field(32, ge=8, le=1024)


SECTIONS = Sections(ModelSection, DataSection)
