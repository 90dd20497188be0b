"""The nets that the studies of linearity train from nothing: an MLP on rotated digits, a residual net on splits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from mergeflow.data.task import Example, Place
from mergeflow.linearity.networks import transformed
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.nets import SmallResNet, mlp, on_pixels, pixels, recompute_statistics, resnet18
from mergeflow.modalities.vision.decoding import image_decoding
from mergeflow.modalities.vision.sources.kinds import open_images
from mergeflow.modalities.vision.transforms import rotate
from mergeflow.modality import Examples, Model, Network, State
from mergeflow.training import FineTuneSettings
from studies.lab.tuning import drawn_weights, trained
from tasks.project.sections import Section


class Tuning(Section):
    """Plain SGD at a constant rate. `epochs` or `steps`: how long."""

    learning_rate: float = Field(gt=0)
    epochs: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int = Field(64, ge=1)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)

    def settings(self) -> FineTuneSettings:
        """Return these as the settings of the one training loop."""
        length: dict[str, Any] = {"regime": "epochs", "epochs": self.epochs}
        if self.steps is not None:
            length = {"regime": "steps", "steps": self.steps}
        return FineTuneSettings(
            **length,
            batch_size=self.batch_size,
            optimiser="sgd",
            momentum=self.momentum,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            warmup=0.0,
            schedule="constant",
            gradient_clip=0.0,
            save_every=1_000_000,
        )


class World(Section):
    """Tasks on one source of pictures, and a net.

    source: an address as in params.yaml's `tasks`. angles: of rotated tasks, in degrees; the net is pre-trained on the
    first. splits: of class splits instead, a transform of the source each or another address; the first likewise.
    size: pixels a side. train, test: examples of each task, at most. architecture: `mlp` (grey pixels), `resnet20`
    or `resnet18`. hidden: of the MLP. width: channels of ResNet-20's first stage.
    """

    source: str
    angles: list[float] = Field(default_factory=list)
    splits: list[str] = Field(default_factory=list)
    size: int = Field(ge=8)
    train: int = Field(ge=32)
    test: int = Field(ge=32)
    architecture: Literal["mlp", "resnet20", "resnet18"]
    hidden: list[int] = Field(default_factory=lambda: [100, 100, 100])
    width: int = Field(8, ge=8)
    pretrain: Tuning
    tune: Tuning


@dataclass(frozen=True)
class NetTask:
    """A task of a world: what is trained on and what is looked at."""

    train: Classification
    test: Classification


Tasks = Callable[[], dict[str, NetTask]]
"""Opens a world when the first net that is not kept yet needs it, and keeps it."""


def open_world(world: World, root: Path) -> dict[str, NetTask]:
    """Return the world's tasks by name; the first is the one that nets are pre-trained on."""
    if world.angles:
        upright = {split: _pictures(world.source, split, count, world.size, root) for split, count in _counts(world)}
        return {
            f"{angle:g}°": NetTask(*(_task(f"{angle:g}°", _turned(*upright[split], angle), world) for split in upright))
            for angle in world.angles
        }
    return {
        name: NetTask(
            *(_task(name, _pictures(source, split, count, world.size, root), world) for split, count in _counts(world))
        )
        for name, source in ((text.rpartition("/")[2], _joined(world.source, text)) for text in world.splits)
    }


def _counts(world: World) -> list[tuple[str, int]]:
    return [("train", world.train), ("test", world.test)]


def _joined(source: str, part: str) -> str:
    """Return an address with a further transform, or, where the part is an address itself, that."""
    if ":" in part:
        return part
    return f"{source}{'&' if '?' in source else '?'}{part}"


@lru_cache(maxsize=10)  # the worlds of a study differ in their nets more often than in their pictures
def _pictures(source: str, split: str, count: int, size: int, root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return up to `count` images uint8 [n, S, S, 3] and labels of one split, the first that the transforms leave."""
    raw = open_images(source.partition("?")[0].rpartition("/")[2], source, root=root)
    decode = image_decoding(size).decode
    seen = (transformed(raw, example, Place(split, row, raw.seed)) for row, example in enumerate(raw.splits[split]()))
    kept = [decode(example, source).arrays for example in islice((one for one in seen if one is not None), count)]
    return np.stack([one["images"] for one in kept]), np.array([int(one["labels"]) for one in kept])


def _turned(images: np.ndarray, labels: np.ndarray, angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures turned as the transform `rotate` turns them; they are drawn once for all angles."""
    if not angle:
        return images, labels
    apply = rotate(str(angle), None).apply
    turned = []
    for image in images:
        example = apply(Example(Image.fromarray(image), ""), Place("train", 0, 0))
        assert example is not None
        turned.append(np.asarray(example.edited(example.read())))
    return np.stack(turned), labels


def _task(name: str, data: tuple[np.ndarray, np.ndarray], world: World) -> Classification:
    images, labels = torch.from_numpy(data[0]), torch.from_numpy(data[1])
    if world.architecture == "mlp":
        return Classification(name, images[..., 0].contiguous(), labels, encode=on_grey)
    return Classification(name, images, labels, encode=on_pixels)


def on_grey(module: nn.Module, images: Tensor) -> Tensor:
    """Call a net on grey uint8 images [n, S, S], scaled to −1 … 1."""
    logits: Tensor = module(images.float() / 127.5 - 1)
    return logits


def new_net(world: World, tasks: Mapping[str, NetTask], seed: int) -> Network:
    """Return the world's net with weights drawn by a seed; it has a logit for each label of any task.

    Args:
        world: its architecture and its sizes.
        tasks: all tasks the net will see.
        seed: of the weights.
    """
    classes = 1 + max(int(task.train.labels.max()) for task in tasks.values())
    if world.architecture == "mlp":
        return Network(mlp([world.size**2, *world.hidden, classes], seed).eval())
    if world.architecture == "resnet18":
        return Network(resnet18(classes, seed).eval())
    return Network(SmallResNet(classes, world.width, seed=seed).eval())


def with_statistics(model: Model, state: State, data: Sequence[Classification], count: int = 256) -> dict[str, Tensor]:
    """Return weights whose BatchNorm statistics were computed again on training pictures of these tasks.

    Args:
        model: the network, whose weights are overwritten.
        state: the weights.
        data: training examples of the tasks.
        count: of each task's first pictures, one batch of them at most.
    """
    model.load(state)
    batches = [pixels(one.inputs[torch.arange(min(count, len(one)))]) for one in data]
    recompute_statistics(model.module, batches)
    return drawn_weights(model)


def has_statistics(model: Model) -> bool:
    """Whether the net has BatchNorm's running statistics."""
    return any("running_mean" in name for name in model.state())


class Tuned(Protocol):
    """Models tuned from one start, and the examples that they are looked at.

    Attributes:
        model: What weights are loaded into.
        start: θ0.
        tuned: Task → θ_t.
        tests: Task → examples, of the tasks tuned on and of the controls.
    """

    @property
    def model(self) -> Model: ...
    @property
    def start(self) -> State: ...
    @property
    def tuned(self) -> Mapping[str, State]: ...
    @property
    def tests(self) -> Mapping[str, Examples]: ...
    def controls(self, task: str) -> list[str]:
        """Return the tasks that an edit with this task's vector should leave alone."""


@dataclass(frozen=True)
class Trained:
    """A pre-trained net and those tuned from it.

    Attributes:
        model: What weights are loaded into.
        start: The pre-trained weights.
        tuned: Task → weights.
        tasks: All tasks.
        first: Name of the task that it was pre-trained on.
    """

    model: Model
    start: dict[str, Tensor]
    tuned: dict[str, dict[str, Tensor]]
    tasks: dict[str, NetTask]
    first: str

    @property
    def tests(self) -> dict[str, Classification]:
        """Task → examples that are looked at."""
        return {task: one.test for task, one in self.tasks.items()}

    def controls(self, task: str) -> list[str]:
        """Return the task of the pre-training, the control of every edit."""
        return [self.first]


def train_world(
    world: World, tasks: dict[str, NetTask], seed: int, report: Callable[[int, int], None] = lambda done, total: None
) -> Trained:
    """Pre-train on the first task and tune on each of the others.

    Args:
        world: architecture, sizes and settings.
        tasks: by name; the first is the one to pre-train on.
        seed: of the weights and of the order of examples.
        report: told (tasks tuned, tasks to tune).
    """
    first, *others = tasks
    model = new_net(world, tasks, seed)
    start = trained(model, drawn_weights(model), tasks[first].train, world.pretrain, seed)
    tuned = {}
    for done, task in enumerate(others, start=1):
        tuned[task] = trained(model, start, tasks[task].train, world.tune, seed)
        report(done, len(others))
    return Trained(model, start, tuned, tasks, first)
