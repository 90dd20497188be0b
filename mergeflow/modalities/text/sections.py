"""The sections `model` and `data` of params.yaml for text encoders."""

from typing import Literal

from pydantic import Field

from mergeflow.modalities.sections import Sections
from mergeflow.schema import Frozen


class ModelSection(Frozen, strict=True):
    """An encoder of transformers.

    pretrained: a folder in the layout of Hugging Face (config.json, model.safetensors, tokenizer.json), an id of the
    hub, or the name of an embedded base. pooling: what the heads see of a text, the `mean` of its tokens or the `first`
    one. head: what training starts from, `probed` (fitted on the features of the base) or `drawn` at random.
    """

    modality: Literal["text"]
    pretrained: str = Field(min_length=1)
    pooling: Literal["mean", "first"] = "mean"
    head: Literal["probed", "drawn"] = "probed"


class DataSection(Frozen, strict=True):
    """How texts are stored. tokenizer: a place, as `model.pretrained` is. max_length: tokens of an example, at most."""

    tokenizer: str = Field(min_length=1)
    max_length: int = Field(128, ge=8, le=8192)


SECTIONS = Sections(ModelSection, DataSection)
