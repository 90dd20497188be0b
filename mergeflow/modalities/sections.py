"""What params.yaml's `model` and `data` may say, by modality. Models are not imported: parameters need none."""

from dataclasses import dataclass

from mergeflow.plugins import Parts
from mergeflow.schema import Frozen

DEFAULT = "vision"


@dataclass(frozen=True)
class Sections:
    """The sections of one modality.

    Example:
        >>> sorted(SECTIONS.get("vision").model.model_fields)
        ['architecture', 'head', 'modality', 'pretrained']
    """

    model: type[Frozen]
    data: type[Frozen]


SECTIONS = Parts("modality", Sections, "mergeflow.modalities", "modalities", "sections")
