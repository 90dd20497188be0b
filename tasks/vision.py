"""What the stages share: the base's model and heads, the experts, and prepared splits, from the project's outputs."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint
from mergeflow.data import load_split
from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.heads import Head, load_head
from mergeflow.modalities.vision.models import image_model, load_clip
from mergeflow.modality import Network
from tasks.project.devices import device_names, device_slot
from tasks.project.stage import StageIO


def choose_device(io: StageIO) -> torch.device:
    """Return a device that `run.device` allows, held until the stage ends; `auto` is CUDA where there is one.

    Raises:
        MergeflowError: CUDA is asked for and there is none.
    """
    # One thread per stage: results must not depend on how many stages run at once.
    torch.set_num_threads(1)
    return torch.device(io.holds.enter_context(device_slot(device_names(io.params.run.device))))


def load_model(io: StageIO, checkpoint: str, device: torch.device) -> Network:
    """Return a model of the configured architecture with the weights of an output file."""
    model = image_model(load_clip(io.section("model").architecture))
    with open_checkpoint(io.dep(checkpoint)) as state:
        model.load(state)
    model.module.to(device)
    return model


def load_task_head(io: StageIO, task: str, device: torch.device) -> Head:
    """Return a task's frozen zero-shot head."""
    return load_head(io.dep(layout.head(task))).to(device)


def load_examples(io: StageIO, split: str, task: str, device: torch.device) -> Classification:
    """Return one split of one task, inputs on disk, labels and head on the device.

    Raises:
        MergeflowError: a label lies outside the head.
    """
    data = load_split(io.dep(layout.split(split, task)), split)
    head = load_task_head(io, task, device)
    if head.class_names != data.class_names:
        raise MergeflowError(
            f"task '{task}': the head has {len(head.class_names)} classes and the data {len(data.class_names)}, or "
            f"their names differ: run `mergeflow run` so that both come from the same manifest."
        )
    return Classification(task, torch.from_numpy(data.images), torch.from_numpy(data.labels.copy()).to(device), head)


def expert_summary(io: StageIO, task: str) -> dict[str, Any]:
    """Return what `finetune` recorded of an expert."""
    summary: dict[str, Any] = json.loads(io.dep(layout.expert_training(task)).read_text())
    return summary


def load_states(
    io: StageIO, tasks: Iterable[str]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return the base's and the experts' tensors, by task."""
    return _tensors(io.dep(layout.BASE_MODEL)), {task: _tensors(io.dep(layout.expert_model(task))) for task in tasks}


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as state:
        return {name: state[name].clone() for name in state}
