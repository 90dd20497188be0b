"""Find modalities by name, and open models whose base describes them in its metadata."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mergeflow.checkpoints import open_checkpoint
from mergeflow.errors import MergeflowError
from mergeflow.modalities.sections import SECTIONS
from mergeflow.modality import Modality, Model
from mergeflow.plugins import Parts
from mergeflow.schema import validated

MODALITIES = Parts("modality", Modality, "mergeflow.modalities", "modalities", "modality")
SECTION = "model"


def is_recorded(architecture: str) -> bool:
    """Return whether an architecture is given as the file of a base instead of a name."""
    return architecture.endswith(".safetensors")


def open_recorded(base: str | Path, device: str | torch.device) -> tuple[Modality, Model]:
    """Open a base that a project's stage `base` wrote: its modality, and the model with the base's weights."""
    modality, section, record = read_record(base)
    with open_checkpoint(base) as state:
        model = modality.build(section, record)
        model.load(state)
    model.module.to(device)
    return modality, model


def read_record(base: str | Path) -> tuple[Modality, Any, Mapping[str, str]]:
    """Return the modality of a base, its section `model`, and all that its file records; no weight is read."""
    with open_checkpoint(base) as state:
        record = dict(state.metadata)
    if SECTION not in record:
        raise MergeflowError(
            f"{base} does not say what kind of model it is: name its architecture, or give the base that the stage "
            "`base` of a project of texts has written."
        )
    values = json.loads(record[SECTION])
    modality = MODALITIES.get(values["modality"])
    return modality, validated(SECTIONS.get(modality.name).model, values, f"the record of {base}"), record
