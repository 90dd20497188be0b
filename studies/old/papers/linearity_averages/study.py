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

from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.accuracy import in_batches
from mergeflow.linearity.affine import Combination, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import Model, State
from studies.lab.linear_rows import (
    DIRECTION_RULE,
    LENGTH_RULE,
    by_seed,
    direction,
    length,
    mean_over,
    read_samples,
    rows_of,
    samples_file,
    write_samples,
)
from studies.lab.nets import NetTask, Tasks, World, new_net, open_world
from studies.lab.tuning import drawn_weights, trained
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import Finding, StudyResult, Table, with_interval
from studies.old.rows import Row, tidy
from studies.old.verdicts import within
from tasks.plotting.drawing import dress, panels, series_style
from tasks.plotting.linearity import linearity_figure
from tasks.plotting.palette import INK
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

CORRELATION, GAP = 0.7, 1.0  # Pearson's r; points between weights and logits


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


DECLARED = Declaration(Options, systems=("L6", "L7"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_averages`."""
    options = DECLARED.chosen(io)
    tasks = Once(partial(open_world, options.world, io.root))
    pieces = kept_by_seed(io, options.seeds, partial(measure, io, options, tasks))
    parts = {key: [row for piece in pieces for row in piece[key]] for key in ("features", "triples")}
    rows, triples = parts.values()
    found = read_samples(samples_file(io, options.seeds[0]))
    told = tidy({"part": part, **row} for part, own in parts.items() for row in own)
    result = StudyResult(tables(rows, triples), findings(rows, triples), [], told)
    folder = result.write(
        io, {"averages": linearity_figure(found), "triples": triples_figure(triples, options.seeds[0])}
    )
    write_samples(found, folder / "samples.parquet")


def measure(io: StageIO, options: Options, opened: Tasks, seed: int) -> dict[str, list[Row]]:
    """Return the rows of one seed: Eq. 1 by layer, and every triple.

    Args:
        io: the stage's files, where samples are kept.
        options: the study's choices.
        opened: gives the world's tasks.
        seed: of weights and order.
    """
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
    write_samples(found, samples_file(io, seed))
    return {"features": rows_of(found, seed=seed), "triples": triples(model, nets, task, seed)}


def triples(model: Model, nets: list[dict[str, Any]], task: NetTask, seed: int) -> list[Row]:
    """Return for every three nets the test accuracy, in %, of averaged weights and of averaged logits.

    Args:
        model: the network, whose weights are overwritten.
        nets: the weights of each.
        task: the task they were tuned on.
        seed: noted in the rows.
    """
    labels = task.test.labels
    outputs = [_logits(model, state, task) for state in nets]

    def accuracy(logits: torch.Tensor) -> float:
        return 100 * float((logits.argmax(1) == labels).double().mean())

    rows = []
    for chosen in combinations(range(len(nets)), 3):
        middle = combine([nets[one] for one in chosen], [1 / 3] * 3)
        mean = torch.stack([outputs[one] for one in chosen]).mean(0)
        weights = accuracy(_logits(model, middle, task))
        rows.append({"seed": seed, "nets": "-".join(map(str, chosen)), "weights": weights, "logits": accuracy(mean)})
    return rows


@torch.inference_mode()
def _logits(model: Model, state: State, task: NetTask) -> torch.Tensor:
    model.load(state)
    return torch.cat([task.test.logits(model, rows) for rows in in_batches(len(task.test), 1000)])


def _correlations(triples: list[Row]) -> list[float]:
    """Return Pearson's r over the triples of each seed; NaN where all triples are equally good."""
    with np.errstate(invalid="ignore"):
        return [
            float(np.corrcoef([r["weights"] for r in own], [r["logits"] for r in own])[0, 1])
            for own in by_seed(triples).values()
        ]


def findings(features: list[Row], triples: list[Row]) -> list[Finding]:
    """Hold the two statements against the rows.

    Args:
        features: Eq. 1 by layer, as of `measure`.
        triples: as of `triples`.
    """
    found = []
    for name in dict.fromkeys(row["combination"] for row in features):
        told, verdict = direction(features, combination=name)
        found.append(
            Finding(
                "L6",
                f"Features of averaged weights point where the averaged features do: {name}.",
                told,
                verdict,
                DIRECTION_RULE,
            )
        )
        told, verdict = length(features, combination=name)
        found.append(Finding("L6", f"They have their length too: {name}.", told, verdict, LENGTH_RULE))
    r = _correlations(triples)
    claim = "Accuracy of averaged weights goes with accuracy of averaged logits over all triples."
    found.append(
        Finding("L7", claim, f"r {with_interval(r, 2)}", within(r, low=CORRELATION), f"Pearson's r ≥ {CORRELATION}")
    )
    gaps = [abs(float(np.median([row["weights"] - row["logits"] for row in own]))) for own in by_seed(triples).values()]
    claim = "The two accuracies are the same."
    found.append(
        Finding(
            "L7",
            claim,
            f"median difference {with_interval(gaps, 2)} points",
            within(gaps, high=GAP),
            f"at most {GAP:g} point",
        )
    )
    return found


def tables(rows: list[Row], triples: list[Row]) -> list[Table]:
    """Return Eq. 1 by layer, and the triples of each seed."""
    lines = []
    for name, layer in dict.fromkeys((row["combination"], row["layer"]) for row in rows):
        wanted = {"combination": name, "layer": layer}
        cells = {
            label: with_interval(mean_over(rows, key, **wanted), 4)
            for label, key in (("1 − cos", "distance"), ("baseline", "base"), ("coef", "coef"))
        }
        lines.append({"average of": name, "layer": layer, **cells})
    seeds: list[Row] = []
    for (seed, own), r in zip(by_seed(triples).items(), _correlations(triples), strict=True):
        weights, logits = (np.array([row[key] for row in own]) for key in ("weights", "logits"))
        seeds.append(
            {
                "seed": seed,
                "triples": len(own),
                "weights, %": round(float(weights.mean()), 2),
                "logits, %": round(float(logits.mean()), 2),
                "r": round(r, 3),
                "slope": round(float(np.polyfit(logits, weights, 1)[0]), 2),
                "median difference": round(float(np.median(weights - logits)), 2),
            }
        )
    return [
        Table("Eq. 1: the averaged net against the average of features; the baseline is against each net", lines),
        Table("Triples", seeds),
    ]


def triples_figure(triples: list[Row], seed: int) -> Figure:
    """Draw one seed's triples on the line y = x."""
    own = [row for row in triples if row["seed"] == seed]
    figure, (panel,) = panels(1, 1, 4.6)
    dress(
        panel, "All triples, one seed", "accuracy of averaged weights, %", "accuracy of averaged logits, %", grid="both"
    )
    points = [(row["weights"], row["logits"]) for row in own]
    panel.plot(*zip(*points, strict=True), **series_style(0) | {"linestyle": "", "markersize": 3})
    low, high = min(map(min, points)), max(map(max, points))
    panel.plot([low, high], [low, high], color=INK, linewidth=0.8, linestyle="--")
    return figure
