"""Losses of a CLIP image encoder as functions of one flat float64 vector."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, normalize

from mergeflow.analysis.equivalence.gradient_descent import Loss
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.models import ImageEncoder


def encoder_losses(encoder: ImageEncoder, tasks: Sequence[Classification]) -> tuple[Tensor, list[Loss]]:
    """Return the encoder's weights as one float64 vector [P], and each task's mean cross-entropy as a function of it.

    The encoder stays as it is: a copy of its tower computes in float64. `ImageEncoder` itself rounds its features to
    float32, so the tower is called directly; attention takes the plain kernel, the only one with a second derivative.

    Args:
        encoder: the image encoder.
        tasks: T tasks of images with zero-shot heads.

    Example:
        >>> from mergeflow.modalities.vision.models import load_clip
        >>> from mergeflow.modalities.heads import Head
        >>> encoder = ImageEncoder(load_clip("pocket-clip"))
        >>> task = Classification(
        ...     "pets",
        ...     torch.zeros(1, 32, 32, 3, dtype=torch.uint8),
        ...     torch.tensor([0]),
        ...     Head(torch.eye(2, 128), 10.0, ["cat", "dog"]),
        ... )
        >>> start, losses = encoder_losses(encoder, [task])
        >>> start.shape, start.dtype, losses[0](start).shape
        (torch.Size([836864]), torch.float64, torch.Size([]))
    """
    tower = copy.deepcopy(encoder.visual).double().requires_grad_(False)
    shapes = {name: parameter.shape for name, parameter in tower.named_parameters()}
    start = torch.cat([parameter.flatten() for parameter in tower.parameters()])

    def task_loss(task: Classification) -> Loss:
        head = task.head
        assert head is not None, "image tasks have zero-shot heads"
        pixels = encoder.normalised_pixels(task.inputs[:]).double()

        def loss(point: Tensor) -> Tensor:
            parts = point.split([shape.numel() for shape in shapes.values()])
            weights = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
            with sdpa_kernel(SDPBackend.MATH):
                features = normalize(functional_call(tower, weights, (pixels,)), dim=-1)
            return cross_entropy(head(features), task.labels)

        return loss

    return start, [task_loss(task) for task in tasks]
