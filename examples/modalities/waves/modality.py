"""Waves: the convolution is what is merged; each task trains a linear head on its features."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergeflow.checkpoints import write_checkpoint
from mergeflow.data import load_split
from mergeflow.modalities.classification import Classification, check_classes
from mergeflow.modalities.heads import Head, save_head
from mergeflow.modality import Base, Modality, Model, Network

from .sections import DataSection, ModelSection


class Convolution(nn.Module):
    """The mean energy of filtered series: [n, length] to features [n, channels]."""

    def __init__(self, channels: int, seed: int) -> None:
        super().__init__()
        weight = torch.randn(channels, 1, 9, generator=torch.Generator().manual_seed(seed)) / 3
        self.filters = nn.Conv1d(1, channels, kernel_size=9, bias=False)
        self.filters.load_state_dict({"weight": weight})

    def forward(self, series: Tensor) -> Tensor:
        return self.filters(series[:, None]).square().mean(dim=2)


def build(section: ModelSection, record: Mapping[str, str]) -> Network:
    return Network(Convolution(section.channels, section.seed))


def make_base(section: ModelSection, data: DataSection, manifests: Mapping[str, Any], base: Base) -> None:
    write_checkpoint(base.model, build(section, {}).state(), {"role": "base"})
    for task, manifest in manifests.items():
        names = manifest["class_names"]
        weight, bias = torch.zeros(len(names), section.channels), torch.zeros(len(names))
        save_head(Head(weight, 1.0, names, bias, trained=True), base.head(task))


def open_examples(task: str, folder: Path, split: str, head: Head | None, device: torch.device) -> Classification:
    data = load_split(folder, split)
    check_classes(task, head, data.class_names)
    return Classification(task, torch.from_numpy(data.series), torch.from_numpy(data.labels.copy()).to(device), head)


def blank(model: Model, section: ModelSection, data: DataSection, count: int, classes: int) -> Classification:
    head = Head(torch.zeros(classes, section.channels), 1.0, [""] * classes, torch.zeros(classes), trained=True)
    return Classification("blank", torch.zeros(count, data.length), torch.zeros(count, dtype=torch.int64), head)


MODALITY = Modality("waves", build, make_base, open_examples, blank=blank)
