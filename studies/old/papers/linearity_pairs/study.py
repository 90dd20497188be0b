"""Study `linearity_pairs` (L1–L4, L8, L9): are features of averaged weights the averaged features?

**Question.** Two nets are tuned from one pre-trained net on different tasks. Is the feature of their averaged
weights, at every layer, the average of their features, in direction (LLFC) and in length too (CTL)? And does the
loss between them stay flat (LMC)?

**Method.** *digits*: an MLP is pre-trained on upright digits and tuned on digits turned by four angles. *splits*: a
residual net is pre-trained on five classes and tuned on others. For all six pairs, every layer, α ∈ {¼, ½, ¾} and the
test examples of both tasks, with f the feature of αθ_i + (1 − α)θ_j and g = αf(θ_i) + (1 − α)f(θ_j):

    1 − cos(f, g) beside 1 − cos(f(θ_i), f(θ_j)), and coef = ⟨f, g⟩ / ‖g‖².

*Baseline*: a small 1 − cos says nothing where the two nets' features are the same anyway. *BatchNorm* of the averaged
net: running statistics averaged like weights, and those of all nets computed again, on training pictures of both
tasks. *LMC*: loss at eleven α on D_i, D_j and D_PT; it holds where the ends differ by at most 0.1 nat and the
barrier max_α L(θ_α) − [αL(θ_i) + (1 − α)L(θ_j)] is at most 0.1 nat. *Lemma 2*: m = 2, 3, 4 nets, uniform weights,
(.1, .2, .3, .4) and five draws from the simplex. *Lemma 1*: the share of (pair, α, D) whose loss is at most 0.02 nat
above the chord.

The paper prints no thresholds; all margins are ours and were written before the run. Its "20 000 test samples" of a
class split cannot be: two splits of CIFAR-100 have 1 000.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Sections 3 and 4.1, Lemmas 1 and 2, B.1.1.
"""

from functools import partial
from itertools import combinations

import numpy as np
from pydantic import Field
from torch import Tensor

from mergeflow.evaluation.accuracy import accuracies
from mergeflow.linearity.affine import Combination, Linearity, affine, combine
from mergeflow.linearity.layers import find_layers
from studies.lab.linear_rows import path_rows, read_samples, rows_of, samples_file, write_samples
from studies.lab.nets import Tasks, Trained, World, has_statistics, open_world, train_world, with_statistics
from studies.old.papers.linearity_pairs.results import findings, notes, tables
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row, tidy
from tasks.plotting.linearity import linearity_figure
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

ALPHAS = (0.25, 0.5, 0.75)


class Options(Section):
    """The study's choices. `worlds`: by name. `seeds`: of weights and of the order of examples."""

    worlds: dict[str, World] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


DECLARED = Declaration(Options, systems=("L1", "L2", "L3", "L4", "L8", "L9"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_pairs`."""
    options = DECLARED.chosen(io)
    pieces = []
    for name, world in options.worlds.items():
        tasks = Once(partial(open_world, world, io.root))
        pieces += kept_by_seed(io, options.seeds, partial(measure, io, name, world, tasks), name)
    rows = {key: [row for piece in pieces for row in piece[key]] for key in pieces[0]}
    told = tidy({"part": part, **row} for part, own in rows.items() for row in own)
    result = StudyResult(tables(rows), findings(rows), notes(rows), told)
    shown = {name: read_samples(samples_file(io, f"{name}_{options.seeds[0]}")) for name in options.worlds}
    folder = result.write(io, {name: linearity_figure(_some(found)) for name, found in shown.items()})
    for name, found in shown.items():
        write_samples(found, folder / f"samples_{name}.parquet")


def measure(io: StageIO, name: str, world: World, opened: Tasks, seed: int) -> dict[str, list[Row]]:
    """Return the rows of one world and seed: `features`, `simplex`, `paths`, `accuracy`.

    Args:
        io: the stage's files, where samples are kept.
        name: the world's.
        world: its source, net and settings.
        opened: gives the world's tasks.
        seed: of weights and order.
    """
    tasks = opened()
    done = train_world(world, tasks, seed)
    known = {"world": name, "seed": seed}
    test = {task: one.test for task, one in tasks.items()}
    accuracy = []
    for task, state in {done.first: done.start, **done.tuned}.items():
        done.model.load(state)
        own = accuracies(done.model, {task: test[task]})[task]
        accuracy.append({**known, "task": task, "accuracy": 100 * own})
    layers = [*find_layers(done.model.module), ""]
    features = []
    for mode in ("interpolated", "recomputed") if has_statistics(done.model) else ("none",):
        found = pairs(done, layers, mode)
        for alpha in ALPHAS:
            at = {key: value for key, value in found.items() if key.endswith(f"@{alpha:g}")}
            features += rows_of(at, **known, statistics=mode, alpha=alpha)
        if mode != "interpolated":
            middle = {key.partition("@")[0]: value for key, value in found.items() if key.endswith("@0.5")}
            write_samples(middle, samples_file(io, f"{name}_{seed}"))
    eleven = [round(0.1 * step, 1) for step in range(11)]
    paths = [
        row
        for i, j in combinations(done.tuned, 2)
        for row in path_rows(
            done.model,
            done.tuned[i],
            done.tuned[j],
            {d: test[d] for d in (i, j, done.first)},
            eleven,
            **known,
            pair=f"{i} – {j}",
        )
    ]
    return {
        "features": _named(features),
        "simplex": simplex(done, layers[:-1], seed, known),
        "paths": paths,
        "accuracy": accuracy,
    }


def pairs(done: Trained, layers: list[str], mode: str) -> dict[str, dict[str, Linearity]]:
    """Compare all pairs at all α; names are `i – j@α`.

    Args:
        done: the nets of one world and seed.
        layers: to compare features at.
        mode: "recomputed" computes BatchNorm's statistics again for every net and average; "interpolated" and "none" do
            not.
    """
    sources = {task: one.test for task, one in done.tasks.items() if task in done.tuned}
    ends = own_statistics(done) if mode == "recomputed" else done.tuned
    asked = {}
    for i, j in combinations(done.tuned, 2):
        for alpha in ALPHAS:
            state = None
            if mode == "recomputed":
                middle = combine([done.tuned[i], done.tuned[j]], [alpha, 1 - alpha])
                state = with_statistics(done.model, middle, [done.tasks[i].train, done.tasks[j].train])
            weights = {i: alpha, j: 1 - alpha}
            asked[f"{i} – {j}@{alpha:g}"] = Combination(weights, state, on=frozenset({i, j}))
    return affine(done.model, sources, ends, asked, layers, batch_size=500)


def own_statistics(done: Trained) -> dict[str, dict[str, Tensor]]:
    """Return the tuned nets with BatchNorm statistics computed again on their own training pictures."""
    return {task: with_statistics(done.model, state, [done.tasks[task].train]) for task, state in done.tuned.items()}


def simplex(done: Trained, layers: list[str], seed: int, known: Row) -> list[Row]:
    """Return rows of m nets with weights of the simplex, on the tests of all of them.

    Args:
        done: the nets of one world and seed.
        layers: to compare features at.
        seed: of the random weights on the simplex.
        known: what else is in every row.
    """
    names = list(done.tuned)
    drawn = np.random.default_rng(seed).dirichlet(np.ones(len(names)), size=5)
    weights = {f"uniform {m}": [1 / m] * m for m in range(2, len(names) + 1)}
    rising = np.arange(1, len(names) + 1) / np.arange(1, len(names) + 1).sum()
    weights |= {"rising": rising.tolist(), **{f"drawn {n}": row.tolist() for n, row in enumerate(drawn, start=1)}}
    asked = {}
    for name, values in weights.items():
        chosen = dict(zip(names, values, strict=False))
        state = None
        if has_statistics(done.model):
            middle = combine([done.tuned[task] for task in chosen], list(chosen.values()))
            state = with_statistics(done.model, middle, [done.tasks[task].train for task in chosen])
        asked[name] = Combination(chosen, state, on=frozenset(chosen))
    sources = {task: done.tasks[task].test for task in names}
    ends = own_statistics(done) if has_statistics(done.model) else done.tuned
    rows = rows_of(affine(done.model, sources, ends, asked, layers, batch_size=500), **known)
    return [{**row, "models": len(asked[row["combination"]].weights)} for row in rows]


def _named(rows: list[Row]) -> list[Row]:
    """Return rows with the pair's name alone, and the logits by that name."""
    return [
        {**row, "combination": row["combination"].partition("@")[0], "layer": row["layer"] or "logits"} for row in rows
    ]


def _some(found: dict[str, dict[str, Linearity]]) -> dict[str, dict[str, Linearity]]:
    """Return the nearest, a middle and the farthest pair, by the baseline of the last hidden layer, without logits."""
    last = [layer for layer in next(iter(found.values())) if layer][-1]
    ranked = sorted(found, key=lambda pair: float(found[pair][last].base.mean()))
    return {
        pair: {layer: one for layer, one in found[pair].items() if layer}
        for pair in dict.fromkeys((ranked[0], ranked[len(ranked) // 2], ranked[-1]))
    }
