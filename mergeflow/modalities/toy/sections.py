"""The sections `model` and `data` of params.yaml for small nets."""

from typing import Literal

from pydantic import Field

from mergeflow.modalities.sections import Sections
from mergeflow.schema import Frozen, Seed


class ModelSection(Frozen, strict=True):
    """A feed-forward net without biases, drawn at random.

    widths: of the inputs, of every hidden layer, and of the outputs. activation: after each layer. dtype: of
    weights and arithmetic. seed: of the base and of the heads that training starts from. head: `trained`, a linear one
    for each task on the outputs; or `none`: the last layer has no activation, and its outputs are the logits of all
    tasks.
    """

    modality: Literal["toy"]
    widths: list[int] = Field(min_length=2)
    activation: Literal["tanh", "relu", "linear"] = "tanh"
    dtype: Literal["float64", "float32"] = "float64"
    seed: Seed = 0
    head: Literal["trained", "none"] = "trained"


class DataSection(Frozen, strict=True):
    """How examples are stored. `inputs`: numbers of an example, the first of the model's widths."""

    inputs: int = Field(ge=1)


SECTIONS = Sections(ModelSection, DataSection)
