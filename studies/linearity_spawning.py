"""Study `linearity_spawning`: how long must two nets train together before their features average?

**Question.** A net is trained for k epochs, cloned, and both clones are trained to the end on the same task in
different orders: from which k on are they linearly connected, and are their features?

**Method.** A net on one task; k of the choices, the same number of epochs in all. Barrier of accuracy at α = ½: the
mean of the ends' accuracies less the middle's, in points, with BatchNorm's statistics averaged like weights and
computed again on training pictures. 1 − cos and coef of each block at α = ½. ± is over seeds: of weights and orders.
Margins are ours and were written before the run. `fashion_spawning` is the same on real pictures, Fashion-MNIST
(worlds/fashion).

**Source.** Zhou et al. 2024, Cross-Task Linearity, Figure 1; Frankle et al. 2020, Linear mode connectivity and the
lottery ticket hypothesis, which Figure 1 cites.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.linearity.affine import combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import Model, State
from studies.lab import Claim, Row, Section, Study, curves, select
from studies.lab.claims import needs, with_interval
from studies.lab.inputs import over_seeds
from studies.lab.linearity import (
    NetTask,
    Tasks,
    Tuning,
    World,
    accuracy_of,
    layer_table,
    new_net,
    open_world,
    rows_of,
    with_statistics,
)
from studies.lab.plots import side_by_side
from studies.lab.rows import samples
from studies.lab.tuning import drawn_weights, trained
from studies.linearity_controls import middle_of

TRAINED = 85  # % of test images; the paper's nets have more on CIFAR-10
BARRIERS = {
    "ends": "ends, %",
    "interpolated": "barrier, statistics averaged",
    "recomputed": "barrier, computed again",
}
SETTINGS = {"interpolated": "statistics averaged", "recomputed": "statistics computed again"}
SILENT = "a ResNet-20 and few epochs; the paper does not say what becomes of BatchNorm's statistics, so both are judged"


class Options(Section):
    """The study's choices. `world`: its first task is trained on. `spawn`: k, ascending. `epochs`: in all."""

    world: World
    spawn: list[int] = Field(min_length=2)
    epochs: int = Field(ge=1)
    seeds: list[int] = Field(min_length=1)


def spawn(options: Options, opened: Tasks, seed: int) -> Iterator[Row]:
    """Yield features by block (`features`) and the barrier (`barriers`) for each k."""
    tasks = opened()
    task = tasks[next(iter(tasks))]
    model = new_net(options.world, tasks, seed)
    start, done = drawn_weights(model), 0
    for k in sorted(options.spawn):
        if k > done:
            start = trained(model, start, task.train, lasting(options, k - done), seed * 100 + k)
            done = k
        ends = [
            trained(model, start, task.train, lasting(options, options.epochs - k), seed * 100 + 50 + n) for n in (0, 1)
        ]
        half = {"half": middle_of(model, {"test": task}, "test", "test", ends, find_layers(model.module))}
        yield from rows_of(half, part="features", seed=seed, k=k)
        yield {"part": "barriers", "seed": seed, "k": k, **barrier(model, ends, task)}


def lasting(options: Options, epochs: int) -> Tuning:
    return options.world.tune.model_copy(update={"epochs": epochs})


def barrier(model: Model, ends: Sequence[State], task: NetTask) -> Row:
    """Return the ends' mean accuracy and the barriers at α = ½, in points, by how BatchNorm's statistics came about.

    Args:
        model: the network, whose weights are overwritten.
    """
    nets = [*ends, combine(ends, [0.5, 0.5])]
    first, second, middle = (accuracy_of(model, net, task) for net in nets)
    again = [accuracy_of(model, with_statistics(model, net, [task.train]), task) for net in nets]
    at_ends = (first + second) / 2
    return {"ends": at_ends, "interpolated": at_ends - middle, "recomputed": (again[0] + again[1]) / 2 - again[2]}


def at_k(rows: pd.DataFrame, k: int, value: str) -> pd.Series:
    return samples(select(rows, part="barriers"), value, k=k)


def last_block(rows: pd.DataFrame, k: int) -> pd.Series:
    """Return 1 − cos in the last block, by seed."""
    return samples(select(rows, depth=rows.depth.max()), "distance", k=k)


# fmt: off
def claims_on_spawning(options: Options) -> list[Claim]:
    return [claim for value, setting in SETTINGS.items() for claim in claims_with(value, setting, options)]


def claims_with(value: str, setting: str, options: Options) -> list[Claim]:
    """Return the claims where BatchNorm's statistics came about in one way; features are those of the second."""
    first, last = min(options.spawn), max(options.spawn)
    trained_out = needs(lambda rows: {"ends": at_k(rows, first, "ends")}, "accuracy of trained nets", "%", low=TRAINED)
    apart = needs(lambda rows: {"barrier": at_k(rows, first, value)},
                  f"barrier at k = {first}, which spawning is to end,", low=10)
    made = [
        Claim("L5", f"Without training together (k = {first}) two orders end in different valleys.",
              lambda rows: {"barrier": at_k(rows, first, value)}, low=10, of="barrier of accuracy at α = ½",
              needs=trained_out),
        Claim("L5", f"After k = {last} epochs together they end in one.",
              lambda rows: {"barrier": at_k(rows, last, value)}, high=2, of="barrier of accuracy at α = ½",
              needs=apart),
        Claim("L5", "Features grow linear over k.",
              lambda rows: {f"fall from k = {first} to {last}": last_block(rows, first) - last_block(rows, last)},
              low=0, of="paired fall of 1 − cos in the last block", unit="", digits=3, needs=apart,
              also=lambda rows: f"; {with_interval(last_block(rows, first), 3)} at k = {first}, "
                                f"{with_interval(last_block(rows, last), 3)} at k = {last}"),
    ]
    return [replace(claim, setting=setting, caveat=SILENT) for claim in (made if value == "recomputed" else made[:2])]


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


STUDY = Study(
    options=Options,
    systems=("L5",),
    measure=over_seeds(open_world, spawn),
    claims=claims_on_spawning,
    tables={
        "Accuracy and its barrier at α = ½, points": lambda rows: side_by_side(
            select(rows, part="barriers"), "k", BARRIERS
        ),
        "Features at α = ½": lambda rows: layer_table(select(rows, part="features"), "k", "layer"),
    },
    figures={"barriers": barrier_figure, "features": feature_figure},
)

STUDIES = {"linearity_spawning": STUDY, "fashion_spawning": STUDY}
