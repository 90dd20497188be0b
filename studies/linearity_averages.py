"""Study `linearity_averages`: is the average of many nets' weights the ensemble of their outputs?

**Question.** Nets are tuned from one pre-trained net on one task with different settings, a soup. Is the feature of
their averaged weights the average of their features, and is a soup as good as an ensemble of the outputs because
features average?

**Method.** An MLP is pre-trained on upright pictures, and n nets are tuned on one turned task with rates, lengths and
orders of their own. *Eq. 1*: f(θ̄) beside (1/k) Σ f(θ_i) at each hidden layer for the first k; the baseline is the mean
over i of 1 − cos(f(θ̄), f(θ_i)), the averaged net against each (not the nets among each other). *Triples*: for all
C(n, 3), test accuracy of the averaged weights against accuracy of the averaged logits: Pearson's r and the difference.

The paper prints no thresholds, r or difference; all margins are ours and were written before the run.
`fashion_averages` is the same on real pictures, Fashion-MNIST (worlds/fashion). `soups` takes the project's own model:
its nets are the experts of several training runs on one task, and a repetition has one net of each run; where heads are
trained, averaged weights have the mean of the nets' heads. `texts_soups` is that on a pre-trained encoder and real
texts (worlds/real-texts); examples/studies has the choices for ViT-B/32.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Sections 4.1 and 4.2, Eq. 1, Figures 4 to 6; Wortsman et al.
2022, Model soups.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.errors import MergeflowError, unknown_name
from mergeflow.linearity.affine import Combination, Featured, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modalities.classification import Classification, Subset
from mergeflow.modality import Model, State
from studies.lab import Claim, Laboratory, Row, Section, Study, select
from studies.lab.inputs import over_seeds
from studies.lab.linearity import (
    Tasks,
    World,
    direction,
    layer_table,
    layers_figure,
    length,
    open_world,
    pretrained,
    rows_of,
)
from studies.lab.plots import scatter
from studies.lab.tuning import trained
from tasks.plotting.palette import INK


class Options(Section):
    world: World
    task: str  # which of the world's
    # rates, epochs: crossed, each with `orders` orders of the examples: n nets in all
    rates: list[float] = Field(min_length=1)
    epochs: list[int] = Field(min_length=1)
    orders: int = Field(ge=1)
    averages: list[int] = Field(min_length=1)  # k of Eq. 1
    seeds: list[int] = Field(min_length=1)


class SoupOptions(Section):
    """The choices of a soup of the project's model."""

    runs: list[str] = Field(min_length=3)  # n training runs that differ in their settings
    task: str  # the one that all n nets are tuned on
    averages: list[int] = Field(min_length=1)  # k of Eq. 1
    images: int = Field(ge=32)  # test examples whose features are compared


def measure_seed(options: Options, opened: Tasks, seed: int) -> Iterator[Row]:
    """Yield the rows of Eq. 1 by layer (`features`), and one for every three nets (`triples`)."""
    tasks, world = opened(), options.world
    task = tasks[options.task]
    model, _, start = pretrained(world, tasks, seed)
    settings = [
        (world.tune.model_copy(update={"learning_rate": rate, "epochs": epochs}), 100 * seed + order)
        for order in range(options.orders)
        for epochs in options.epochs
        for rate in options.rates
    ]
    nets = [trained(model, start, task.train, tuning, order) for tuning, order in settings]
    yield from measure_averages(model, nets, task.test, options.averages, seed)
    yield from measure_triples(model, nets, lambda chosen: task.test, seed)


def measure_soups(lab: Laboratory, options: SoupOptions) -> Iterator[Row]:
    """Yield the rows of `measure_seed` for nets that training runs left, each repetition of the runs by itself."""
    yield from lab.by_seed(partial(measure_soup, lab, options), lab.run(options.runs[0]).seeds)


def measure_soup(lab: Laboratory, options: SoupOptions, seed: int) -> Iterator[Row]:
    if options.task not in lab.tasks:
        raise unknown_name("task", options.task, lab.tasks)
    lab, runs = lab.only([options.task]), [lab.run(run) for run in options.runs]
    nets = [run.expert(seed, options.task) for run in runs]
    heads = [run.heads(seed)[options.task] for run in runs] if lab.trained_heads else []

    def test_of(chosen: Sequence[int]) -> Classification:
        """Return the test examples with the head of a net, or with the mean of several nets' heads."""
        judging = lab
        if heads:
            mean = combine([heads[net] for net in chosen], [1 / len(chosen)] * len(chosen))
            judging = lab.with_heads({options.task: mean})
        test = judging.examples("test")[options.task]
        if not isinstance(test, Classification):
            raise MergeflowError(
                f"studies.{lab.io.stage.name}.task: '{options.task}' has no classes, whose logits could be averaged. "
                "Name a task of labelled examples."
            )
        return test

    yield from measure_averages(lab.model, nets, Subset.first(test_of([0]), options.images), options.averages, seed)
    yield from measure_triples(lab.model, nets, test_of, seed)


def measure_averages(
    model: Model, nets: Sequence[State], test: Featured, averages: Sequence[int], seed: int
) -> Iterator[Row]:
    """Yield f(θ̄) beside (1/k) Σ f(θ_i) at each hidden layer for the first k nets."""
    named = {str(number): state for number, state in enumerate(nets)}
    asked = {f"{k} nets": Combination(dict.fromkeys(list(named)[:k], 1 / k), baseline="each") for k in averages}
    compared = affine(model, {"test": test}, named, asked, find_layers(model.module), batch_size=64)
    yield from rows_of(compared, part="features", seed=seed)


def measure_triples(
    model: Model, nets: Sequence[State], test_of: Callable[[Sequence[int]], Classification], seed: int
) -> Iterator[Row]:
    """Yield for every three nets the test accuracy, in %, of averaged weights and of averaged logits.

    Args:
        test_of: gives the test examples with what the chosen nets have for a head.
    """
    labels = test_of([0]).labels
    outputs = [_logits(model, state, test_of([net])) for net, state in enumerate(nets)]

    def accuracy(logits: torch.Tensor) -> float:
        return 100 * float((logits.argmax(1) == labels).double().mean())

    for chosen in combinations(range(len(nets)), 3):
        middle = combine([nets[index] for index in chosen], [1 / 3] * 3)
        mean = torch.stack([outputs[index] for index in chosen]).mean(0)
        accuracies = {"weights": accuracy(_logits(model, middle, test_of(chosen))), "logits": accuracy(mean)}
        yield {"part": "triples", "seed": seed, "nets": "-".join(map(str, chosen)), **accuracies}


@torch.inference_mode()
def _logits(model: Model, state: State, test: Classification) -> torch.Tensor:
    model.load(state)
    return torch.cat([test.logits(model, rows) for rows in torch.arange(len(test)).split(500)])


def triples(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, part="triples")


def correlations(rows: pd.DataFrame) -> pd.Series:
    """Return Pearson's r over the triples of each seed; NaN where all triples are equally good."""
    with np.errstate(invalid="ignore"):
        groups = triples(rows).groupby("seed")
        return groups.apply(lambda group: np.corrcoef(group.weights, group.logits)[0, 1], include_groups=False)


def differences(rows: pd.DataFrame) -> pd.Series:
    chosen = triples(rows)
    return (chosen.weights - chosen.logits).groupby(chosen.seed).median()


OTHER_NET = "an MLP, where the paper has soups of ViT-B/32"
SOUP = 20  # nets of the paper's triples
SMALL_SOUP = "fewer nets than the paper's 20 of ViT-B/32 on ImageNet"


# fmt: off
def claims_on_averages(options: Options | SoupOptions) -> list[Claim]:
    caveat = OTHER_NET if isinstance(options, Options) else SMALL_SOUP if len(options.runs) < SOUP else ""
    def identity(rows: pd.DataFrame) -> pd.DataFrame:
        return rows

    says = "Features of averaged weights of k nets"
    of_nets = [direction("L6", f"{says} point where their averaged features do.", identity),
               length("L6", f"{says} have the length of their averaged features.", identity)]
    of_nets = [replace(claim, caveat=caveat) for claim in of_nets]
    return [
        *(claim.of_part(partial(select, combination=f"{k} nets"), f"{k} nets")
          for k in options.averages for claim in of_nets),
        Claim("L7", "Accuracy of averaged weights goes with accuracy of averaged logits over all triples.",
              lambda rows: {"r": correlations(rows)}, low=0.7, of="Pearson's r", unit="", digits=2,
              caveat=caveat),
        Claim("L7", "The two accuracies are the same.",
              lambda rows: {"median difference": differences(rows).abs()}, high=1, digits=2, ours=True,
              of="size of the median of weights less logits,"),
    ]
# fmt: on


def triples_figure(rows: pd.DataFrame) -> Figure:
    """Draw the first seed's triples and the line y = x."""
    drawn = triples(rows)
    drawn = drawn[drawn.seed == drawn.seed.min()].assign(nets="every three nets, first seed")
    weights, logits = "accuracy of averaged weights, %", "accuracy of averaged logits, %"
    figure = scatter(drawn, {"weights": weights}, "logits", "nets", y_label=logits, height=4.6)
    figure.axes[0].axline((drawn.logits.mean(), drawn.logits.mean()), slope=1, color=INK, linewidth=0.8, linestyle="--")
    return figure


STUDY = Study(
    options=Options,
    systems=("L6", "L7"),
    measure=over_seeds(open_world, measure_seed),
    claims=claims_on_averages,
    tables={
        "Eq. 1: the averaged net against the average of features; the baseline is against each net": lambda rows: (
            layer_table(select(rows, part="features"), "combination", "layer")
        ),
    },
    figures={
        "averages": lambda rows: layers_figure(select(rows, part="features"), "combination"),
        "triples": triples_figure,
    },
)

SOUPS = replace(
    STUDY,
    options=SoupOptions,
    runs=lambda options: options.runs,
    splits=("test",),
    measure=measure_soups,
    question="is a soup of the project's own model the ensemble of its nets?",
)

STUDIES = {"linearity_averages": STUDY, "fashion_averages": STUDY, "soups": SOUPS, "texts_soups": SOUPS}
