"""Cross-entropy of one image encoder on many tasks."""

from collections.abc import Mapping

import torch
from torch.nn.functional import cross_entropy

from mergeflow.evaluation.accuracy import Encoder, LabelledImages


@torch.inference_mode()
def cross_entropies(encoder: Encoder, tasks: Mapping[str, LabelledImages], batch_size: int = 256) -> dict[str, float]:
    """Return each task's mean cross-entropy.

    L_t = −(1/n) Σ_i log p(y_i | x_i), in nats; a multi-task loss is Σ_t L_t

    Args:
        encoder: uint8 images to features.
        tasks: images, labels and head by task.
        batch_size: images per forward pass; it changes the result by rounding alone.

    Example:
        >>> from mergeflow.modalities.vision.heads import Head
        >>> data = LabelledImages(torch.eye(2), torch.tensor([0, 1]), Head(torch.eye(2), 0.0, ["cat", "dog"]))
        >>> round(cross_entropies(lambda images: images, {"pets": data})["pets"], 4)
        0.6931
    """
    found = {}
    for task, data in tasks.items():
        total = 0.0
        for images, labels in zip(data.images.split(batch_size), data.labels.split(batch_size), strict=True):
            total += float(cross_entropy(data.head.logits(encoder(images)).double(), labels, reduction="sum"))
        found[task] = total / len(data.labels)
    return found
