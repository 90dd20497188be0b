"""Study `linearity_why` (L19): do flatness and nearness predict how linear the loss is between two nets?

**Question.** Theorem 1 bounds δ = |L(½θ_i + ½θ_j) − ½L(θ_i) − ½L(θ_j)| by ⅛ λ_max ‖θ_i − θ_j‖² and a cubic rest,
with λ_max the largest eigenvalue of the loss's Hessian at the pre-trained θ_PT. How much of δ's variance does the
product explain, and how much each factor alone?

**Method.** An MLP is pre-trained on upright digits to five stages. From each, four nets are tuned on one turned task
with other rates: six pairs a stage. *near*: few small steps; *far*: more and larger ones, on a farther angle. Three
regressions with intercept over the pairs of all stages, R² by seed; beside them the second-order term itself, ⅛
dᵀHd. λ_max by Lanczos (SciPy) on Hessian-vector products; L over test examples of the tuned task, H over training
examples.

*The paper's own gap*: with one θ_PT, as its text has it, λ_max would be the same for all pairs, its R² undefined and
the product's equal to the distance's. There must have been several, which is what is done here. Margins are ours and
were written before the run; the paper's R² are .903 (product), .839 (distance), .782 (λ_max).

**Source.** Zhou et al. 2024, Cross-Task Linearity, Theorem 1, Section 5, B.2.
"""

from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.accuracy import losses
from mergeflow.linearity.affine import combine
from mergeflow.modality import Model, State
from studies.lab.linear_rows import by_seed
from studies.lab.nets import NetTask, Tasks, World, new_net, open_world
from studies.lab.tuning import drawn_weights, trained
from studies.old.claims import judge, paired
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import Finding, StudyResult, Table, with_interval
from studies.old.rows import Row
from studies.theory.linearity import hessian_product, top_eigenvalue
from tasks.plotting.drawing import dress, panels, series_style
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

PREDICTORS = {
    "product": "⅛ λ_max ‖θ_i − θ_j‖²",
    "distance": "‖θ_i − θ_j‖²",
    "flatness": "λ_max",
    "second_order": "⅛ dᵀHd",
}
LEAST = 0.6  # R² of the product


class Regime(Section):
    """How far nets are tuned. `task`: which of the world's. `rates`: one net each. `steps`: of SGD."""

    task: str
    rates: list[float] = Field(min_length=2)
    steps: int = Field(ge=1)


class Options(Section):
    """The study's choices. `stages`: steps of pre-training. `sample`: examples of the Hessian."""

    world: World
    stages: list[int] = Field(min_length=2)
    regimes: dict[str, Regime]
    sample: int = Field(1000, ge=32)
    seeds: list[int] = Field(min_length=1)


DECLARED = Declaration(Options, systems=("L19",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_why`."""
    options = DECLARED.chosen(io)
    tasks = Once(partial(open_world, options.world, io.root))
    pieces = kept_by_seed(io, options.seeds, partial(measure, options, tasks))
    rows = [row for piece in pieces for row in piece["rows"]]
    result = StudyResult(tables(rows), findings(rows), notes(rows), rows)
    result.write(io, {"regressions": regression_figure(rows)})


def measure(options: Options, opened: Tasks, seed: int) -> dict[str, list[Row]]:
    """Return one row for each regime, stage and pair.

    Args:
        options: the study's choices.
        opened: gives the world's tasks.
        seed: of weights and order.
    """
    tasks, world, rows = opened(), options.world, []
    model = new_net(world, tasks, seed)
    start, before = drawn_weights(model), 0
    for stage in sorted(options.stages):
        tuning = world.pretrain.model_copy(update={"steps": stage - before})
        start, before = trained(model, start, tasks[next(iter(tasks))].train, tuning, seed + stage), stage
        for name, regime in options.regimes.items():
            known = {"seed": seed, "regime": name, "stage": stage}
            rows += [{**known, **row} for row in pairs(model, start, tasks[regime.task], regime, options, seed)]
    return {"rows": rows}


def pairs(model: Model, start: State, task: NetTask, regime: Regime, options: Options, seed: int) -> list[Row]:
    """Return δ and its predictors for every pair of nets tuned from one checkpoint.

    Args:
        model: the network, whose weights are overwritten.
        start: the checkpoint's weights.
        task: the task that the nets are tuned on.
        regime: steps, and a learning rate for each net.
        options: the study's choices.
        seed: of the order, and of the search for the largest eigenvalue.
    """
    tuning = options.world.tune.model_copy(update={"steps": regime.steps})
    tuned = [
        trained(model, start, task.train, tuning.model_copy(update={"learning_rate": rate}), seed + n)
        for n, rate in enumerate(regime.rates)
    ]
    names = [name for name, _ in model.module.named_parameters()]

    def loss(state: State) -> float:
        model.load(state)
        return losses(model, {"own": task.test})["own"]

    single = [loss(state) for state in tuned]
    middles = {(i, j): loss(combine([tuned[i], tuned[j]], [0.5, 0.5])) for i, j in combinations(range(len(tuned)), 2)}
    model.load(start)
    sample = torch.arange(min(options.sample, len(task.train)))
    product = hessian_product(model.module, lambda: task.train.loss(model, sample))
    top = top_eigenvalue(product, sum(start[name].numel() for name in names), seed)
    rows = []
    for (i, j), middle in middles.items():
        apart = np.concatenate([(tuned[i][n] - tuned[j][n]).double().numpy().ravel() for n in names])
        distance = float(apart @ apart)
        rows.append(
            {
                "pair": f"{i} – {j}",
                "delta": abs(middle - single[i] / 2 - single[j] / 2),
                "flatness": top,
                "distance": distance,
                "product": top * distance / 8,
                "second_order": float(apart @ product(apart)) / 8,
            }
        )
    return rows


def correlation(rows: list[Row], predictor: str) -> float:
    """Return Pearson's r of δ with one predictor."""
    x, y = (np.array([row[key] for row in rows]) for key in (predictor, "delta"))
    return float(np.corrcoef(x, y)[0, 1])


def explained(rows: list[Row], predictor: str) -> float:
    """Return R² of a regression of δ on one predictor with intercept."""
    return correlation(rows, predictor) ** 2


def _explained(rows: list[Row], regime: str, predictor: str) -> np.ndarray:
    return np.array([explained(own, predictor) for own in by_seed(rows, regime=regime).values()])


def findings(rows: list[Row]) -> list[Finding]:
    """Hold what the paper says of the three predictors against the rows of each regime."""
    return [one for regime in dict.fromkeys(row["regime"] for row in rows) for one in _findings(rows, regime)]


def _findings(rows: list[Row], regime: str) -> list[Finding]:
    product, distance, flatness = (list(_explained(rows, regime, key)) for key in ("product", "distance", "flatness"))
    seeds = list(by_seed(rows, regime=regime).values())
    told = ", ".join(
        f"{name} {with_interval(own, 3)}"
        for name, own in (("of the product", product), ("of the distance", distance), ("of λ_max", flatness))
    )
    signed = {
        f"r with {name}": [correlation(own, key) for own in seeds]
        for name, key in (("λ_max", "flatness"), ("the distance", "distance"))
    }
    share = [float(np.mean([row["delta"] <= row["product"] for row in own])) for own in seeds]
    wide = [float(np.median([row["product"] / row["delta"] for row in own])) for own in seeds]
    return [
        judge(
            "L19",
            f"The product explains δ better than the distance alone and than λ_max alone: {regime} pairs.",
            {
                "R² less that of the distance": paired(product, distance),
                "less that of λ_max": paired(product, flatness),
            },
            "paired differences of R² above 0, over seeds",
            low=0,
            unit="",
            digits=3,
            beside=f"; R² {told}",
        ),
        judge(
            "L19",
            f"The distance explains δ better than λ_max: {regime} pairs.",
            {"difference of R²": paired(distance, flatness)},
            "paired difference of R² above 0, over seeds",
            low=0,
            unit="",
            digits=3,
            ours=True,
        ),
        judge(
            "L19",
            f"The product explains most of δ: {regime} pairs.",
            {"R²": product},
            f"R² ≥ {LEAST} (the paper: 0.903)",
            low=LEAST,
            unit="",
            digits=3,
        ),
        judge(
            "L19",
            f"Either a smaller λ_max or a smaller distance goes with a smaller δ: {regime} pairs.",
            signed,
            "Pearson's r above 0 for both",
            low=0,
            unit="",
            digits=2,
        ),
        judge(
            "L19",
            f"δ is within the bound without its rest: {regime} pairs.",
            {"share of the pairs": share},
            "share ≥ 0.95",
            low=0.95,
            unit="",
            digits=3,
            ours=True,
            beside=f"; the bound is {with_interval(wide, 0)} times δ in the median",
        ),
    ]


def tables(rows: list[Row]) -> list[Table]:
    """Return R² by regime and predictor, and what the stages are."""
    printed: dict[str, Any] = {"product": 0.903, "distance": 0.839, "flatness": 0.782}
    lines = [
        {
            "regime": regime,
            "predictor": text,
            "R²": with_interval(list(_explained(rows, regime, key)), 3),
            "paper": printed.get(key),
        }
        for regime in dict.fromkeys(row["regime"] for row in rows)
        for key, text in PREDICTORS.items()
    ]
    stages = []
    for regime, stage in dict.fromkeys((row["regime"], row["stage"]) for row in rows):
        seeds = by_seed(rows, regime=regime, stage=stage).values()
        means = {
            key: [float(np.mean([row[key] for row in own])) for own in seeds]
            for key in ("flatness", "distance", "delta")
        }
        stages.append(
            {
                "regime": regime,
                "steps of pre-training": stage,
                "λ_max": with_interval(means["flatness"], 1),
                "‖θ_i − θ_j‖²": with_interval(means["distance"], 4),
                "δ, nat": with_interval(means["delta"], 5),
            }
        )
    return [Table("Share of δ's variance explained by one predictor", lines), Table("Stages, means over pairs", stages)]


def notes(rows: list[Row]) -> list[str]:
    """Return what the range is in which it holds."""
    said = []
    for regime in dict.fromkeys(row["regime"] for row in rows):
        own = [row for row in rows if row["regime"] == regime]
        apart = [row["distance"] ** 0.5 for row in own]
        said.append(
            f"{regime}: ‖θ_i − θ_j‖ from {min(apart):.3f} to {max(apart):.3f}, "
            f"δ up to {max(row['delta'] for row in own):.4f} nat."
        )
    return said


def regression_figure(rows: list[Row]) -> Figure:
    """Draw δ over each predictor, one colour a regime."""
    figure, axes = panels(len(PREDICTORS), 2, 3.4)
    for panel, (key, text) in zip(axes, PREDICTORS.items(), strict=True):
        dress(panel, text, text, "δ, nat", grid="both")
        for number, regime in enumerate(dict.fromkeys(row["regime"] for row in rows)):
            own = [row for row in rows if row["regime"] == regime]
            style = series_style(number) | {"linestyle": "", "markersize": 3}
            panel.plot(
                [max(row[key], 1e-9) for row in own], [max(row["delta"], 1e-9) for row in own], label=regime, **style
            )
        panel.set(xscale="log", yscale="log")
    axes[0].legend(frameon=False)
    return figure
