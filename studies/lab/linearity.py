"""What the studies of linearity share: the nets that they train from nothing, rows, paths of loss, a figure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from mergeflow.data.task import Example, Place
from mergeflow.evaluation.accuracy import accuracies, losses
from mergeflow.linearity.affine import DIRECTION, LENGTH, TRIVIAL, Linearity, combine
from mergeflow.linearity.networks import transformed
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.nets import SmallResNet, mlp, on_pixels, pixels, recompute_statistics, resnet18
from mergeflow.modalities.vision.decoding import image_decoding
from mergeflow.modalities.vision.sources.kinds import open_images
from mergeflow.modalities.vision.transforms import rotate
from mergeflow.modality import Examples, Model, Network, State
from mergeflow.training import FineTuneSettings
from studies.lab.claims import Claim, Samples
from studies.lab.plots import table
from studies.lab.rows import Row
from studies.lab.tuning import drawn_weights, trained
from tasks.plotting.drawing import dress, panels, plain, series_style
from tasks.plotting.linearity import finish_layers
from tasks.project.sections import Section

# The nets: an MLP on rotated digits, a residual net on splits


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
    """Return the world's net with weights drawn by a seed; it has a logit for each label of any task."""
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
    """Models tuned from one start, and the examples that they are looked at."""

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
    """A pre-trained net and those tuned from it."""

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


# Rows of the measurement, their worst cases, paths of loss, a figure


@dataclass(frozen=True)
class TunedModels:
    """Models tuned from one start on some tasks; the control of a task are all the others.

    Attributes:
        model: What weights are loaded into.
        start: θ0.
        tuned: Task → θ_t.
        tests: Task → examples, or of a model of sequences what it is asked.
    """

    model: Model
    start: State
    tuned: Mapping[str, State]
    tests: Mapping[str, Any]

    def controls(self, task: str) -> list[str]:
        """Return all the other tasks."""
        return [other for other in self.tuned if other != task]


def rows_of(found: Mapping[str, Mapping[str, Linearity]], **settings: Any) -> list[Row]:
    """Return one row for each combination and layer: means, the quartiles of 1 − cos and coef, and coef's median."""
    rows = []
    for name, layers in found.items():
        for depth, (layer, values) in enumerate(layers.items()):
            low, high = np.quantile(values.distance, [0.25, 0.75])
            coef = np.quantile(values.coef, [0.25, 0.5, 0.75])
            row = {**settings, "combination": name, "layer": layer, "depth": depth, "samples": len(values.coef)}
            row |= {"distance": float(values.distance.mean()), "distance_low": float(low), "distance_high": float(high)}
            row |= {"base": float(values.base.mean()), "coef_low": float(coef[0]), "coef": float(coef[1])}
            rows.append({**row, "coef_high": float(coef[2]), "error": float(values.error.mean())})
    return rows


def worst_share(rows: pd.DataFrame) -> pd.Series:
    """Return by seed the largest 1 − cos in shares of its baseline, over rows that the baseline can decide."""
    share = (rows.distance / rows.base).where(rows.base > TRIVIAL)
    return share.groupby(rows.seed).max()


def worst_length(rows: pd.DataFrame) -> pd.Series:
    """Return by seed the largest |median coef − 1|."""
    return (rows.coef - 1).abs().groupby(rows.seed).max()


def _shares(rows: pd.DataFrame) -> Samples:
    shares = worst_share(rows)
    return {} if shares.isna().any() else {"worst share": shares}


def direction(system: str, says: str, chosen: Callable[[pd.DataFrame], pd.DataFrame], ours: bool = False) -> Claim:
    """Return the claim that features of combined weights point where combined features do; undecided without baseline.

    Args:
        system: of the paper.
        says: the claim.
        chosen: which rows it is about.
        ours: as of `Claim`.
    """
    rule = f"worst 1 − cos, in shares of the baseline where that is above {TRIVIAL},"
    return Claim(
        system, says, lambda rows: _shares(chosen(rows)), high=DIRECTION, of=rule, unit="", digits=2, ours=ours
    )


def length(system: str, says: str, chosen: Callable[[pd.DataFrame], pd.DataFrame], ours: bool = False) -> Claim:
    """Return the claim that features of combined weights are as long as combined features."""
    name = "worst |median coef − 1|"
    return Claim(
        system,
        says,
        lambda rows: {name: worst_length(chosen(rows))},
        high=LENGTH,
        of=name,
        unit="",
        digits=2,
        ours=ours,
    )


def path_rows(
    model: Model, ends: tuple[State, State], examples: Mapping[str, Examples], alphas: Sequence[float], **settings: Any
) -> list[Row]:
    """Return loss and accuracy in % of αθ_i + (1−α)θ_j, a row for each α and task, which the row calls `on`.

    Args:
        model: the network, whose weights are overwritten.
        ends: θ_i and θ_j.
        examples: labelled examples by task.
        alphas: α; 1 is θ_i.
        settings: what else is in every row, such as the seed.
    """
    rows = []
    for alpha in alphas:
        model.load(combine(list(ends), [alpha, 1 - alpha]))
        loss, accuracy = losses(model, examples), accuracies(model, examples)
        rows += [
            {**settings, "alpha": alpha, "on": task, "loss": loss[task], "accuracy": 100 * accuracy[task]}
            for task in examples
        ]
    return rows


def excess(paths: pd.DataFrame) -> pd.DataFrame:
    """Return paths with `chord`, αL(θ_i) + (1 − α)L(θ_j), and `ends`, |L(θ_i) − L(θ_j)|."""
    key = ["seed", "pair", "on"]
    first, second = (paths[paths.alpha == end].set_index(key).loss for end in (1.0, 0.0))
    where = pd.MultiIndex.from_frame(paths[key])
    one, other = first.loc[where].to_numpy(), second.loc[where].to_numpy()
    return paths.assign(chord=paths.alpha * one + (1 - paths.alpha) * other, ends=np.abs(one - other))


def loss_gaps(paths: pd.DataFrame) -> pd.DataFrame:
    """Return how far each path is from linear mode connectivity, in nats: the larger of ends' difference and barrier.

    The barrier is max_α L(θ_α) − [α L(θ_i) + (1 − α) L(θ_j)]. The result has seed, pair, on and gap.
    """
    whole = excess(paths)
    gaps = whole.assign(over=whole.loss - whole.chord).groupby(["seed", "pair", "on"], sort=False)
    return gaps.agg(ends=("ends", "first"), over=("over", "max")).max(axis=1).rename("gap").reset_index()


def layer_table(rows: pd.DataFrame, *index: str) -> pd.DataFrame:
    """Return means of 1 − cos, its baseline, coef and error, and the worst share, by the columns of `index`."""
    columns = {"distance": "1 − cos", "base": "baseline", "coef": "coef", "error": "error"}
    parts = [
        table(rows, list(index), value=value, digits=2 if value == "coef" else 3).rename(columns={value: label})
        for value, label in columns.items()
    ]
    share = rows.assign(share=(rows.distance / rows.base).where(rows.base > TRIVIAL))
    worst = share.groupby([*index, "seed"], sort=False, dropna=False).share.max().reset_index()
    return pd.concat([*parts, table(worst, list(index), value="share", digits=2)], axis=1)


def layers_figure(rows: pd.DataFrame, by: str) -> Figure:
    """Draw mean 1 − cos with quartiles beside the baseline's, and coef's median with quartiles, by layer.

    Args:
        rows: as of `rows_of`; means over what is drawn together.
        by: the column whose values are series.
    """
    layers = list(rows.layer.drop_duplicates())
    figure, (distance, coef) = panels(2, 2, 3.8)
    dress(distance, "Direction", "layer", "1 − cos")
    dress(coef, "Length", "layer", "coef")
    series = list(rows[by].drop_duplicates())
    for number, name in enumerate(series):
        means = rows[rows[by] == name].groupby("layer", sort=False).mean(numeric_only=True).reindex(layers)
        places = np.arange(len(layers)) + (number - (len(series) - 1) / 2) * 0.8 / len(series)
        style = series_style(number) | {"linestyle": ""}
        for panel, middle in ((distance, "distance"), (coef, "coef")):
            bars = [means[middle] - means[f"{middle}_low"], means[f"{middle}_high"] - means[middle]]
            # With a few large values the mean lies outside the quartiles; a bar has no negative length.
            drawn, label = np.maximum(bars, 0), plain(str(name))
            panel.errorbar(places, means[middle], yerr=drawn, label=label, capsize=2.5, elinewidth=1.0, **style)
        hollow = style | {"markerfacecolor": "none", "markeredgecolor": style["color"], "markeredgewidth": 1.2}
        distance.plot(places, means.base, **hollow)
    finish_layers(figure, distance, coef, layers)
    return figure
