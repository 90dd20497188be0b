"""What the theorems are measured on: small feed-forward nets, and the embedded CLIP's image encoder, in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mergeflow.analysis.equivalence.feed_forward import FeedForward, random_feed_forward, random_tasks
from mergeflow.analysis.equivalence.gradient_descent import Loss, descend, summed
from mergeflow.analysis.equivalence.image_encoder import encoder_losses
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.vision.heads import build_head
from mergeflow.modalities.vision.models import ImageEncoder, load_clip
from mergeflow.suites import get_suite

_SLICES = 4  # micro-batches per epoch


@dataclass(frozen=True)
class Problem:
    """T tasks from one starting point.

    Args:
        name: of the model.
        tasks: names of the tasks.
        start: θ0, float64 [P].
        losses: per task the mean loss over all its data.
        batches: per task the losses of its micro-batches, each its share of the mean; their sum is the task's loss.
        inputs: per task the inputs, where the model is a feed-forward net.
        net: the feed-forward net, or None.
    """

    name: str
    tasks: tuple[str, ...]
    start: Tensor
    losses: tuple[Loss, ...]
    batches: tuple[tuple[Loss, ...], ...]
    inputs: tuple[Tensor, ...] = ()
    net: FeedForward | None = None

    def joint_points(self, scale: float, step: float, count: int) -> list[Tensor]:
        """Return the joint iterates θ_MT^(0), ..., θ_MT^(count−1)."""
        return [self.start + move for move in descend(summed(self.losses), self.start, scale * step, count - 1)]

    def switched_units(self, scale: float, step: float, epochs: int) -> int:
        """Count ReLUs that switch side at any iterate of the experts or the joint run; 0 for smooth models."""
        if self.net is None or self.net.activation != "relu":
            return 0
        joint = self.joint_points(scale, step, epochs)
        found = 0
        for loss, inputs in zip(self.losses, self.inputs, strict=True):
            own = [self.start + move for move in descend(loss, self.start, step, epochs - 1)]
            found += self.net.switched([*joint, *own], inputs)
        return found


def feed_forward_problem(
    activation: str, widths: tuple[int, ...], tasks: int = 3, samples: int = 32, seed: int = 0, gain: float = 1.0
) -> Problem:
    """Return random tasks for a random net.

    Args:
        activation: of `feed_forward.ACTIVATIONS`.
        widths: input width, hidden widths, number of classes.
        tasks: T.
        samples: inputs per task.
        seed: of weights and data.
        gain: factor on the initial weights; small ones make the spectral norms small.
    """
    net = FeedForward(widths, activation)
    data = random_tasks(tasks, widths[0], widths[-1], samples, seed)
    slices = _slices(samples)
    return Problem(
        name=f"{activation} net",
        tasks=tuple(f"task {number + 1}" for number in range(tasks)),
        start=random_feed_forward(net, seed, gain),
        losses=tuple(net.loss(x, y) for x, y in data),
        batches=tuple(tuple(_share(net.loss(x[p], y[p]), len(x[p]) / samples) for p in slices) for x, y in data),
        inputs=tuple(x for x, _ in data),
        net=net,
    )


def encoder_problem(tasks: Sequence[str], images: int) -> Problem:
    """Return the embedded CLIP's image encoder on the first training images of some tasks of pocket8.

    Args:
        tasks: names of tasks of pocket8.
        images: images per task.
    """
    clip = load_clip("pocket-clip", "pocket8")
    suite, encoder = get_suite("pocket8"), ImageEncoder(clip)
    whole = []
    for name in tasks:
        task = suite.tasks[name]
        pairs = [task.sample("train", index) for index in range(images)]
        pixels = torch.stack([torch.from_numpy(image) for image, _ in pairs])
        labels = torch.tensor([label for _, label in pairs])
        head = build_head(clip, task.class_names, task.templates)
        whole.append(Classification(name, pixels, labels, head))
    slices = _slices(images)
    pieces = [replace(task, inputs=task.inputs[p], labels=task.labels[p]) for task in whole for p in slices]
    start, losses = encoder_losses(encoder, [*whole, *pieces])
    parts = iter(losses[len(whole) :])
    return Problem(
        name="CLIP image encoder",
        tasks=tuple(tasks),
        start=start,
        losses=tuple(losses[: len(whole)]),
        batches=tuple(tuple(_share(next(parts), (p.stop - p.start) / images) for p in slices) for _ in whole),
    )


def _slices(count: int) -> list[slice]:
    size = -(-count // _SLICES)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _share(loss: Loss, weight: float) -> Callable[[Tensor], Tensor]:
    return lambda point: weight * loss(point)
