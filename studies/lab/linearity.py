"""Shared parts of linearity studies: nets trained from random weights, rows, paths of loss, a figure."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from PIL import Image
from pydantic import Field
from torch import Tensor, nn

from mergeflow.data.task import Example, Place, transformed
from mergeflow.evaluation.accuracy import accuracies, losses
from mergeflow.linearity.affine import DIRECTION, LENGTH, TRIVIAL, Linearity, combine
from mergeflow.modalities.classification import Classification
from mergeflow.modalities.nets import SmallResNet, mlp, on_pixels, pixels, recompute_statistics, resnet18
from mergeflow.modalities.vision.preparation import image_decoding, open_images, rotate
from mergeflow.modality import Examples, Model, Network, State
from mergeflow.training import FineTuneSettings
from studies.lab.claims import Claim, Samples
from studies.lab.inputs import Laboratory, Lazy
from studies.lab.plots import side_by_side, table
from studies.lab.rows import Row, select
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
        regime, other = ("epochs", "steps") if self.steps is None else ("steps", "epochs")
        plain = {"optimiser": "sgd", "warmup": 0.0, "schedule": "constant", "gradient_clip": 0.0}
        plain["batch_norm"] = "updated"  # the nets start from random weights
        given = self.model_dump(exclude={other})
        return FineTuneSettings.model_validate({"regime": regime, "save_every": 1_000_000, **plain, **given})


class World(Section):
    """Tasks on one source of pictures, and a net."""

    source: str  # an address as in params.yaml's `tasks`
    # of rotated tasks, in degrees; the net is pre-trained on the first
    angles: list[float] = Field(default_factory=list)
    # of class splits instead, a transform of the source each or another address; the first likewise
    splits: list[str] = Field(default_factory=list)
    size: int = Field(ge=8)  # pixels a side
    train: int = Field(ge=32)  # train, test: examples of each task, at most
    test: int = Field(ge=32)
    architecture: Literal["mlp", "resnet20", "resnet18"]  # `mlp` (grey pixels), `resnet20` or `resnet18`
    hidden: list[int] = Field(default_factory=lambda: [100, 100, 100])  # of the MLP
    width: int = Field(8, ge=8)  # channels of ResNet-20's first stage
    pretrain: Tuning
    tune: Tuning


@dataclass(frozen=True)
class NetTask:
    """A task of a world: what is trained on and what is looked at."""

    train: Classification
    test: Classification


Tasks = Lazy[dict[str, NetTask]]
"""Opens a world when the first net that is missing needs it, and holds it."""


def open_world(world: World, root: Path) -> dict[str, NetTask]:
    """Return the world's tasks by name; the first is the one that nets are pre-trained on."""
    parts = {f"{angle:g}°": (world.source, angle) for angle in world.angles}
    if not parts:
        parts = {text.rpartition("/")[2]: (_joined(world.source, text), 0.0) for text in world.splits}
    counts = {"train": world.train, "test": world.test}
    grey = world.architecture == "mlp"
    return {
        name: NetTask(*(_task(name, source, angle, split, counts[split], world.size, grey, root) for split in counts))
        for name, (source, angle) in parts.items()
    }


def _joined(source: str, part: str) -> str:
    """Return an address with a further transform, or, where the part is an address itself, that."""
    if ":" in part:
        return part
    return f"{source}{'&' if '?' in source else '?'}{part}"


@lru_cache(maxsize=32)  # the worlds of studies differ in their nets more often than in their pictures
def _task(
    name: str, source: str, angle: float, split: str, count: int, size: int, grey: bool, root: Path
) -> Classification:
    """Return up to `count` examples of one split, turned by an angle, in one channel or in three."""
    images, labels = _pictures(source, split, count, size, root)
    turned = torch.from_numpy(_turned(images, angle))
    inputs = turned[..., 0].contiguous() if grey else turned
    return Classification(name, inputs, torch.from_numpy(labels), encode=on_grey if grey else on_pixels)


@lru_cache(maxsize=2)
def _pictures(source: str, split: str, count: int, size: int, root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return up to `count` images uint8 [n, S, S, 3] and labels of one split, the first that the transforms leave."""
    raw = open_images(source.partition("?")[0].rpartition("/")[2], source, root=root)
    decode = image_decoding(size).decode
    seen = (transformed(raw, example, Place(split, row, raw.seed)) for row, example in enumerate(raw.splits[split]()))
    decoded = [decode(example, source).arrays for example in islice(filter(None, seen), count)]
    return np.stack([arrays["images"] for arrays in decoded]), np.array([int(arrays["labels"]) for arrays in decoded])


def _turned(images: np.ndarray, angle: float) -> np.ndarray:
    """Return pictures turned as the transform `rotate` turns them; they are drawn once for all angles."""
    if not angle:
        return images
    turn = rotate(str(angle), None).apply(Example(None, ""), Place("train", 0, 0))
    assert turn is not None
    return np.stack([np.asarray(turn.edited(Image.fromarray(image))) for image in images])


def on_grey(module: nn.Module, images: Tensor) -> Tensor:
    """Call a net on grey uint8 images [n, S, S], scaled to −1 … 1."""
    logits: Tensor = module(images.float() / 127.5 - 1)
    return logits


def by_seed(
    lab: Laboratory, world: World, work: Callable[[Tasks, int], Iterable[Row]], seeds: Sequence[int], name: str = "seed"
) -> list[Row]:
    """Return the rows of `work(tasks, seed)` for every seed, each kept as a piece; the world is opened once."""
    return lab.by_seed(partial(work, Lazy(partial(open_world, world, lab.io.root))), seeds, name)


def new_net(world: World, tasks: Mapping[str, NetTask], seed: int) -> Network:
    """Return the world's net with weights drawn by a seed; it has a logit for each label of any task."""
    classes = 1 + max(int(task.train.labels.max()) for task in tasks.values())
    if world.architecture == "mlp":
        return Network(mlp([world.size**2, *world.hidden, classes], seed).eval())
    if world.architecture == "resnet18":
        return Network(resnet18(classes, seed).eval())
    return Network(SmallResNet(classes, world.width, seed=seed).eval())


def with_statistics(model: Model, state: State, data: Sequence[Classification]) -> dict[str, Tensor]:
    """Return weights whose BatchNorm statistics were computed again on the first training pictures of these tasks.

    A net without BatchNorm keeps its weights.

    Args:
        model: its weights are overwritten.
        data: training examples of the tasks; one batch of each is read.
    """
    if not has_statistics(model):
        return dict(state)
    model.load(state)
    batches = [pixels(examples.inputs[torch.arange(min(256, len(examples)))]) for examples in data]
    recompute_statistics(model.module, batches)
    return drawn_weights(model)


def has_statistics(model: Model) -> bool:
    """Whether the net has BatchNorm's running statistics."""
    return any("running_mean" in name for name in model.state())


@dataclass(frozen=True)
class TunedModels:
    """Models tuned from one start, and the examples that they are looked at.

    Attributes:
        model: What weights are loaded into.
        start: θ0.
        tuned: Task → θ_t.
        tests: Task → examples, or of a model of sequences what it is asked.
        tasks: Of nets that are trained here, what is trained on too.
        first: The task of their pre-training.
    """

    model: Model
    start: State
    tuned: Mapping[str, State]
    tests: Mapping[str, Any]
    tasks: Mapping[str, NetTask] = field(default_factory=dict)
    first: str = ""

    def controls(self, task: str) -> list[str]:
        """Return the tasks that an edit with this task's vector should leave alone: the first, or all others."""
        return [self.first] if self.first else [other for other in self.tuned if other != task]


def pretrained(
    world: World, tasks: Mapping[str, NetTask], seed: int
) -> tuple[Network, dict[str, Tensor], dict[str, Tensor]]:
    """Return the world's net, the weights that a seed draws, and those after the pre-training on the first task."""
    model = new_net(world, tasks, seed)
    drawn, first = drawn_weights(model), next(iter(tasks.values()))
    return model, drawn, trained(model, drawn, first.train, world.pretrain, seed)


def accuracy_of(model: Model, state: State, task: NetTask) -> float:
    """Return the accuracy of weights on the test of a task, in %."""
    model.load(state)
    return 100 * accuracies(model, {"own": task.test})["own"]


def train_world(world: World, tasks: dict[str, NetTask], seed: int) -> TunedModels:
    """Pre-train on the first task and tune on each of the others.

    Args:
        tasks: by name; the first is the one to pre-train on.
    """
    first, *others = tasks
    model, _, start = pretrained(world, tasks, seed)
    tuned = {task: trained(model, start, tasks[task].train, world.tune, seed) for task in others}
    return TunedModels(model, start, tuned, {name: task.test for name, task in tasks.items()}, tasks, first)


# Rows of the measurement, their worst cases, paths of loss, a figure

FLAT = 0.1  # nats of LMC
ALPHAS = (0.25, 0.5, 0.75)  # of averages of two nets
ENDS = "no path has a barrier: it fails because the losses of its ends differ, as those of nets of two tasks do"


def rows_of(compared: Mapping[str, Mapping[str, Linearity]], **settings: Any) -> list[Row]:
    """Return one row for each combination and layer: means, the quartiles of 1 − cos and coef, and coef's median."""
    rows = []
    for name, layers in compared.items():
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
        chosen: which rows it is about.
    """
    rule = f"worst 1 − cos of a hidden layer, in shares of the baseline where that is above {TRIVIAL},"
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
        of=f"{name} of a hidden layer",
        unit="",
        digits=2,
        ours=ours,
    )


def not_connected(where: str, measure: Callable[[pd.DataFrame], Samples], caveat: str = "") -> Claim:
    """Return the claim that linear mode connectivity fails, where `measure` gives the smallest distance from it."""
    says = f"Linear mode connectivity fails between nets tuned on different tasks, {where}."
    gap = "the larger of (difference of the ends, barrier), for each pair and D,"
    return Claim("L4", says, measure, low=FLAT, of=gap, unit="nat", digits=2, caveat=caveat)


def farthest_pairs(rows: pd.DataFrame, places: Sequence[float]) -> pd.DataFrame:
    """Return pairs at α = ½ by the baseline of their last layer: 0 is the nearest, 1 the farthest."""
    half = select(rows, alpha=0.5)
    ranked = list(half[half.depth == half.depth.max()].groupby("combination").base.mean().sort_values().index)
    return select(half, combination=[ranked[math.ceil(place * (len(ranked) - 1))] for place in places])


def path_rows(
    model: Model, ends: tuple[State, State], examples: Mapping[str, Examples], alphas: Sequence[float], **settings: Any
) -> list[Row]:
    """Return loss and accuracy in % of αθ_i + (1−α)θ_j, a row for each α and task, which the row calls `on`.

    Args:
        model: the network, whose weights are overwritten.
        ends: θ_i and θ_j.
        examples: labelled examples by task.
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
    at_i, at_j = first.loc[where].to_numpy(), second.loc[where].to_numpy()
    return paths.assign(chord=paths.alpha * at_i + (1 - paths.alpha) * at_j, ends=np.abs(at_i - at_j))


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
    means = side_by_side(rows, list(index), columns, {"distance": 3, "base": 3, "coef": 2, "error": 3})
    share = rows.assign(share=(rows.distance / rows.base).where(rows.base > TRIVIAL))
    worst = share.groupby([*index, "seed"], sort=False, dropna=False).share.max().reset_index()
    return pd.concat([means, table(worst, list(index), value="share", digits=2)], axis=1)


def layers_figure(rows: pd.DataFrame, by: str) -> Figure:
    """Draw mean 1 − cos with quartiles beside the baseline's, and coef's median with quartiles, by layer.

    Args:
        rows: as of `rows_of`; means over what is drawn together.
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
