"""What params.yaml's `model` and `data` may say, by modality. Models are not imported: parameters need none."""

from dataclasses import dataclass
from importlib import import_module

from mergeflow.errors import unknown_name
from mergeflow.schema import Frozen

DEFAULT = "vision"
# Full names of modules, because the digests of the stages' code follow these and no other strings.
_MODULES = {"vision": "mergeflow.modalities.vision.sections", "toy": "mergeflow.modalities.toy.sections"}


@dataclass(frozen=True)
class Sections:
    """The sections of one modality.

    Attributes:
        model: Of `model`; it has a field `modality`.
        data: Of `data`.
    """

    model: type[Frozen]
    data: type[Frozen]


def sections_of(modality: str) -> Sections:
    """Return the sections of a modality.

    Raises:
        MergeflowError: there is none of this name.

    Example:
        >>> sorted(sections_of("vision").model.model_fields)
        ['architecture', 'modality', 'pretrained']
    """
    if modality not in _MODULES:
        raise unknown_name("modality", modality, _MODULES)
    module = import_module(_MODULES[modality])
    return Sections(module.ModelSection, module.DataSection)
