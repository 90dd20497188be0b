"""What the theorems are measured on: small feed-forward nets, and a project's model, in float64."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from mergeflow.analysis.equivalence.flat import flat_loss, flat_weights, trained
from mergeflow.analysis.equivalence.gradient_descent import Loss, descend, summed
from mergeflow.analysis.equivalence.nets import Net, random_tasks
from mergeflow.errors import MergeflowError
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.models import ImageEncoder
from mergeflow.modality import Model


@dataclass(frozen=True)
class Problem:
    """T tasks from one starting point.

    Args:
        name: of the model.
        module: the model in float64, with the weights θ0.
        examples: of every task.
        net: the feed-forward net that `module` is, or None.
    """

    name: str
    module: nn.Module
    examples: tuple[Classification, ...]
    net: Net | None = None

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks' names."""
        return tuple(one.task for one in self.examples)

    @cached_property
    def start(self) -> Tensor:
        """θ0, float64 [P]."""
        return flat_weights(self.module)

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """Per task the mean loss over all its examples."""
        return tuple(flat_loss(self.module, one) for one in self.examples)

    def expert(self, task: int, step: float, epochs: int) -> Tensor:
        """Return θ_t^(k) as the training loop makes it, [P].

        Args:
            task: index of the task.
            step: η > 0.
            epochs: k ≥ 1.
        """
        return trained(self.module, self.examples[task : task + 1], step, epochs)

    def joint(self, step: float, epochs: int) -> Tensor:
        """Return θ_MT^(k) of the joint run as the training loop makes it, [P]."""
        return trained(self.module, self.examples, step, epochs)

    def joint_points(self, scale: float, step: float, count: int) -> list[Tensor]:
        """Return the joint iterates θ_MT^(0), ..., θ_MT^(count−1), each [P].

        Args:
            scale: α; the joint run has step α η.
            step: η > 0.
            count: iterates, the start among them.
        """
        return [self.start + move for move in descend(summed(self.losses), self.start, scale * step, count - 1)]

    def switched_units(self, scale: float, step: float, epochs: int) -> int:
        """Count ReLUs that switch side at any iterate of the experts or the joint run; 0 for smooth models.

        Args:
            scale: α; the joint run has step α η.
            step: η > 0.
            epochs: k, whose last iterate does not count.
        """
        if self.net is None or self.net.activation != "relu":
            return 0
        joint = self.joint_points(scale, step, epochs)
        found = 0
        for loss, one in zip(self.losses, self.examples, strict=True):
            own = [self.start + move for move in descend(loss, self.start, step, epochs - 1)]
            assert isinstance(one.inputs, Tensor)
            found += self.net.switched([*joint, *own], one.inputs)
        return found


def feed_forward_problem(
    activation: str, widths: tuple[int, ...], tasks: int = 3, samples: int = 32, seed: int = 0, gain: float = 1.0
) -> Problem:
    """Return random tasks for a random net.

    Args:
        activation: of `nets.SLOPES`.
        widths: input width, hidden widths, number of classes.
        tasks: T.
        samples: inputs per task.
        seed: of weights and data.
        gain: factor on the initial weights; small ones make the spectral norms small.
    """
    net = Net(widths, activation, seed)
    module = deepcopy(net.module)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(gain)
    data = random_tasks(tasks, widths[0], widths[-1], samples, seed)
    return Problem(f"{activation} net", module, tuple(data), net)


class _Tower(nn.Module):
    """The image tower in float64, from normalised pixels to unit features; `ImageEncoder` rounds these to float32."""

    def __init__(self, encoder: ImageEncoder) -> None:
        super().__init__()
        self.visual = deepcopy(encoder.visual).double()

    def forward(self, pixels: Tensor) -> Tensor:
        return normalize(self.visual(pixels), dim=-1)


def image_problem(encoder: ImageEncoder, tasks: Sequence[Classification]) -> Problem:
    """Return an image encoder on tasks of images, all in float64.

    Args:
        encoder: the encoder; it stays as it is.
        tasks: T tasks of uint8 images with zero-shot heads.
    """
    examples = tuple(
        Classification(task.task, encoder.normalised_pixels(task.inputs[:]).double(), task.labels, task.head)
        for task in tasks
    )
    return Problem("CLIP image encoder", _Tower(encoder), examples)


def model_problem(model: Model, tasks: Sequence[Classification]) -> Problem:
    """Return a project's model on examples of its tasks, all in float64: an image encoder, or any net of numbers.

    Args:
        model: the model; it stays as it is.
        tasks: T tasks, judged by a frozen head or by the net's own logits.

    Raises:
        MergeflowError: a task's head is trained beside the model, or its inputs are not one tensor.
    """
    moving = [task.task for task in tasks if task.head is not None and getattr(task.head, "trained", False)]
    if moving:
        raise MergeflowError(
            f"the heads of {', '.join(moving)} are trained beside the model, and the theorems are of a loss of the "
            "shared weights alone: name tasks whose heads are frozen."
        )
    if isinstance(model.module, ImageEncoder):
        return image_problem(model.module, tasks)
    module = deepcopy(model.module).double()
    examples = []
    for task in tasks:
        if not isinstance(task.inputs, Tensor) or not task.inputs.is_floating_point():
            raise MergeflowError(
                f"task '{task.task}': its inputs are not one tensor of numbers, which the theorems are measured on. "
                "Name no task there, and the study measures its random nets alone."
            )
        examples.append(replace(task, inputs=task.inputs.double()))
    return Problem(type(module).__name__, module, tuple(examples))
