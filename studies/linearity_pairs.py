"""Study `linearity_pairs`: are features of averaged weights the averaged features?

**Question.** Nets are tuned from one pre-trained net on different tasks. Is the feature of their averaged weights, at
every layer, the average of their features, in direction (LLFC) and in length too (CTL)? Does the loss between two stay
flat (LMC)?

**Method.** *digits*: an MLP is pre-trained on upright digits and tuned on digits turned by four angles. *splits*: a
residual net is pre-trained on some classes and tuned on others. For all six pairs, every layer, α ∈ {¼, ½, ¾} and the
test examples of both tasks, with f the feature of αθ_i + (1 − α)θ_j and g = αf(θ_i) + (1 − α)f(θ_j):

    1 − cos(f, g) beside 1 − cos(f(θ_i), f(θ_j)), and coef = ⟨f, g⟩ / ‖g‖².

*Baseline*: a small 1 − cos says nothing where the two nets' features are the same anyway. *BatchNorm* of the averaged
net: running statistics averaged like weights, and those of all nets computed again, on training pictures of both
tasks. *LMC*: loss at eleven α on D_i, D_j and D_PT; it holds where the ends differ by at most 0.1 nat and the
barrier max_α L(θ_α) − [αL(θ_i) + (1 − α)L(θ_j)] is at most 0.1 nat. *Lemma 2*: m = 2, 3, 4 nets, uniform weights,
(.1, .2, .3, .4) and five draws from the simplex. *Lemma 1*: the share of (pair, α, D) whose loss is at most 0.02 nat
above the chord.

The paper prints no thresholds; all margins are ours and were written before the run. Its "20 000 test samples" of a
class split cannot be: two splits of CIFAR-100 have 1 000. `fashion_pairs` is the same on real pictures, Fashion-MNIST
(worlds/fashion).

**Source.** Zhou et al. 2024, Cross-Task Linearity, Sections 3, 4.1 and 4.2, Lemmas 1 and 2, Figures 4 to 6, B.1.1.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations, product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.linearity.affine import Combination, Linearity, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import State
from studies.lab import Claim, Laboratory, Row, Section, Study, select, table
from studies.lab.linearity import (
    ALPHAS,
    ENDS,
    Tasks,
    TunedModels,
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
    rows_of,
    train_world,
    with_statistics,
)
from studies.lab.rows import Samples

SLACK, SHARE = 0.02, 0.9  # nats above the chord, share of Lemma 1


class Options(Section):
    """The study's choices. `worlds`: by name. `seeds`: of weights and of the order of examples."""

    worlds: dict[str, World] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
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


def pairs(done: TunedModels, layers: list[str], mode: str) -> dict[str, dict[str, Linearity]]:
    """Compare all pairs at all α, under the names `α i – j`.

    The mode "recomputed" computes BatchNorm's statistics again for every net and average.
    """
    sources = {task: split.test for task, split in done.tasks.items() if task in done.tuned}
    ends: Mapping[str, State] = own_statistics(done) if mode == "recomputed" else done.tuned
    asked = {}
    for alpha, (i, j) in product(ALPHAS, combinations(done.tuned, 2)):
        state = None
        if mode == "recomputed":
            middle = combine([done.tuned[i], done.tuned[j]], [alpha, 1 - alpha])
            state = with_statistics(done.model, middle, [done.tasks[i].train, done.tasks[j].train])
        asked[f"{alpha:g} {i} – {j}"] = Combination({i: alpha, j: 1 - alpha}, state, on=frozenset({i, j}))
    return affine(done.model, sources, ends, asked, layers, batch_size=500)


def own_statistics(done: TunedModels) -> dict[str, dict[str, Tensor]]:
    """Return the tuned nets, BatchNorm's statistics computed again on their own training pictures."""
    return {task: with_statistics(done.model, state, [done.tasks[task].train]) for task, state in done.tuned.items()}


def simplex(done: TunedModels, layers: list[str], seed: int, about: Row) -> list[Row]:
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
    small = "an MLP" if net.architecture == "mlp" else (
        f"a ResNet-20 of width {net.width}, {net.size} pixels a side, BatchNorm's statistics computed again")
    other = "" if net.angles else f"{small}, where the paper has ResNet-18 on CIFAR-100"
    return [replace(claim, setting=world, caveat=claim.caveat or other) for claim in made]
# fmt: on


def pair_figure(rows: pd.DataFrame, world: str) -> Figure:
    """Draw the nearest, a middle and the farthest pair."""
    return layers_figure(farthest_pairs(judged(rows, world), [0, 0.5, 1]), "combination")


def feature_table(rows: pd.DataFrame, world: str) -> pd.DataFrame:
    return layer_table(select(rows, part="features", world=world), "statistics", "layer")


STUDY = Study(
    options=Options,
    systems=("L1", "L2", "L3", "L4", "L8", "L9"),
    measure=measure,
    claims=lambda options: [claim for name, world in options.worlds.items() for claim in claims_of(name, world)],
    tables=lambda options: {
        "Accuracy of each net on its own test, % (the first task is the pre-training's)": lambda rows: table(
            select(rows, part="accuracy"), ["world", "task"]
        ),
        **{f"{world}: means over pairs and α": partial(feature_table, world=world) for world in options.worlds},
    },
    figures=lambda options: {world: partial(pair_figure, world=world) for world in options.worlds},
)

STUDIES = {"linearity_pairs": STUDY, "fashion_pairs": STUDY}
