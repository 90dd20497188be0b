"""The modalities by name."""

from importlib import import_module

from mergeflow.errors import unknown_name
from mergeflow.modality import Modality

# Full names of modules, because the digests of the stages' code follow these and no other strings.
_MODULES = {"vision": "mergeflow.modalities.vision.modality", "toy": "mergeflow.modalities.toy.modality"}


def find_modality(name: str) -> Modality:
    """Return a modality.

    Raises:
        MergeflowError: there is none of this name.

    Example:
        >>> find_modality("vision").tower
        'visual'
    """
    if name not in _MODULES:
        raise unknown_name("modality", name, _MODULES)
    modality: Modality = import_module(_MODULES[name]).MODALITY
    return modality
