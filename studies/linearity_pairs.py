"""Studies `linearity_pairs`, `linearity_averages` (L1–L4, L6–L9): are features of averaged weights averaged features?

**Question.** Nets are tuned from one pre-trained net, on different tasks (*pairs*) or on one task with different
settings (*averages*, a soup). Is the feature of their averaged weights, at every layer, the average of their features,
in direction (LLFC) and in length too (CTL)? Does the loss between two stay flat (LMC)? And is a soup as good as an
ensemble of the outputs because features average?

**Method of pairs.** *digits*: an MLP is pre-trained on upright digits and tuned on digits turned by four angles.
*splits*: a residual net is pre-trained on some classes and tuned on others. For all six pairs, every layer,
α ∈ {¼, ½, ¾} and the test examples of both tasks, with f the feature of αθ_i + (1 − α)θ_j and
g = αf(θ_i) + (1 − α)f(θ_j):

    1 − cos(f, g) beside 1 − cos(f(θ_i), f(θ_j)), and coef = ⟨f, g⟩ / ‖g‖².

*Baseline*: a small 1 − cos says nothing where the two nets' features are the same anyway. *BatchNorm* of the averaged
net: running statistics averaged like weights, and those of all nets computed again, on training pictures of both
tasks. *LMC*: loss at eleven α on D_i, D_j and D_PT; it holds where the ends differ by at most 0.1 nat and the
barrier max_α L(θ_α) − [αL(θ_i) + (1 − α)L(θ_j)] is at most 0.1 nat. *Lemma 2*: m = 2, 3, 4 nets, uniform weights,
(.1, .2, .3, .4) and five draws from the simplex. *Lemma 1*: the share of (pair, α, D) whose loss is at most 0.02 nat
above the chord.

**Method of averages.** An MLP is pre-trained on upright pictures, and n nets are tuned on one turned task with rates,
lengths and orders of their own. *Eq. 1*: f(θ̄) beside (1/k) Σ f(θ_i) at each hidden layer for the first k; the
baseline is the mean over i of 1 − cos(f(θ̄), f(θ_i)), the averaged net against each (not the nets among each other).
*Triples*: for all C(n, 3), test accuracy of the averaged weights against accuracy of the averaged logits: Pearson's r
and the difference.

The paper prints no thresholds, r or difference; all margins are ours and were written before the run. Its "20 000 test
samples" of a class split cannot be: two splits of CIFAR-100 have 1 000. `fashion_pairs` and `fashion_averages` are the
same on real pictures, Fashion-MNIST (worlds/fashion).

**Source.** Zhou et al. 2024, Cross-Task Linearity, Sections 3, 4.1 and 4.2, Eq. 1, Lemmas 1 and 2, Figures 4 to 6,
B.1.1; Wortsman et al. 2022, Model soups.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.evaluation.accuracy import in_batches
from mergeflow.linearity.affine import Combination, Linearity, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import Model, State
from studies.lab import Claim, Laboratory, Row, Section, Study, select, table
from studies.lab.linearity import (
    ENDS,
    NetTask,
    Tasks,
    Trained,
    World,
    accuracy_of,
    by_seed,
    direction,
    excess,
    farthest_pairs,
    has_statistics,
    layer_table,
    layers_figure,
    length,
    loss_gaps,
    not_connected,
    path_rows,
    pretrained,
    rows_of,
    train_world,
    with_statistics,
)
from studies.lab.plots import scatter
from studies.lab.rows import Samples
from studies.lab.tuning import trained
from tasks.plotting.palette import INK

# Pairs

ALPHAS = (0.25, 0.5, 0.75)
SLACK, SHARE = 0.02, 0.9  # nats above the chord, share of Lemma 1


class PairOptions(Section):
    """Choices of pairs. `worlds`: by name. `seeds`: of weights and of the order of examples."""

    worlds: dict[str, World] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


def measure_pairs(lab: Laboratory, options: PairOptions) -> Iterator[Row]:
    """Yield rows for each world and seed: features of pairs and of m nets by layer, losses along paths, accuracies."""
    for name, world in options.worlds.items():
        yield from by_seed(lab, world, partial(measure_world, name, world), options.seeds, name)


def measure_world(name: str, world: World, opened: Tasks, seed: int) -> Iterator[Row]:
    """Yield the rows of one world and seed: `features`, `simplex`, `paths`, `accuracy`."""
    tasks = opened()
    done = train_world(world, tasks, seed)
    about = {"world": name, "seed": seed}
    test = {task: split.test for task, split in tasks.items()}
    for task, state in {done.first: done.start, **done.tuned}.items():
        accuracy = accuracy_of(done.model, state, tasks[task])
        yield {"part": "accuracy", **about, "task": task, "accuracy": accuracy}
    layers = [*find_layers(done.model.module), ""]
    for mode in ("interpolated", "recomputed") if has_statistics(done.model) else ("none",):
        for key, compared in pairs(done, layers, mode).items():
            alpha, _, pair = key.partition(" ")
            made = rows_of({pair: compared}, part="features", **about, statistics=mode, alpha=float(alpha))
            yield from ({**row, "layer": row["layer"] or "logits"} for row in made)
    yield from ({"part": "simplex", **row} for row in simplex(done, layers[:-1], seed, about))
    eleven = [round(0.1 * step, 1) for step in range(11)]
    for i, j in combinations(done.tuned, 2):
        examples = {d: test[d] for d in (i, j, done.first)}
        ends = done.tuned[i], done.tuned[j]
        yield from path_rows(done.model, ends, examples, eleven, part="paths", **about, pair=f"{i} – {j}")


def pairs(done: Trained, layers: list[str], mode: str) -> dict[str, dict[str, Linearity]]:
    """Compare all pairs at all α, under the names `α i – j`.

    The mode "recomputed" computes BatchNorm's statistics again for every net and average.
    """
    sources = {task: split.test for task, split in done.tasks.items() if task in done.tuned}
    ends = own_statistics(done) if mode == "recomputed" else done.tuned
    asked = {}
    for alpha, (i, j) in product(ALPHAS, combinations(done.tuned, 2)):
        state = None
        if mode == "recomputed":
            middle = combine([done.tuned[i], done.tuned[j]], [alpha, 1 - alpha])
            state = with_statistics(done.model, middle, [done.tasks[i].train, done.tasks[j].train])
        asked[f"{alpha:g} {i} – {j}"] = Combination({i: alpha, j: 1 - alpha}, state, on=frozenset({i, j}))
    return affine(done.model, sources, ends, asked, layers, batch_size=500)


def own_statistics(done: Trained) -> dict[str, dict[str, Tensor]]:
    """Return the tuned nets, BatchNorm's statistics computed again on their own training pictures."""
    return {task: with_statistics(done.model, state, [done.tasks[task].train]) for task, state in done.tuned.items()}


def simplex(done: Trained, layers: list[str], seed: int, about: Row) -> list[Row]:
    """Return rows of m nets with weights of the simplex, on the tests of all of them."""
    names = list(done.tuned)
    drawn = np.random.default_rng(seed).dirichlet(np.ones(len(names)), size=5)
    weights = {f"uniform {m}": [1 / m] * m for m in range(2, len(names) + 1)}
    rising = np.arange(1, len(names) + 1) / np.arange(1, len(names) + 1).sum()
    weights |= {"rising": rising.tolist(), **{f"drawn {n}": row.tolist() for n, row in enumerate(drawn, start=1)}}
    asked = {}
    for name, values in weights.items():
        chosen = dict(zip(names, values, strict=False))
        middle = combine([done.tuned[task] for task in chosen], list(chosen.values()))
        state = with_statistics(done.model, middle, [done.tasks[task].train for task in chosen])
        asked[name] = Combination(chosen, state, on=frozenset(chosen))
    sources = {task: done.tasks[task].test for task in names}
    rows = rows_of(affine(done.model, sources, own_statistics(done), asked, layers, batch_size=500), **about)
    return [{**row, "models": len(asked[row["combination"]].weights)} for row in rows]


# What the rows of pairs are asked


def judged(rows: pd.DataFrame, world: str) -> pd.DataFrame:
    """Return the features that verdicts count: hidden layers, BatchNorm's statistics computed again."""
    features = select(rows, part="features", world=world)
    return features[(features.statistics != "interpolated") & (features.layer != "logits")]


def smallest_gap(rows: pd.DataFrame, world: str, of_pair: bool) -> Samples:
    """Return the smallest distance from LMC, over pairs and D: those of the pair, or the pre-training's."""
    gaps = loss_gaps(select(rows, part="paths", world=world))
    mine = [on in pair.split(" – ") for pair, on in zip(gaps.pair, gaps.on, strict=True)]
    return {"smallest": gaps[np.array(mine) == of_pair].groupby("seed").gap.min()}


def share_below(rows: pd.DataFrame, world: str) -> Samples:
    """Return the share of (pair, α, D) whose loss is at most 0.02 nat above the chord."""
    paths = excess(select(rows, part="paths", world=world))
    inner = paths[~paths.alpha.isin([0.0, 1.0])]
    return {"share": (inner.loss - inner.chord <= SLACK).groupby(inner.seed).mean()}


# fmt: off
def claims_of(world: str, net: World) -> list[Claim]:
    """List the paper's claims about the nets of one world."""
    system = "L2" if net.angles else "L3"
    features: Callable[[pd.DataFrame], pd.DataFrame] = partial(judged, world=world)
    made = [
        direction(system, "Features of averaged weights point where averaged features do (LLFC), in all pairs, "
                          "layers and α.", features),
        length(system, "Features of averaged weights have the length of averaged features too (CTL).", features),
        not_connected("on D_i and D_j", partial(smallest_gap, world=world, of_pair=True), ENDS),
        not_connected("on D_PT too", partial(smallest_gap, world=world, of_pair=False)),
        Claim("L9", "The loss of averaged weights is at most the average of the losses (Lemma 1).",
              partial(share_below, world=world), low=SHARE, unit="", digits=3,
              of=f"share of (pair, α, D) at most {SLACK} nat above it"),
        direction("L8",
                  "It holds for any weights of up to four nets, as for pairs (Lemma 2), in direction.",
                  partial(select, part="simplex", world=world)),
    ]
    small = "an MLP" if net.architecture == "mlp" else f"a ResNet-20 of width {net.width}, {net.size} pixels a side"
    other = "" if net.angles else f"{small}, where the paper has ResNet-18 on CIFAR-100"
    return [replace(claim, setting=world, caveat=claim.caveat or other) for claim in made]
# fmt: on


def pair_figure(rows: pd.DataFrame, world: str) -> Figure:
    """Draw the nearest, a middle and the farthest pair."""
    return layers_figure(farthest_pairs(judged(rows, world), [0, 0.5, 1]), "combination")


def feature_table(rows: pd.DataFrame, world: str) -> pd.DataFrame:
    return layer_table(select(rows, part="features", world=world), "statistics", "layer")


PAIRS = Study(
    question="are features of averaged weights the averaged features?",
    options=PairOptions,
    systems=("L1", "L2", "L3", "L4", "L8", "L9"),
    measure=measure_pairs,
    claims=lambda options: [claim for name, world in options.worlds.items() for claim in claims_of(name, world)],
    tables=lambda options: {
        "Accuracy of each net on its own test, % (the first task is the pre-training's)": lambda rows: table(
            select(rows, part="accuracy"), ["world", "task"]
        ),
        **{f"{world}: means over pairs and α": partial(feature_table, world=world) for world in options.worlds},
    },
    figures=lambda options: {world: partial(pair_figure, world=world) for world in options.worlds},
)


# Averages of many nets


class AverageOptions(Section):
    """Choices of averages. `task`: which of the world's. `rates`, `epochs`: crossed, each with `orders` orders of the
    examples: n nets in all. `averages`: k of Eq. 1."""

    world: World
    task: str
    rates: list[float] = Field(min_length=1)
    epochs: list[int] = Field(min_length=1)
    orders: int = Field(ge=1)
    averages: list[int] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


def measure_averages(lab: Laboratory, options: AverageOptions) -> Iterator[Row]:
    """Yield the rows of Eq. 1 by layer (`features`), and one for every three nets (`triples`), for each seed."""
    yield from by_seed(lab, options.world, partial(measure_seed, options), options.seeds)


def measure_seed(options: AverageOptions, opened: Tasks, seed: int) -> Iterator[Row]:
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
    named = {str(number): state for number, state in enumerate(nets)}
    asked = {f"{k} nets": Combination(dict.fromkeys(list(named)[:k], 1 / k), baseline="each") for k in options.averages}
    compared = affine(model, {"test": task.test}, named, asked, find_layers(model.module), batch_size=500)
    yield from rows_of(compared, part="features", seed=seed)
    yield from measure_triples(model, nets, task, seed)


def measure_triples(model: Model, nets: Sequence[State], task: NetTask, seed: int) -> Iterator[Row]:
    """Yield for every three nets the test accuracy, in %, of averaged weights and of averaged logits."""
    labels = task.test.labels
    outputs = [_logits(model, state, task) for state in nets]

    def accuracy(logits: torch.Tensor) -> float:
        return 100 * float((logits.argmax(1) == labels).double().mean())

    for chosen in combinations(range(len(nets)), 3):
        middle = combine([nets[index] for index in chosen], [1 / 3] * 3)
        mean = torch.stack([outputs[index] for index in chosen]).mean(0)
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
        return groups.apply(lambda group: np.corrcoef(group.weights, group.logits)[0, 1], include_groups=False)


def differences(rows: pd.DataFrame) -> pd.Series:
    chosen = triples(rows)
    return (chosen.weights - chosen.logits).groupby(chosen.seed).median()


OTHER_NET = "an MLP, where the paper has soups of ViT-B/32"


# fmt: off
def claims_on_averages(options: AverageOptions) -> list[Claim]:
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


def triples_figure(rows: pd.DataFrame) -> Figure:
    """Draw the first seed's triples and the line y = x."""
    drawn = triples(rows)
    drawn = drawn[drawn.seed == drawn.seed.min()].assign(nets="every three nets, first seed")
    weights, logits = "accuracy of averaged weights, %", "accuracy of averaged logits, %"
    figure = scatter(drawn, {"weights": weights}, "logits", "nets", y_label=logits, height=4.6)
    figure.axes[0].axline((drawn.logits.mean(), drawn.logits.mean()), slope=1, color=INK, linewidth=0.8, linestyle="--")
    return figure


AVERAGES = Study(
    question="is the average of many nets' weights the ensemble of their outputs?",
    options=AverageOptions,
    systems=("L6", "L7"),
    measure=measure_averages,
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

STUDIES = {
    "linearity_pairs": PAIRS,
    "fashion_pairs": PAIRS,
    "linearity_averages": AVERAGES,
    "fashion_averages": AVERAGES,
}
