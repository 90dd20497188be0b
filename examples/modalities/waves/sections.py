"""What params.yaml says of a project of waves."""

from typing import Literal

from pydantic import Field

from mergeflow.modalities.sections import Sections
from mergeflow.schema import Frozen


class ModelSection(Frozen, strict=True):
    """A convolution. channels: its filters. seed: of the weights that every expert starts from."""

    modality: Literal["waves"]
    channels: int = Field(16, ge=1)
    seed: int = Field(0, ge=0)


class DataSection(Frozen, strict=True):
    """How examples are stored. length: values of a series."""

    length: int = Field(64, ge=8)


SECTIONS = Sections(ModelSection, DataSection)
