"""The sections `model` and `data` of params.yaml for images."""

from typing import Literal, Self

from pydantic import Field, model_validator

from mergeflow.modalities.sections import Sections
from mergeflow.schema import Frozen


class ModelSection(Frozen, strict=True):
    """The common base.

    architecture: open_clip's name; left out for an image model of transformers. pretrained: an open_clip tag, a local
    file with the weights, or a folder that open_clip saved; of transformers a folder with config.json,
    model.safetensors and preprocessor_config.json, or an id of the hub. head: `zero_shot`, made of the class names by
    the text tower and frozen; or `probed`, fitted on the features of the base and trained, for a base that has no text
    tower, or one that knows nothing of the classes.
    """

    modality: Literal["vision"] = "vision"
    architecture: str | None = None
    pretrained: str
    head: Literal["zero_shot", "probed"] = "zero_shot"

    @model_validator(mode="after")
    def _has_text_tower(self) -> Self:
        if self.architecture is None and self.head != "probed":
            raise ValueError(
                "`architecture` is missing: name open_clip's; or, where `pretrained` is an image model of "
                "transformers, say `head: probed`, since it has no text tower to make zero-shot heads"
            )
        return self


class DataSection(Frozen, strict=True):
    """How images are prepared. `image_size`: side of the decoded square images in pixels; the model's input size."""

    image_size: int = Field(32, ge=8, le=1024)


SECTIONS = Sections(ModelSection, DataSection)
