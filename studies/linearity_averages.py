"""Study `linearity_averages` (L6, L7): is the average of many nets' weights the ensemble of their outputs?

**Question.** Averaging the weights of nets that were tuned on one task with different settings (a soup) is nearly as
good as averaging their outputs. Is it because features average, and how close are the two accuracies?

**Method.** An MLP is pre-trained on upright digits, and n nets are tuned on one turned task with rates, lengths and
orders of their own. *Eq. 1*: f(θ̄) beside (1/k) Σ f(θ_i) at each hidden layer for the first k; the baseline is the
mean over i of 1 − cos(f(θ̄), f(θ_i)), the averaged net against each (not the nets among each other). *Triples*: for
all C(n, 3), test accuracy of the averaged weights against accuracy of the averaged logits: Pearson's r and the
difference. Margins are ours and were written before the run; the paper prints neither r nor a difference.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 4.2, Eq. 1, Figures 4 to 6; Wortsman et al. 2022, Model
soups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.accuracy import in_batches
from mergeflow.linearity.affine import Combination, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import Model, State
from studies.lab import Claim, Laboratory, Row, Section, Study, select
from studies.lab.inputs import Lazy
from studies.lab.linearity import (
    NetTask,
    Tasks,
    World,
    direction,
    layer_table,
    layers_figure,
    length,
    new_net,
    open_world,
    rows_of,
)
from studies.lab.plots import scatter
from studies.lab.tuning import drawn_weights, trained
from tasks.plotting.palette import INK


class Options(Section):
    """The study's choices. `task`: which of the world's. `rates`, `epochs`: crossed, each with `orders` orders of the
    examples: n nets in all. `averages`: k of Eq. 1."""

    world: World
    task: str
    rates: list[float] = Field(min_length=1)
    epochs: list[int] = Field(min_length=1)
    orders: int = Field(ge=1)
    averages: list[int] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield the rows of Eq. 1 by layer (`features`), and one for every three nets (`triples`), for each seed."""
    tasks = Lazy(partial(open_world, options.world, lab.io.root))
    yield from lab.by_seed(partial(measure_seed, options, tasks), options.seeds)


def measure_seed(options: Options, opened: Tasks, seed: int) -> Iterator[Row]:
    tasks, world = opened(), options.world
    task = tasks[options.task]
    model = new_net(world, tasks, seed)
    start = trained(model, drawn_weights(model), tasks[next(iter(tasks))].train, world.pretrain, seed)
    settings = [
        (world.tune.model_copy(update={"learning_rate": rate, "epochs": epochs}), 100 * seed + order)
        for order in range(options.orders)
        for epochs in options.epochs
        for rate in options.rates
    ]
    nets = [trained(model, start, task.train, tuning, order) for tuning, order in settings]
    named = {str(number): state for number, state in enumerate(nets)}
    asked = {f"{k} nets": Combination(dict.fromkeys(list(named)[:k], 1 / k), baseline="each") for k in options.averages}
    found = affine(model, {"test": task.test}, named, asked, find_layers(model.module), batch_size=500)
    yield from rows_of(found, part="features", seed=seed)
    yield from measure_triples(model, nets, task, seed)


def measure_triples(model: Model, nets: Sequence[State], task: NetTask, seed: int) -> Iterator[Row]:
    """Yield for every three nets the test accuracy, in %, of averaged weights and of averaged logits."""
    labels = task.test.labels
    outputs = [_logits(model, state, task) for state in nets]

    def accuracy(logits: torch.Tensor) -> float:
        return 100 * float((logits.argmax(1) == labels).double().mean())

    for chosen in combinations(range(len(nets)), 3):
        middle = combine([nets[one] for one in chosen], [1 / 3] * 3)
        mean = torch.stack([outputs[one] for one in chosen]).mean(0)
        accuracies = {"weights": accuracy(_logits(model, middle, task)), "logits": accuracy(mean)}
        yield {"part": "triples", "seed": seed, "nets": "-".join(map(str, chosen)), **accuracies}


@torch.inference_mode()
def _logits(model: Model, state: State, task: NetTask) -> torch.Tensor:
    model.load(state)
    return torch.cat([task.test.logits(model, rows) for rows in in_batches(len(task.test), 1000)])


def triples(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, part="triples")


def correlations(rows: pd.DataFrame) -> pd.Series:
    """Return Pearson's r over the triples of each seed; NaN where all triples are equally good."""
    with np.errstate(invalid="ignore"):
        groups = triples(rows).groupby("seed")
        return groups.apply(lambda own: np.corrcoef(own.weights, own.logits)[0, 1], include_groups=False)


def differences(rows: pd.DataFrame) -> pd.Series:
    own = triples(rows)
    return (own.weights - own.logits).groupby(own.seed).median()


OTHER_NET = "an MLP on turned digits, where the paper has soups of ViT-B/32"


# fmt: off
def claims(options: Options) -> list[Claim]:
    def identity(rows: pd.DataFrame) -> pd.DataFrame:
        return rows

    says = "Features of averaged weights of k nets"
    of_nets = [direction("L6", f"{says} point where their averaged features do.", identity),
               length("L6", f"{says} have the length of their averaged features.", identity)]
    of_nets = [replace(claim, caveat=OTHER_NET) for claim in of_nets]
    return [
        *(claim.of_part(partial(select, combination=f"{k} nets"), f"{k} nets")
          for k in options.averages for claim in of_nets),
        Claim("L7", "Accuracy of averaged weights goes with accuracy of averaged logits over all triples.",
              lambda rows: {"r": correlations(rows)}, low=0.7, of="Pearson's r", unit="", digits=2,
              caveat=OTHER_NET),
        Claim("L7", "The two accuracies are the same.",
              lambda rows: {"median difference": differences(rows).abs()}, high=1, of="median difference", digits=2,
              ours=True),
    ]
# fmt: on


def triple_table(rows: pd.DataFrame) -> pd.DataFrame:
    groups = triples(rows).groupby("seed")
    made = groups.agg(triples=("nets", "size"), weights=("weights", "mean"), logits=("logits", "mean"))
    slope = groups.apply(lambda own: np.polyfit(own.logits, own.weights, 1)[0], include_groups=False)
    more = {"r": correlations(rows).round(3), "slope": slope.round(2), "median difference": differences(rows).round(2)}
    return made.round(2).assign(**more)


def triples_figure(rows: pd.DataFrame) -> Figure:
    """Draw the first seed's triples and the line y = x."""
    own = triples(rows)
    own = own[own.seed == own.seed.min()].assign(nets="every three nets, first seed")
    weights, logits = "accuracy of averaged weights, %", "accuracy of averaged logits, %"
    figure = scatter(own, {"weights": weights}, "logits", "nets", y_label=logits, height=4.6)
    figure.axes[0].axline((own.logits.mean(), own.logits.mean()), slope=1, color=INK, linewidth=0.8, linestyle="--")
    return figure


STUDY = Study(
    options=Options,
    systems=("L6", "L7"),
    measure=measure,
    claims=claims,
    tables={
        "Eq. 1: the averaged net against the average of features; the baseline is against each net": lambda rows: (
            layer_table(select(rows, part="features"), "combination", "layer")
        ),
        "Triples: accuracy in %": triple_table,
    },
    figures={
        "averages": lambda rows: layers_figure(select(rows, part="features"), "combination"),
        "triples": triples_figure,
    },
)
