"""Accuracy of one image encoder on many tasks, with the images decoded once and the heads built once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mergeflow.modalities.vision.heads import Head

Encoder = Callable[[Tensor], Tensor]  # uint8 images [B, S, S, 3] → features [B, D]


@dataclass(frozen=True)
class LabelledImages:
    """One split of one task.

    Attributes:
        images: uint8 [N, S, S, 3]; they may stay on disk, a batch at a time goes to the encoder's device.
        labels: int64 [N], on the encoder's device.
        head: the task's zero-shot head, there too.
    """

    images: Tensor
    labels: Tensor
    head: Head

    def first(self, count: int) -> "LabelledImages":
        """Return the first images; a split goes through the classes in turn or in random order."""
        return LabelledImages(self.images[:count], self.labels[:count], self.head)


@torch.inference_mode()
def correct_predictions(encoder: Encoder, data: LabelledImages, batch_size: int = 256) -> np.ndarray:
    """Return for each image whether the class with the largest logit is the right one: bool [N]."""
    hits = [
        data.head.logits(encoder(images)).argmax(dim=1) == labels
        for images, labels in zip(data.images.split(batch_size), data.labels.split(batch_size), strict=True)
    ]
    return torch.cat(hits).cpu().numpy()


def accuracies(encoder: Encoder, tasks: Mapping[str, LabelledImages], batch_size: int = 256) -> dict[str, float]:
    """Return each task's accuracy, a fraction in [0, 1]."""
    return {task: float(correct_predictions(encoder, data, batch_size).mean()) for task, data in tasks.items()}
