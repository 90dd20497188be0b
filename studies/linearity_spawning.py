"""Study `linearity_spawning` (L5): how long must two nets train together before their features average?

**Question.** A net is trained for k epochs, cloned, and both clones are trained to the end on the same task in
different orders. With k = 0 they share the random weights alone. From which k on are they linearly connected, and
are their features?

**Method.** A small residual net on one task; k of the choices, the same number of epochs in all. Barrier of accuracy
at α = ½: the mean of the ends' accuracies less the middle's, in points, with BatchNorm's statistics averaged like
weights and computed again on training pictures. 1 − cos and coef of each block at α = ½, statistics of all three
nets computed again. Margins are ours and were written before the run.

**Source.** Frankle et al. 2020, Linear mode connectivity and the lottery ticket hypothesis; Zhou et al. 2024,
Cross-Task Linearity, Figure 1, which cites it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.accuracy import accuracies
from mergeflow.linearity.affine import Combination, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import Model, State
from studies.lab import Claim, Laboratory, Row, Section, Study, curves, select, table
from studies.lab.claims import needs, with_interval
from studies.lab.inputs import Lazy
from studies.lab.linearity import NetTask, Tasks, World, layer_table, new_net, open_world, rows_of, with_statistics
from studies.lab.rows import samples
from studies.lab.tuning import drawn_weights, trained

TRAINED = 85  # % of test images; the paper's nets have more on CIFAR-10


class Options(Section):
    """The study's choices. `world`: its first task is trained on. `spawn`: k, ascending. `epochs`: in all."""

    world: World
    spawn: list[int] = Field(min_length=2)
    epochs: int = Field(ge=1)
    seeds: list[int] = Field(min_length=1)


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield features by block (`features`) and the barrier (`barriers`) for each seed and k."""
    tasks = Lazy(partial(open_world, options.world, lab.io.root))
    yield from lab.by_seed(partial(measure_seed, options, tasks), options.seeds)


def measure_seed(options: Options, opened: Tasks, seed: int) -> Iterator[Row]:
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
        yield from ({"part": "features", **row, "seed": seed, "k": k} for row in _features(model, ends, task))
        yield {"part": "barriers", "seed": seed, "k": k, **barrier(model, ends, task)}


def _epochs(options: Options, epochs: int) -> Any:
    return options.world.tune.model_copy(update={"epochs": epochs})


def _features(model: Model, ends: list[dict[str, Any]], task: NetTask) -> list[Row]:
    half = Combination({"0": 0.5, "1": 0.5}, with_statistics(model, combine(ends, [0.5, 0.5]), [task.train]))
    named = {str(n): with_statistics(model, end, [task.train]) for n, end in enumerate(ends)}
    return rows_of(affine(model, {"test": task.test}, named, {"half": half}, find_layers(model.module), batch_size=250))


def barrier(model: Model, ends: list[dict[str, Any]], task: NetTask) -> Row:
    """Return the ends' mean accuracy and the barriers at α = ½, in points, by how BatchNorm's statistics came about.

    Args:
        model: the network, whose weights are overwritten.
        ends: the weights of two nets.
        task: the task they were trained on.
    """
    nets = [*ends, combine(ends, [0.5, 0.5])]
    first, second, middle = (_accuracy(model, net, task) for net in nets)
    again = [_accuracy(model, with_statistics(model, net, [task.train]), task) for net in nets]
    own = (first + second) / 2
    return {"ends": own, "interpolated": own - middle, "recomputed": (again[0] + again[1]) / 2 - again[2]}


def _accuracy(model: Model, state: State, task: NetTask) -> float:
    model.load(state)
    return 100 * accuracies(model, {"own": task.test})["own"]


def at_k(rows: pd.DataFrame, k: int, value: str = "recomputed") -> pd.Series:
    return samples(select(rows, part="barriers"), value, k=k)


def last_block(rows: pd.DataFrame, k: int) -> pd.Series:
    """Return 1 − cos in the last block, by seed."""
    return samples(select(rows, depth=rows.depth.max()), "distance", k=k)


# fmt: off
def claims(options: Options) -> list[Claim]:
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


def barrier_table(rows: pd.DataFrame) -> pd.DataFrame:
    own = select(rows, part="barriers")
    labels = {
        "ends": "ends, %",
        "interpolated": "barrier, statistics averaged",
        "recomputed": "barrier, computed again",
    }
    parts = [table(own, "k", value=value).rename(columns={value: label}) for value, label in labels.items()]
    return pd.concat(parts, axis=1)


def barrier_figure(rows: pd.DataFrame) -> Figure:
    own = select(rows, part="barriers")
    long = own.melt(["seed", "k"], ["interpolated", "recomputed"], "statistics", "barrier")
    return curves(
        long, "k", "statistics", "barrier", title="Barrier", x_label="epochs together, k", y_label="points of accuracy"
    )


def feature_figure(rows: pd.DataFrame) -> Figure:
    """Draw 1 − cos of the first, a middle and the last block over k."""
    own = select(rows, part="features")
    layers = list(own.layer.drop_duplicates())
    some = select(own, layer=[layers[0], layers[len(layers) // 2], layers[-1]])
    return curves(some, "k", "layer", "distance", title="Features", x_label="epochs together, k", y_label="1 − cos")


STUDY = Study(
    options=Options,
    systems=("L5",),
    measure=measure,
    claims=claims,
    tables={
        "Accuracy and its barrier at α = ½, points": barrier_table,
        "Features at α = ½": lambda rows: layer_table(select(rows, part="features"), "k", "layer"),
    },
    figures={"barriers": barrier_figure, "features": feature_figure},
)
