"""Where a registered model answers: on a CUDA device with room for the model and its batches, else on the processor."""

import warnings
from dataclasses import replace
from types import SimpleNamespace

import torch

from mergeflow.memory.forecast import in_words
from mergeflow.memory.needs import Need, blank_model, judging_need
from mergeflow.merging.device_memory import fits, free_bytes, in_bytes, with_torch
from mergeflow.modalities.served import SERVED, Loaded
from mergeflow.modality import Model


def placed(loaded: Loaded) -> Loaded:
    """Return a registered model on the CUDA device, where there is one with room; else as it is, with a warning.

    Args:
        loaded: the model, on the processor.
    """
    if not torch.cuda.is_available():
        return loaded
    need, free = answering_need(loaded), free_bytes("cuda")
    if need is not None and not fits(need.total, free):
        warnings.warn(
            f"the model answers on the processor: it needs about {in_bytes(with_torch(need.total))} of cuda, where "
            f"{in_bytes(free)} are free: {in_words(need)}.",
            stacklevel=2,
        )
        return loaded
    device = torch.device("cuda")
    loaded.model.module.to(device)
    return replace(loaded, device=device)


def answering_need(loaded: Loaded) -> Need | None:
    """Return what answering takes of a CUDA device at its peak; None of a modality without blank examples.

    Args:
        loaded: the model.
    """
    make, rows = loaded.modality.blank, SERVED.get(loaded.modality.name).rows
    if make is None:
        return None

    def build() -> Model:
        return loaded.modality.build(loaded.section, loaded.record)

    plain, data = blank_model(build), SimpleNamespace(**loaded.decoding)
    most = max(len(names) for names in loaded.class_names.values())
    return judging_need(
        blank_model(build), lambda count: make(plain, loaded.section, data, count, max(most, 1)), judged=rows
    )
