"""Models whose base says itself what it is: the record in its weights' metadata has the section `model`."""

import json
from pathlib import Path

import torch

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.sections import SECTIONS
from mergeflow.modality import Modality, Model
from mergeflow.schema import validated

SECTION = "model"


def is_recorded(architecture: str) -> bool:
    """Return whether an architecture is given as the file of a base instead of a name.

    Example:
        >>> is_recorded("pocket-clip"), is_recorded("outputs/base/model.safetensors")
        (False, True)
    """
    return architecture.endswith(".safetensors")


def open_recorded(base: str | Path, device: str | torch.device) -> tuple[Modality, Model]:
    """Return the modality and the model of a base, with the base's weights.

    Args:
        base: the file of its weights.
        device: where the model goes.

    Raises:
        MergeflowError: the file has no such record.
    """
    with open_checkpoint(base) as state:
        if SECTION not in state.metadata:
            raise MergeflowError(
                f"{base} does not say what kind of model it is: name its architecture, or give the base that the stage "
                "`base` of a project of texts has written."
            )
        values = json.loads(state.metadata[SECTION])
        modality = MODALITIES.get(values["modality"])
        section = validated(SECTIONS.get(modality.name).model, values, f"the record of {base}")
        model = modality.build(section, state.metadata)
        model.load(state)
    model.module.to(device)
    return modality, model
