"""Prepared splits as estimates take them: with the head that a file holds, or without one where the task has none."""

from pathlib import Path

import torch

from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import read_head
from mergeflow.modalities.regression import Regression
from mergeflow.modality import Examples, Modality


def open_headed(modality: Modality, task: str, folder: str, split: str, file: str | None, device: str) -> Examples:
    """Return a split whose predictions can be asked for.

    Args:
        modality: of the model.
        task: the task's name.
        folder: of the prepared split.
        split: train, validation or test.
        file: of the task's head, which may say that it has none; None where no file is named.
        device: of the head and the labels.

    Raises:
        MergeflowError: no file is named, and the task is judged by a head.
    """
    head = None if file is None else read_head(file)
    head = None if head is None else head.to(device)
    found = modality.open(task, Path(folder), split, head, torch.device(device))
    if file is None and isinstance(found, Classification | Regression):
        raise MergeflowError(f"the predictions of task '{task}' need its head: give --head.")
    return found
