"""Study `linearity_controls`: does linearity need pre-training, and pre-training on something true?

**Question.** The paper trains two nets from different random weights, with and without matching their units, and finds
features less linear than after a common pre-training. Such a pair differs from a tuned one in two things: it has no
pre-training, and it has no common beginning. Which of the two matters, and what if the pre-training's labels are
random?

**Method.** *digits*: two nets trained on two angles, α = ½, hidden layers of the MLP, on the tests of both:

- `normal`: both tuned from one pre-trained net;
- `common start` (ours): both trained from the same random weights, without pre-training;
- `weight matching`, `activation matching`: different random weights, units of the second permuted towards the first
  (Git Re-Basin; activations on 2 000 training pictures of each task);
- `none`: different random weights as they are.

Nets without pre-training get as many steps more as the pre-training had. *splits*: a net is pre-trained on a split with
its labels, and on the same pictures with random labels (drawn once); from each, two nets are tuned on the same split
with other rates and orders (B.3 of the paper) and two on different splits (Section 5 says so). BatchNorm's statistics
are computed again on training pictures, of averages and of the nets that they are compared with. ± is over seeds: of
weights, orders and random labels. Margins are ours and were written before the run. `fashion_controls` is the same on
real pictures, Fashion-MNIST (worlds/fashion).

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 5, B.3, Figures 11 and 12; Ainsworth et al. 2023, Git
Re-Basin.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from pydantic import Field

from mergeflow.linearity.affine import DIRECTION, LENGTH, Combination, Linearity, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.merging.alignment import find_groups, permute, weight_matching
from mergeflow.modalities.classification import Classification
from mergeflow.modality import Model, State
from studies.lab import Claim, Laboratory, Row, Section, Study, per_seed, select, table
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
from studies.lab.rows import Samples, samples
from studies.lab.tuning import drawn_weights, trained
from studies.theory.linearity import activation_matching

FITTED = 90  # % of the random labels, to say that they were learnt by heart
ORDER = ("normal", "common start", "weight matching", "activation matching", "none")


def without_pretraining(world: World) -> Tuning:
    """Return the tuning of nets without pre-training, which get as many epochs more as it had."""
    return world.tune.model_copy(update={"epochs": world.tune.epochs + world.pretrain.epochs})


class Options(Section):
    digits: World  # a world of rotated digits
    pair: list[float] = Field(min_length=2, max_length=2)  # the two angles
    splits: World  # a world of class splits
    rates: list[float] = Field(min_length=2, max_length=2)  # of the two nets tuned on one split
    seeds: list[int] = Field(min_length=1)  # of weights, orders and random labels


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield rows by layer for each seed, world and setting, and the accuracy that each setting reaches."""
    turned = options.digits.model_copy(update={"angles": [0.0, *options.pair]})
    works = {"matching": (measure_starts, turned), "labels": (measure_labels, options.splits)}
    for name, (work, world) in works.items():
        yield from by_seed(lab, world, partial(work, options), options.seeds, name)


def measure_starts(options: Options, opened: Tasks, seed: int) -> Iterator[Row]:
    """Yield rows of the five settings on rotated digits."""
    tasks, world = opened(), options.digits
    _, i, j = tasks
    model, start, base = pretrained(world, tasks, seed)
    other, longer = drawn_weights(new_net(world, tasks, seed + 1_000)), without_pretraining(world)
    ends: dict[str, tuple[State, State]] = {
        "normal": tuned_on(model, base, base, tasks[i], tasks[j], world.tune, seed),
        "common start": tuned_on(model, start, start, tasks[i], tasks[j], longer, seed),
        "none": tuned_on(model, start, other, tasks[i], tasks[j], longer, seed),
    }
    a, b = ends["none"]
    groups = find_groups({name: value.shape for name, value in a.items()})
    samples = both_of(tasks[i].train, tasks[j].train, 2_000)
    ends["weight matching"] = a, permute(b, groups, weight_matching(a, b, groups, seed))
    ends["activation matching"] = a, permute(b, groups, activation_matching(model, samples, a, b, groups))
    layers = find_layers(model.module)
    compared = {name: middle_of(model, tasks, i, j, ends[name], layers) for name in ORDER}
    yield from rows_of(compared, seed=seed, world="digits")
    for name in ORDER:
        reached = [accuracy_of(model, state, tasks[task]) for task, state in zip((i, j), ends[name], strict=True)]
        apart, accuracy = distance_of(*ends[name]), float(np.mean(reached))
        yield {"seed": seed, "world": "digits", "combination": name, "apart": apart, "accuracy": accuracy}


def measure_labels(options: Options, opened: Tasks, seed: int) -> Iterator[Row]:
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
        other = tuned_on(model, start, start, tasks[i], tasks[j], world.tune, seed)
        layers = find_layers(model.module)
        compared[f"{name}, one task"] = middle_of(model, tasks, i, i, same, layers)
        compared[f"{name}, two tasks"] = middle_of(model, tasks, i, j, other, layers)
    yield from rows_of(compared, seed=seed, world="splits")


def tuned_on(
    model: Model, first: State, second: State, i: NetTask, j: NetTask, tuning: Tuning, seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return trained(model, first, i.train, tuning, seed), trained(model, second, j.train, tuning, seed + 1)


def middle_of(
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


def both_of(a: Classification, b: Classification, count: int) -> Classification:
    inputs = torch.cat([a.inputs[:count], b.inputs[:count]])
    return Classification("both", inputs, torch.cat([a.labels[:count], b.labels[:count]]), encode=a.encode)


def distance_of(a: State, b: State) -> float:
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in a) ** 0.5)


def layers_of(rows: pd.DataFrame, world: str = "digits") -> pd.DataFrame:
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
    late_half = "in the blocks after the middle one"
    fitted = needs(labels_fitted, "accuracy of the pre-training on its own random labels", "%", low=FITTED)
    made = [
        Claim("L18",
              "After pre-training on random labels 1 − cos is far from 0 compared with true ones.",
              partial(label_ratio, kind=kind), low=3, of=f"ratio of 1 − cos {late_half}", unit="", needs=fitted,
              also=partial(label_levels, kind=kind), caveat="3 × is ours, the paper prints no ratio"),
        Claim("L18", "Random labels leave features less linear at all.",
              partial(label_difference, kind=kind), low=0, of=f"paired difference of 1 − cos {late_half}", unit="",
              digits=4, ours=True),
        Claim("L18", "After pre-training on random labels coef deviates from 1.",
              lambda rows: {"largest |median coef − 1|": worst_length(late(rows, f"random labels, {kind}"))},
              low=0.1, of=f"largest |median coef − 1| {late_half}", unit="", digits=2, needs=fitted),
    ]
    return [replace(claim, setting=f"nets tuned on {kind}") for claim in made]
# fmt: on


def reached_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Read the accuracy of nets on their own tests, or of a pre-training on its own labels; earlier records lack it."""
    if "accuracy" not in rows:
        return pd.DataFrame()
    return table(rows[rows.accuracy.notna()], "combination")


STUDY = Study(
    options=Options,
    systems=("L17", "L18"),
    measure=measure,
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

STUDIES = {"linearity_controls": STUDY, "fashion_controls": STUDY}
