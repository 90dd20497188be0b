"""What the stages share: the base's model and heads, the experts, and prepared splits, from the project's outputs."""

from collections.abc import Iterable
from pathlib import Path

import torch

from mergeflow import layout
from mergeflow.checkpoints import open_checkpoint, read_state
from mergeflow.documents import Expert, read_document
from mergeflow.modalities.catalog import MODALITIES
from mergeflow.modalities.heads import Head, read_head
from mergeflow.modality import Examples, Modality, Model
from mergeflow.training.arithmetic import arithmetic
from tasks.project.stage import StageIO
from tasks.running.devices import device_names, device_slot


def choose_device(io: StageIO) -> torch.device:
    """Return a device that `run.device` allows, held until the stage ends; `auto` is CUDA where there is one."""
    device = torch.device(io.holds.enter_context(device_slot(device_names(io.params.run.device))))
    io.holds.enter_context(arithmetic())  # after the device: who holds none waits for nobody
    return device


def load_model(io: StageIO, checkpoint: str, device: torch.device) -> Model:
    """Return a model of the configured kind with the weights of an output file."""
    with open_checkpoint(io.dep(checkpoint)) as state:
        model = modality_of(io).build(io.section("model"), state.metadata)
        model.load(state)
    model.module.to(device)
    return model


def modality_of(io: StageIO) -> Modality:
    return MODALITIES.get(io.section("model").modality)


def load_base_head(io: StageIO, task: str, device: torch.device) -> Head | None:
    """Return the head that a task's training starts from, or the frozen one; None where tasks need no head."""
    head = read_head(io.dep(layout.head(task)))
    return None if head is None else head.to(device)


def expert_head_path(io: StageIO, task: str) -> Path:
    """Return the file of an expert's head; without one of its own it has what the base has: the frozen one, or none."""
    path = io.dep(layout.expert_head(task))
    return path if path.exists() else io.dep(layout.head(task))


def load_examples(io: StageIO, split: str, task: str, device: torch.device, head: Head | None) -> Examples:
    """Return one split of one task, judged with a head."""
    return modality_of(io).open(task, io.dep(layout.split(split, task)), split, head, device)


def load_for_experts(io: StageIO, split: str, tasks: Iterable[str], device: torch.device) -> dict[str, Examples]:
    """Return one split of each task, judged with its expert's head."""
    heads = {task: read_head(expert_head_path(io, task)) for task in tasks}
    return {task: load_examples(io, split, task, device, head and head.to(device)) for task, head in heads.items()}


def expert_summary(io: StageIO, task: str) -> Expert:
    return read_document(io.dep(layout.expert_training(task)), Expert)


def load_states(
    io: StageIO, tasks: Iterable[str]
) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return the base's and the experts' tensors, by task."""
    experts = {task: read_state(io.dep(layout.expert_model(task))) for task in tasks}
    return read_state(io.dep(layout.BASE_MODEL)), experts
