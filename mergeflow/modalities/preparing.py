"""How each modality's data are prepared, by the modality's name."""

from importlib import import_module

from mergeflow.data.decoding import Preparation
from mergeflow.errors import unknown_name

# Full names of modules, because the digests of the stages' code follow these and no other strings.
_MODULES = {"vision": "mergeflow.modalities.vision.sources.kinds", "toy": "mergeflow.modalities.toy.sources"}


def find_preparation(modality: str) -> Preparation:
    """Return a modality's sources, transforms and decoding.

    Raises:
        MergeflowError: there is none of this name.

    Example:
        >>> sorted(find_preparation("vision").sources)
        ['folder', 'hf', 'parquet', 'suite', 'torchvision']
    """
    if modality not in _MODULES:
        raise unknown_name("modality", modality, _MODULES)
    preparation: Preparation = import_module(_MODULES[modality]).PREPARATION
    return preparation
