"""Studies `linearity_controls`, `_matching`, `_spawning` (L5, L17, L18): what must nets share for features to average?

**Question.** The paper trains two nets from different random weights, with and without matching their units, and finds
features less linear than after a common pre-training. Such a pair differs from a tuned one in two things: it has no
pre-training, and it has no common beginning. Which of the two matters, and what if the pre-training's labels are random
(*controls*)? A recipe may say `align: weight_matching`, which puts each expert's units into the order in which its
weights are nearest to the base's: what does it do to the accuracy of an average (*matching*)? A net is trained for k
epochs, cloned, and both clones are trained to the end on the same task in different orders: from which k on are they
linearly connected, and are their features (*spawning*)?

**Method of controls.** *digits*: two nets trained on two angles, α = ½, hidden layers of the MLP, on the tests of both:

- `normal`: both tuned from one pre-trained net;
- `common start` (ours): both trained from the same random weights, without pre-training;
- `weight matching`, `activation matching`: different random weights, units of the second permuted towards the first
  (Git Re-Basin; activations on 2 000 training pictures of each task);
- `none`: different random weights as they are.

Nets without pre-training get as many steps more as the pre-training had. *splits*: a net is pre-trained on a split with
its labels, and on the same pictures with random labels (drawn once); from each, two nets are tuned on the same split
with other rates and orders (B.3 of the paper) and two on different splits (Section 5 says so).

**Method of matching.** In each world two nets are trained, both on one task in different orders, or on two tasks, from

- `pre-trained`: one net that was trained on a third task;
- `common start`: the same random weights, without pre-training;
- `different starts`: different random weights.

Nets without pre-training get as many epochs more as the pre-training had. ½θ_i + ½θ_j is judged as it is and with the
units of θ_j matched to those of θ_i: accuracy and loss, mean over the tests of both tasks. *ends* is the mean accuracy
of the two nets, each on its own test; *moved* the share of hidden units that the matching puts elsewhere.

**Method of spawning.** A net on one task; k of the choices, the same number of epochs in all. Barrier of accuracy at
α = ½: the mean of the ends' accuracies less the middle's, in points, with BatchNorm's statistics averaged like weights
and computed again on training pictures. 1 − cos and coef of each block at α = ½.

BatchNorm's statistics are computed again on training pictures, of averages and of the nets that they are compared with.
± is over seeds: of weights, orders and random labels. Margins are ours and were written before the run.
`fashion_controls` and `fashion_spawning` are the same on real pictures, Fashion-MNIST (worlds/fashion).

**Source.** Zhou et al. 2024, Cross-Task Linearity, Figure 1, Section 5, B.3, Figures 11 and 12; Ainsworth et al. 2023,
Git Re-Basin; Frankle et al. 2020, Linear mode connectivity and the lottery ticket hypothesis, which Figure 1 cites.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.accuracy import accuracies, losses
from mergeflow.evaluation.averages import mean
from mergeflow.linearity.affine import DIRECTION, LENGTH, Combination, Linearity, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.merging.alignment import find_groups, permute, weight_matching
from mergeflow.modalities.classification import Classification
from mergeflow.modality import Model, State
from studies.lab import Claim, Laboratory, Row, Section, Study, curves, per_seed, select, table
from studies.lab.claims import needs, with_interval
from studies.lab.linearity import (
    NetTask,
    Tasks,
    Tuning,
    World,
    accuracy_of,
    by_seed,
    layer_table,
    layers_figure,
    new_net,
    pretrained,
    rows_of,
    with_statistics,
    worst_length,
    worst_share,
)
from studies.lab.plots import dots, side_by_side
from studies.lab.rows import Samples, samples
from studies.lab.tuning import drawn_weights, trained
from studies.theory.linearity import activation_matching

FITTED = 90  # % of the random labels, to say that they were learnt by heart
ORDER = ("normal", "common start", "weight matching", "activation matching", "none")
STARTS, KINDS = ("pre-trained", "common start", "different starts"), ("one task", "two tasks")
TRAINED = 85  # % of test images; the paper's nets have more on CIFAR-10


def without_pretraining(world: World) -> Tuning:
    """Return the tuning of nets without pre-training, which get as many epochs more as it had."""
    return world.tune.model_copy(update={"epochs": world.tune.epochs + world.pretrain.epochs})


# Controls


class ControlOptions(Section):
    """Choices of controls.

    digits: a world of rotated digits. pair: the two angles. splits: a world of class splits. rates: of the two nets
    tuned on one split. seeds: of weights, orders and random labels.
    """

    digits: World
    pair: list[float] = Field(min_length=2, max_length=2)
    splits: World
    rates: list[float] = Field(min_length=2, max_length=2)
    seeds: list[int] = Field(min_length=1)


def measure_controls(lab: Laboratory, options: ControlOptions) -> Iterator[Row]:
    """Yield rows by layer for each seed, world and setting, and the accuracy that each setting reaches."""
    turned = options.digits.model_copy(update={"angles": [0.0, *options.pair]})
    works = {"matching": (measure_starts, turned), "labels": (measure_labels, options.splits)}
    for name, (work, world) in works.items():
        yield from by_seed(lab, world, partial(work, options), options.seeds, name)


def measure_starts(options: ControlOptions, opened: Tasks, seed: int) -> Iterator[Row]:
    """Yield rows of the five settings on rotated digits."""
    tasks, world = opened(), options.digits
    _, i, j = tasks
    model, start, base = pretrained(world, tasks, seed)
    other, longer = drawn_weights(new_net(world, tasks, seed + 1_000)), without_pretraining(world)
    ends: dict[str, tuple[State, State]] = {
        "normal": _two(model, base, base, tasks[i], tasks[j], world.tune, seed),
        "common start": _two(model, start, start, tasks[i], tasks[j], longer, seed),
        "none": _two(model, start, other, tasks[i], tasks[j], longer, seed),
    }
    a, b = ends["none"]
    groups = find_groups({name: value.shape for name, value in a.items()})
    samples = _both(tasks[i].train, tasks[j].train, 2_000)
    ends["weight matching"] = a, permute(b, groups, weight_matching(a, b, groups, seed))
    ends["activation matching"] = a, permute(b, groups, activation_matching(model, samples, a, b, groups))
    layers = find_layers(model.module)
    compared = {name: _half(model, tasks, i, j, ends[name], layers) for name in ORDER}
    yield from rows_of(compared, seed=seed, world="digits")
    for name in ORDER:
        reached = [accuracy_of(model, state, tasks[task]) for task, state in zip((i, j), ends[name], strict=True)]
        apart, accuracy = _apart(*ends[name]), float(np.mean(reached))
        yield {"seed": seed, "world": "digits", "combination": name, "apart": apart, "accuracy": accuracy}


def measure_labels(options: ControlOptions, opened: Tasks, seed: int) -> Iterator[Row]:
    """Yield rows of a pre-training with true and with random labels, tuned on one split and on two."""
    tasks, world = opened(), options.splits
    first, i, j = list(tasks)[:3]
    generator = torch.Generator().manual_seed(seed)
    true = tasks[first].train
    drawn = torch.randint(0, int(true.labels.max()) + 1, true.labels.shape, generator=generator)
    compared = {}
    for name, data in (
        ("true labels", true),
        ("random labels", Classification(first, true.inputs, drawn, encode=true.encode)),
    ):
        model = new_net(world, tasks, seed)
        start = trained(model, drawn_weights(model), data, world.pretrain, seed)
        learnt = accuracy_of(model, start, NetTask(data, data))
        yield {"seed": seed, "world": "splits", "combination": name, "accuracy": learnt}
        tunings = [world.tune.model_copy(update={"learning_rate": rate}) for rate in options.rates]
        same = [trained(model, start, tasks[i].train, tuning, seed + n) for n, tuning in enumerate(tunings)]
        other = _two(model, start, start, tasks[i], tasks[j], world.tune, seed)
        layers = find_layers(model.module)
        compared[f"{name}, one task"] = _half(model, tasks, i, i, same, layers)
        compared[f"{name}, two tasks"] = _half(model, tasks, i, j, other, layers)
    yield from rows_of(compared, seed=seed, world="splits")


def _two(
    model: Model, first: State, second: State, i: NetTask, j: NetTask, tuning: Tuning, seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return trained(model, first, i.train, tuning, seed), trained(model, second, j.train, tuning, seed + 1)


def _half(
    model: Model, tasks: dict[str, NetTask], i: str, j: str, ends: Sequence[State], layers: list[str]
) -> dict[str, Linearity]:
    """Compare the middle of two nets with the mean of their features, on the tests of their tasks."""
    state = with_statistics(model, combine(ends, [0.5, 0.5]), [tasks[i].train, tasks[j].train])
    named = {
        end: with_statistics(model, state, [tasks[task].train])
        for end, state, task in zip("ij", ends, (i, j), strict=True)
    }
    half = {"half": Combination({"i": 0.5, "j": 0.5}, state)}
    return affine(model, {task: tasks[task].test for task in (i, j)}, named, half, layers, batch_size=500)["half"]


def _both(a: Classification, b: Classification, count: int) -> Classification:
    inputs = torch.cat([a.inputs[:count], b.inputs[:count]])
    return Classification("both", inputs, torch.cat([a.labels[:count], b.labels[:count]]), encode=a.encode)


def _apart(a: State, b: State) -> float:
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in a) ** 0.5)


def layers_of(rows: pd.DataFrame, world: str = "digits") -> pd.DataFrame:
    """Return the rows by layer of one world."""
    return select(rows[rows.layer.notna()], world=world)


def layer_mean(rows: pd.DataFrame, setting: str, value: str = "distance") -> pd.Series:
    """Return 1 − cos, or another value, of one setting: the mean over layers, by seed."""
    return samples(layers_of(rows), value, combination=setting)


def by_layer(*pairs: tuple[str, str]) -> Callable[[pd.DataFrame], Samples]:
    """Return the measure of paired differences of 1 − cos, larger less smaller, in every layer."""

    def measured(rows: pd.DataFrame) -> Samples:
        means = per_seed(layers_of(rows), "combination", "layer", value="distance")
        layers = layers_of(rows).layer.drop_duplicates()
        return {f"{a} less {b}, layer {n}": means.loc[a, n] - means.loc[b, n] for a, b in pairs for n in layers}

    return measured


def broken(rows: pd.DataFrame, setting: str) -> pd.Series:
    """Return by seed how far CTL is broken at worst: the larger of 1 − cos and |coef − 1|, each in its limit."""
    features = select(layers_of(rows), combination=setting)
    return pd.concat([worst_share(features) / DIRECTION, worst_length(features) / LENGTH], axis=1).max(axis=1)


def off(rows: pd.DataFrame, setting: str) -> pd.Series:
    """Return |coef − 1| of one setting, where coef is the mean over layers."""
    return (layer_mean(rows, setting, "coef") - 1).abs()


def listed(rows: pd.DataFrame, value: str = "distance", digits: int = 3) -> str:
    return ", ".join(f"{name} {with_interval(layer_mean(rows, name, value), digits)}" for name in ORDER)


def worst_lengths(rows: pd.DataFrame) -> str:
    worst = {name: worst_length(select(layers_of(rows), combination=name)) for name in ORDER}
    return "; worst |coef − 1|: " + ", ".join(f"{name} {with_interval(value, 2)}" for name, value in worst.items())


def late(rows: pd.DataFrame, setting: str) -> pd.DataFrame:
    """Return the rows of one setting in the last half of the blocks."""
    features = layers_of(rows, "splits")
    return select(features[features.depth > features.depth.max() / 2], combination=setting)


def by_labels(rows: pd.DataFrame, kind: str) -> tuple[pd.Series, pd.Series]:
    """Return 1 − cos in the last half of the blocks after true and after random labels, by seed."""
    true, random = (samples(late(rows, f"{name} labels, {kind}"), "distance") for name in ("true", "random"))
    return true, random


def labels_fitted(rows: pd.DataFrame) -> Samples:
    """Return how well the random labels were learnt by heart; earlier records lack it."""
    return {"random labels": samples(rows, combination="random labels")} if "accuracy" in rows else {}


def label_ratio(rows: pd.DataFrame, kind: str) -> Samples:
    true, random = by_labels(rows, kind)
    return {"ratio": random / true}


def label_levels(rows: pd.DataFrame, kind: str) -> str:
    true, random = by_labels(rows, kind)
    return f"; random {with_interval(random, 4)}, true {with_interval(true, 4)}"


def label_difference(rows: pd.DataFrame, kind: str) -> Samples:
    true, random = by_labels(rows, kind)
    return {"random less true": random - true}


# fmt: off
def claims_on_matching() -> list[Claim]:
    each = "paired difference of 1 − cos in each hidden layer"
    return [
        Claim("L17", "Without pre-training nets struggle to satisfy CTL even after their units are aligned.",
              lambda rows: {f"{name} less normal": broken(rows, name) - broken(rows, "normal") for name in ORDER[2:]},
              low=0, unit="", digits=2, also=worst_lengths, caveat="pre-trained nets break its length here too",
              of="worst 1 − cos or |coef − 1|, in shares of the limits of CTL, less that of pre-trained nets,"),
        Claim("L17", "Without pre-training 1 − cos is not close to 0 compared with pre-trained nets, in each layer.",
              by_layer(("none", "normal")), low=0, of=each, unit="", digits=4,
              also=lambda rows: f"; mean over layers: {listed(rows)}"),
        Claim("L17", "Matching, by either way, brings 1 − cos closer to 0, in each layer.",
              by_layer(("none", "weight matching"), ("none", "activation matching")),
              low=0, of=each, unit="", digits=4),
        Claim("L17", "After either matching 1 − cos is still larger than that of pre-trained nets, in each layer.",
              by_layer(("weight matching", "normal"), ("activation matching", "normal")),
              low=0, of=each, unit="", digits=4),
        Claim("L17", "Without pre-training coef deviates from 1, matched or not.",
              lambda rows: {f"{name} less normal": off(rows, name) - off(rows, "normal") for name in ORDER[2:]},
              low=0, of="paired difference of |coef − 1|, coef the mean over layers,", unit="", digits=3,
              also=lambda rows: f"; coef: {listed(rows, 'coef', 2)}"),
        Claim("L17", "With it coef is near 1.", lambda rows: {"normal": off(rows, "normal")},
              high=0.1, of="|coef − 1| of `normal`, coef the mean over layers,", unit="", digits=2,
              also=lambda rows: f"; coef: {listed(rows, 'coef', 2)}"),
        Claim("L17", "A common start without pre-training is less linear than pre-training: the pre-training matters.",
              lambda rows: {"common start less normal": layer_mean(rows, "common start") - layer_mean(rows, "normal")},
              low=0, of="paired difference of 1 − cos", unit="", digits=3, ours=True,
              also=lambda rows: f"; {listed(rows)}"),
        Claim("L17",
              "A common start without pre-training is more linear than any pair of different starts, matched or not.",
              lambda rows: {"better matching less common start": np.minimum(*(layer_mean(rows, n) for n in ORDER[2:4]))
                            - layer_mean(rows, "common start")},
              low=0, of="paired difference of 1 − cos", unit="", digits=3, ours=True,
              also=lambda rows: f"; {listed(rows)}"),
    ]


def claims_on_labels(kind: str) -> list[Claim]:
    late_half = "in the last half of the blocks"
    fitted = needs(labels_fitted, "accuracy of the pre-training on its own random labels", "%", low=FITTED)
    made = [
        Claim("L18",
              "After pre-training on random labels 1 − cos is far from 0 compared with true ones.",
              partial(label_ratio, kind=kind), low=3, of=f"ratio of 1 − cos {late_half}", unit="", needs=fitted,
              also=partial(label_levels, kind=kind)),
        Claim("L18", "Random labels leave features less linear at all.",
              partial(label_difference, kind=kind), low=0, of=f"paired difference of 1 − cos {late_half}", unit="",
              digits=4, ours=True),
        Claim("L18", "After pre-training on random labels coef deviates from 1.",
              lambda rows: {"largest |median coef − 1|": worst_length(late(rows, f"random labels, {kind}"))},
              low=0.1, of=f"largest |median coef − 1| of the blocks {late_half}", unit="", digits=2, needs=fitted),
    ]
    return [replace(claim, setting=f"nets tuned on {kind}") for claim in made]
# fmt: on


def reached_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Read the accuracy of nets on their own tests, or of a pre-training on its own labels; earlier records lack it."""
    if "accuracy" not in rows:
        return pd.DataFrame()
    return table(rows[rows.accuracy.notna()], "combination")


CONTROLS = Study(
    question="does linearity need pre-training, and pre-training on something true?",
    options=ControlOptions,
    systems=("L17", "L18"),
    measure=measure_controls,
    claims=[*claims_on_matching(), *(claim for kind in ("one task", "two tasks") for claim in claims_on_labels(kind))],
    tables={
        "Rotated digits, α = ½": lambda rows: layer_table(layers_of(rows), "combination", "layer"),
        "Class splits, α = ½, true and random labels": lambda rows: layer_table(
            layers_of(rows, "splits"), "combination", "layer"
        ),
        "Accuracy on the nets' own tests, or of the pre-training on its own labels, %": reached_table,
    },
    figures={
        "matching": lambda rows: layers_figure(layers_of(rows), "combination"),
        "labels": lambda rows: layers_figure(layers_of(rows, "splits"), "combination"),
    },
)


# Matching


class MatchingOptions(Section):
    """Choices of matching. `worlds`: the first three tasks of each are pre-trained on, trained on, and trained on as
    the second of two. `seeds`: of weights and orders."""

    worlds: dict[str, World] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


def measure_matching(lab: Laboratory, options: MatchingOptions) -> Iterator[Row]:
    """Yield one row for each world, seed, start and number of tasks."""
    for name, world in options.worlds.items():
        yield from by_seed(lab, world, partial(averages_of_seed, name, world), options.seeds, name)


def averages_of_seed(name: str, world: World, opened: Tasks, seed: int) -> list[Row]:
    """Return a row for each start, of two nets of one task and of two nets of two tasks."""
    tasks = opened()
    i, j = list(tasks)[1:3]
    model, drawn, base = pretrained(world, tasks, seed)
    other, longer = drawn_weights(new_net(world, tasks, seed + 1_000)), without_pretraining(world)
    rows = []
    from_nothing = trained(model, drawn, tasks[i].train, longer, seed)
    for start, (expert, begin, tuning) in {
        "pre-trained": (trained(model, base, tasks[i].train, world.tune, seed), base, world.tune),
        "common start": (from_nothing, drawn, longer),
        "different starts": (from_nothing, other, longer),
    }.items():
        for kind, task in (("one task", i), ("two tasks", j)):
            ends = {"i": expert, "j": trained(model, begin, tasks[task].train, tuning, seed + 1)}
            about = {"world": name, "seed": seed, "start": start, "tasks": kind}
            rows.append(about | averages(model, {"i": tasks[i], "j": tasks[task]}, ends, seed))
    return rows


def averages(model: Model, tasks: Mapping[str, NetTask], ends: Mapping[str, State], seed: int) -> Row:
    """Return accuracy in percent and loss in nats of the average of two nets, as they are and matched.

    Args:
        model: the network, whose weights are overwritten.
        tasks: `i` and `j`, which may be the same task.
        ends: θ_i and θ_j.
        seed: of the matching's visits.
    """
    groups = find_groups({name: value.shape for name, value in ends["i"].items()})
    orders = weight_matching(ends["i"], ends["j"], groups, seed)
    still = torch.cat([order == torch.arange(len(order)) for order in orders])
    accuracy_by_task = {name: accuracy_of(model, state, tasks[name]) for name, state in ends.items()}
    row: Row = {"moved": 100 * (1 - float(still.float().mean())), "ends": mean(accuracy_by_task)}
    for way, end in (("plain", ends["j"]), ("matched", permute(ends["j"], groups, orders))):
        middle = combine([ends["i"], end], [0.5, 0.5])
        model.load(with_statistics(model, middle, [task.train for task in tasks.values()]))
        tests = {name: task.test for name, task in tasks.items()}
        row |= {f"accuracy_{way}": 100 * mean(accuracies(model, tests)), f"loss_{way}": mean(losses(model, tests))}
    return row


def mean_of(rows: pd.DataFrame, value: str, start: str, kind: str) -> pd.Series:
    return samples(rows, value, start=start, tasks=kind)


def gain(rows: pd.DataFrame, start: str, kind: str) -> pd.Series:
    """Return how many points the average is better with matched units, by seed."""
    return mean_of(rows, "accuracy_matched", start, kind) - mean_of(rows, "accuracy_plain", start, kind)


def against_common_start(rows: pd.DataFrame) -> Samples:
    return {
        kind: mean_of(rows, "accuracy_matched", "different starts", kind)
        - mean_of(rows, "accuracy_plain", "common start", kind)
        for kind in KINDS
    }


def less_the_ends(rows: pd.DataFrame) -> Samples:
    start = ("different starts", "one task")
    return {"less the ends": mean_of(rows, "accuracy_matched", *start) - mean_of(rows, "ends", *start)}


# fmt: off
def claims_of(world: str) -> list[Claim]:
    """Return when matching pays in one world."""
    made = [
        Claim("L17", "Matching pays for nets of different starts.",
              lambda rows: {kind: gain(rows, "different starts", kind) for kind in KINDS},
              low=10, of="gain in accuracy of the average", ours=True),
        Claim("L17", "Matching is needless for nets that begin with the same weights, pre-trained or not.",
              lambda rows: {f"{s}, {kind}": gain(rows, s, kind) for s in STARTS[:2] for kind in KINDS},
              low=-0.5, high=0.5, of="change of accuracy", ours=True),
        Claim("L17", "Matching stands in for the same beginning.", against_common_start,
              low=-1, of="matched averages of different starts less plain ones of a common start", ours=True),
        Claim("L17", "Matched nets of one task may be averaged.", less_the_ends,
              low=-5, of="the average of different starts less its ends", ours=True),
    ]
    return [claim.of_part(partial(select, world=world), world) for claim in made]
# fmt: on


AVERAGES = {
    "ends": "ends, %",
    "accuracy_plain": "average, %",
    "accuracy_matched": "matched, %",
    "loss_plain": "loss, nat",
    "loss_matched": "matched, nat",
    "moved": "units moved, %",
}
BARRIERS = {
    "ends": "ends, %",
    "interpolated": "barrier, statistics averaged",
    "recomputed": "barrier, computed again",
}


def accuracy_figure(world: str, rows: pd.DataFrame) -> Figure:
    """Draw accuracies of the ends, the average and the matched average, a group for each start and number of tasks."""
    labels = {"ends": "each net alone", "accuracy_plain": "average", "accuracy_matched": "average, units matched"}
    long = select(rows, world=world).melt(["seed", "start", "tasks"], list(labels), "net", "accuracy")
    named = long.assign(net=long.net.map(labels), where=long.start + ", " + long.tasks)
    return dots(named, "where", "net", y_label="accuracy, %")


MATCHING = Study(
    question="when does it pay to match the units of two nets before they are averaged?",
    options=MatchingOptions,
    systems=("L17",),
    measure=measure_matching,
    claims=lambda options: [claim for world in options.worlds for claim in claims_of(world)],
    tables={
        "½θ_i + ½θ_j on the tests of both tasks": lambda rows: side_by_side(rows, ["world", "start", "tasks"], AVERAGES)
    },
    figures=lambda options: {f"averages {world}": partial(accuracy_figure, world) for world in options.worlds},
)


# Spawning


class SpawningOptions(Section):
    """Choices of spawning. `world`: its first task is trained on. `spawn`: k, ascending. `epochs`: in all."""

    world: World
    spawn: list[int] = Field(min_length=2)
    epochs: int = Field(ge=1)
    seeds: list[int] = Field(min_length=1)


def measure_spawning(lab: Laboratory, options: SpawningOptions) -> Iterator[Row]:
    """Yield features by block (`features`) and the barrier (`barriers`) for each seed and k."""
    yield from by_seed(lab, options.world, partial(spawn, options), options.seeds)


def spawn(options: SpawningOptions, opened: Tasks, seed: int) -> Iterator[Row]:
    tasks = opened()
    task = tasks[next(iter(tasks))]
    model = new_net(options.world, tasks, seed)
    start, done = drawn_weights(model), 0
    for k in sorted(options.spawn):
        if k > done:
            start = trained(model, start, task.train, _epochs(options, k - done), seed * 100 + k)
            done = k
        ends = [
            trained(model, start, task.train, _epochs(options, options.epochs - k), seed * 100 + 50 + n) for n in (0, 1)
        ]
        half = {"half": _half(model, {"test": task}, "test", "test", ends, find_layers(model.module))}
        yield from rows_of(half, part="features", seed=seed, k=k)
        yield {"part": "barriers", "seed": seed, "k": k, **barrier(model, ends, task)}


def _epochs(options: SpawningOptions, epochs: int) -> Tuning:
    return options.world.tune.model_copy(update={"epochs": epochs})


def barrier(model: Model, ends: Sequence[State], task: NetTask) -> Row:
    """Return the ends' mean accuracy and the barriers at α = ½, in points, by how BatchNorm's statistics came about.

    Args:
        model: the network, whose weights are overwritten.
        ends: the weights of two nets.
        task: the task they were trained on.
    """
    nets = [*ends, combine(ends, [0.5, 0.5])]
    first, second, middle = (accuracy_of(model, net, task) for net in nets)
    again = [accuracy_of(model, with_statistics(model, net, [task.train]), task) for net in nets]
    at_ends = (first + second) / 2
    return {"ends": at_ends, "interpolated": at_ends - middle, "recomputed": (again[0] + again[1]) / 2 - again[2]}


def at_k(rows: pd.DataFrame, k: int, value: str = "recomputed") -> pd.Series:
    return samples(select(rows, part="barriers"), value, k=k)


def last_block(rows: pd.DataFrame, k: int) -> pd.Series:
    """Return 1 − cos in the last block, by seed."""
    return samples(select(rows, depth=rows.depth.max()), "distance", k=k)


# fmt: off
def claims_on_spawning(options: SpawningOptions) -> list[Claim]:
    first, last = min(options.spawn), max(options.spawn)
    trained_out = needs(lambda rows: {"ends": at_k(rows, first, "ends")}, "accuracy of trained nets", "%", low=TRAINED)
    apart = needs(lambda rows: {"barrier": at_k(rows, first)}, f"barrier at k = {first}, which spawning is to end,",
                  low=10)
    return [
        Claim("L5", f"Without training together (k = {first}) two orders end in different valleys.",
              lambda rows: {"barrier": at_k(rows, first)}, low=10, of="barrier of accuracy at α = ½",
              needs=trained_out),
        Claim("L5", f"After k = {last} epochs together they end in one.",
              lambda rows: {"barrier": at_k(rows, last)}, high=2, of="barrier of accuracy at α = ½", needs=apart),
        Claim("L5", "Features grow linear over k.",
              lambda rows: {f"fall from k = {first} to {last}": last_block(rows, first) - last_block(rows, last)},
              low=0, of="paired fall of 1 − cos in the last block", unit="", digits=3, needs=apart,
              also=lambda rows: f"; {with_interval(last_block(rows, first), 3)} at k = {first}, "
                                f"{with_interval(last_block(rows, last), 3)} at k = {last}"),
    ]


# fmt: on


def barrier_figure(rows: pd.DataFrame) -> Figure:
    barriers = select(rows, part="barriers")
    long = barriers.melt(["seed", "k"], ["interpolated", "recomputed"], "statistics", "barrier")
    return curves(
        long, "k", "statistics", "barrier", title="Barrier", x_label="epochs together, k", y_label="points of accuracy"
    )


def feature_figure(rows: pd.DataFrame) -> Figure:
    """Draw 1 − cos of the first, a middle and the last block over k."""
    features = select(rows, part="features")
    layers = list(features.layer.drop_duplicates())
    some = select(features, layer=[layers[0], layers[len(layers) // 2], layers[-1]])
    return curves(some, "k", "layer", "distance", title="Features", x_label="epochs together, k", y_label="1 − cos")


SPAWNING = Study(
    question="how long must two nets train together before their features average?",
    options=SpawningOptions,
    systems=("L5",),
    measure=measure_spawning,
    claims=claims_on_spawning,
    tables={
        "Accuracy and its barrier at α = ½, points": lambda rows: side_by_side(
            select(rows, part="barriers"), "k", BARRIERS
        ),
        "Features at α = ½": lambda rows: layer_table(select(rows, part="features"), "k", "layer"),
    },
    figures={"barriers": barrier_figure, "features": feature_figure},
)

STUDIES = {
    "linearity_controls": CONTROLS,
    "fashion_controls": CONTROLS,
    "linearity_matching": MATCHING,
    "linearity_spawning": SPAWNING,
    "fashion_spawning": SPAWNING,
}
