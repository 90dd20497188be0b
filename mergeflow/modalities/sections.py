"""The schemas of params.yaml's `model` and `data` by modality; no model code is imported."""

from dataclasses import dataclass

from mergeflow.plugins import Parts
from mergeflow.schema import Frozen

DEFAULT = "vision"


@dataclass(frozen=True)
class Sections:
    """The sections of one modality."""

    model: type[Frozen]
    data: type[Frozen]


SECTIONS = Parts("modality", Sections, "mergeflow.modalities", "modalities", "sections")
