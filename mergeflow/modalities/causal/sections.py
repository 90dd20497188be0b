"""The sections `model` and `data` of params.yaml for causal language models."""

from typing import Any, Literal

from pydantic import Field

from mergeflow.modalities.sections import Sections
from mergeflow.schema import Frozen, Seed


class Generation(Frozen, strict=True):
    """How a registered model continues a text.

    tokens: new ones, at most. temperature: 0 takes the likeliest token each time; above 0 tokens are drawn. seed: of
    what is drawn, the same for every request.
    """

    tokens: int = Field(default=32, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    seed: Seed = 0


class ModelSection(Frozen, strict=True):
    """A model of `AutoModelForCausalLM`.

    pretrained: a folder in the layout of Hugging Face (config.json, model.safetensors), an id of the hub, the name of
    an embedded base, or `none` for weights drawn at random. config: for `none`, the values of config.json, with its
    model_type. seed: of the drawn weights.
    """

    modality: Literal["causal"]
    pretrained: str = Field(min_length=1)
    config: dict[str, Any] = Field(default_factory=dict)
    seed: Seed = 0
    generation: Generation = Generation()


class DataSection(Frozen, strict=True):
    """How texts are stored. tokenizer: a place, as `model.pretrained` is. block: tokens that a model sees at once."""

    tokenizer: str = Field(min_length=1)
    block: int = Field(128, ge=8, le=131072)


SECTIONS = Sections(ModelSection, DataSection)
