"""Study `gradients` (G6): does the first epoch dominate fine-tuning, in length and in direction?

**Question.** Task arithmetic is one joint gradient step where task vectors are gradients at θ0. Over the epochs of
fine-tuning, is the first gradient the longest, and do the later ones keep its direction?

**Method.** For every run, task and epoch k, the share ‖g_k‖ / Σ_k' ‖g_k'‖ and cos(g_k, g_1), where g_k is

- *batches*: for the share the mean norm of the epoch's batch gradients, for the cosine the mean of these gradients;
- *all images*: the gradient over a fixed set of training images at the weights with which epoch k begins;
- *step*: what the epoch did, θ^(k) − θ^(k−1).

Of the task vectors τ_k = θ^(k) − θ0 after each epoch, the cosine with the whole one, and with the negative gradient
over the same images at θ0.

The paper prints neither optimiser nor rate of this experiment. How far an epoch goes decides what its gradients have in
common with the first, so the runs differ in just that: `paper` has AdamW at the relative step of a CLIP fine-tuned with
a rate of 1e-5, rate / root mean square of a weight, which is about 5e-4, our reading; the others are hotter, or plain
SGD. Of the cosines the mean over tasks is taken first, and then the smallest of the epochs. Beside them, as a check
that has no seeds, full-batch gradient descent from θ0 (*GD η*, one step an epoch): with small steps any smooth loss
keeps its gradient. A run may take the first few tasks and seeds alone; the raw rows say which. ± is over seeds: the
order of the batches.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Section 2.1, Figures 3a and 3b.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field, field_validator
from torch import Tensor

from mergeflow.analysis.geometry import norm
from mergeflow.modalities.classification import Subset
from mergeflow.training import FineTuneSettings, fine_tune
from studies.lab import Claim, Laboratory, Row, Section, Study, curves, per_seed, select, table
from studies.lab.claims import with_interval
from studies.lab.rows import Samples
from studies.theory.gradients import cosines_to_first, mean_gradient, shares

BATCHES, IMAGES, STEP, GD = "batches", "all images", "step", "GD"
PAPER = "paper"
EPOCHS = 5
HIGH = 0.8  # of a cosine; the paper's own number for gradients, and ours for task vectors, of which it prints none


class Options(Section):
    # words → run with `keep_epochs`; `paper` is the one at the paper's relative step
    runs: dict[str, str] = Field(min_length=1)
    images: int  # training images per task of a full gradient
    steps: list[float]  # η of gradient descent

    @field_validator("runs")
    @classmethod
    def _has_paper(cls, runs: dict[str, str]) -> dict[str, str]:
        if PAPER not in runs:
            raise ValueError(f"one of the runs must be named {PAPER}, found {', '.join(runs)}")
        return runs


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield one row for each run, seed, task, kind of gradient and epoch."""
    measures = {
        f"{label}_{task}_{seed}": partial(measure_run, lab, options, label, task, seed)
        for label, name in options.runs.items()
        for task in lab.run(name).tuned
        for seed in lab.run(name).seeds
    }
    tasks = lab.run(options.runs[PAPER]).tuned
    measures |= {f"{task}_descent": partial(measure_descents, lab, task, options) for task in tasks}
    yield from lab.cached(measures, "tasks")


def measure_run(lab: Laboratory, options: Options, label: str, task: str, seed: int) -> Iterator[Row]:
    """Yield a run's records of its batches, its steps, and the gradients over the same images."""
    source, base, data = lab.run(options.runs[label]), lab.base, _subset(lab, task, options.images)
    epochs = source.training(seed, task)["epochs"]
    states = [base, *(source.epoch(seed, task, row["epoch"]) for row in epochs)]
    moves = [{n: after[n] - before[n] for n in base} for before, after in pairwise(states)]
    gradients = []
    for state in states[:-1]:
        lab.model.load(state)
        gradients.append(mean_gradient(lab.model, data))
    about = {"seed": seed, "run": label, "task": task, "moved": epochs[0]["distance"]}
    recorded = [row["gradient_norm"] for row in epochs], [row["cosine_to_first"] for row in epochs]
    yield from epoch_rows(*recorded, **about, kind=BATCHES)
    yield from epoch_rows([norm(gradient) for gradient in gradients], cosines_to_first(gradients), **about, kind=IMAGES)
    steps = epoch_rows([norm(move) for move in moves], cosines_to_first(moves), **about, kind=STEP)
    for row, whole, descent in zip(steps, *vector_cosines(base, states[1:], gradients[0]), strict=True):
        yield {**row, "whole": whole, "descent": descent}


def vector_cosines(
    base: Mapping[str, Tensor], states: Sequence[Mapping[str, Tensor]], gradient: Mapping[str, Tensor]
) -> tuple[list[float], list[float]]:
    """Return cos(τ_k, τ_K) and cos(τ_k, −∇L(θ0)) of τ_k = θ^(k) − θ0 for every epoch k."""
    vectors = [{name: state[name] - tensor for name, tensor in base.items()} for state in states]
    downhill = {name: -value for name, value in gradient.items()}
    shared = ({name: vector[name] for name in downhill} for vector in vectors)
    return cosines_to_first([vectors[-1], *vectors])[1:], cosines_to_first([downhill, *shared])[1:]


def measure_descents(lab: Laboratory, task: str, options: Options) -> Iterator[Row]:
    """Yield gradient descent's gradients for every η, over as many steps as the run `paper` has epochs."""
    data, seed = _subset(lab, task, options.images), lab.seeds[0]
    count = len(lab.run(options.runs[PAPER]).training(seed, task)["epochs"])
    for step in options.steps:
        lab.model.load(lab.base)
        settings = FineTuneSettings.model_validate(
            {"regime": "full_batch_gd", "epochs": count, "learning_rate": step, "batch_size": 256}
        )
        saved = lab.io.scratch / f"{task}_descent.pt"
        epochs = fine_tune(lab.model, [data], settings, seed, saved, lambda: 0.0).trajectory.as_json()
        norms, cosines = ([row[key] for row in epochs] for key in ("gradient_norm", "cosine_to_first"))
        about = {"seed": seed, "run": GD, "task": task, "kind": f"{GD} {step:g}", "moved": epochs[0]["distance"]}
        yield from epoch_rows(norms, cosines, **about)


def epoch_rows(norms: Sequence[float], cosines: Sequence[float], **about: object) -> list[Row]:
    """Return a row for each epoch; `moved` is the distance from θ0 after the first."""
    values = enumerate(zip(shares(norms), cosines, strict=True), start=1)
    return [{**about, "epoch": epoch, "share": share, "cosine": cosine} for epoch, (share, cosine) in values]


def _subset(lab: Laboratory, task: str, images: int) -> Subset:
    """Return evenly spaced training images of a task."""
    data = lab.examples("train")[task]
    return Subset(data, torch.linspace(0, len(data) - 1, min(images, len(data))).long())


# What the rows are asked


def over(rows: pd.DataFrame, run: str, kind: str, value: str) -> pd.DataFrame:
    """Return the mean over tasks of one value: epoch × seed."""
    return per_seed(rows, "epoch", value=value, run=run, kind=kind)


def lead_of_first(rows: pd.DataFrame, run: str) -> Samples:
    """Return the first epoch's share less the largest later one, the mean over tasks."""
    leads = {}
    for kind in (BATCHES, IMAGES):
        shares = select(rows, run=run, kind=kind)
        wide = shares.pivot(index=["seed", "task"], columns="epoch", values="share")
        leads[kind] = (wide[1] - wide.drop(columns=1).max(axis=1)).groupby("seed").mean()
    return leads


def lowest_cosine(rows: pd.DataFrame, run: str) -> Samples:
    """Return the smallest mean cosine over tasks of the first epochs."""
    return {kind: over(rows, run, kind, "cosine").loc[:EPOCHS].min() for kind in (BATCHES, IMAGES, STEP)}


def orthogonal(rows: pd.DataFrame, run: str) -> pd.Series:
    """Return cos(τ_1, τ_K) of epochs as long as these and orthogonal to each other: ‖δ_1‖ / √Σ_k ‖δ_k‖²."""
    wide = select(rows, run=run, kind=STEP).pivot(index=["seed", "task"], columns="epoch", values="share")
    return (wide[1] / (wide**2).sum(axis=1) ** 0.5).groupby("seed").mean()


def first_less_last(rows: pd.DataFrame, run: str) -> Samples:
    descent = over(rows, run, STEP, "descent")
    return {"cosine with −∇L(θ0), first less last": descent.iloc[0] - descent.iloc[-1]}


# fmt: off
def claims_of(run: str) -> list[Claim]:
    """Return the paper's statements for one run; another rate than the paper's is an addition of ours."""
    ours, at_run = run != PAPER, partial(over, run=run, kind=STEP)
    made = [
        Claim("G6", "The first epoch has the largest share of the gradient norms.",
              partial(lead_of_first, run=run), low=0, unit="", digits=2, ours=ours,
              of="share of the first epoch less the largest later one, mean over tasks,"),
        Claim("G6",
              f"Gradients of the first {EPOCHS} epochs keep a cosine above {HIGH} with the first epoch's.",
              partial(lowest_cosine, run=run), low=HIGH, unit="", digits=2, ours=ours,
              of=f"smallest mean cosine over tasks of the first {EPOCHS} epochs, by every reading of the gradient,",
              paper=f"above {HIGH}", caveat="four of eight tasks; nearer to the base it holds (GD at .001 keeps .91)"),
        Claim("G6", "Fully trained and first-epoch task vectors are aligned.",
              lambda rows: {"cosine": at_run(rows, value="whole").iloc[0]}, low=HIGH, unit="", digits=2, ours=ours,
              of="cosine, mean over tasks,", paper=f"above {HIGH} for gradients"),
        Claim("G6", "They are more aligned than they would be if every later epoch had gone off at right angles.",
              lambda rows: {"cosine less that of orthogonal epochs":
                            at_run(rows, value="whole").iloc[0] - orthogonal(rows, run)},
              low=0, unit="", digits=3, ours=True, of="paired difference, mean over tasks, epochs of the same lengths,",
              also=lambda rows: f"; orthogonal epochs give {with_interval(orthogonal(rows, run), 3)}"),
        Claim("G6", "First-epoch task vectors are closer to the task's gradient than fully trained ones.",
              partial(first_less_last, run=run), low=0, unit="", digits=3, ours=ours,
              of="paired difference, mean over tasks,"),
    ]
    return [replace(claim, setting=f"run {run}") for claim in made]
# fmt: on


def task_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return, per task of the run `paper`, the first epoch's share and the lowest cosine of the first five epochs."""
    first_rows = select(rows, run=PAPER, kind=[BATCHES, IMAGES])
    first, early = select(first_rows, epoch=1), first_rows[first_rows.epoch <= EPOCHS]
    lowest = early.groupby(["task", "kind", "seed"], sort=False).cosine.min().reset_index()
    parts = [
        table(first, "task", "kind", value="share", digits=2).add_prefix("first share, "),
        table(lowest, "task", "kind", value="cosine", digits=2).add_prefix("lowest cosine, "),
    ]
    return pd.concat(parts, axis=1)


def vector_table(rows: pd.DataFrame) -> pd.DataFrame:
    vectors = select(rows, kind=STEP).rename(columns={"whole": "with the whole one", "descent": "with −∇L(θ0)"})
    long = vectors.melt(["run", "seed", "epoch", "task"], ["with the whole one", "with −∇L(θ0)"], "vector", "of")
    return table(long, ["run", "vector"], "epoch", value="of", digits=2)


def epoch_figure(value: str, title: str, rows: pd.DataFrame) -> Figure:
    """Draw each epoch's share of the gradient norms, or its cosine with the first, means over tasks."""
    by_line = rows.assign(line=rows.run + ", " + rows.kind)
    return curves(by_line, "epoch", "line", value, title=title, x_label="epoch", y_label=value, height=4.4)


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    parts = []
    for (run, kind), group in rows.groupby(["run", "kind"], sort=False):
        if run == GD or kind == IMAGES:
            label = f"{kind if run == GD else f'{run}, {kind}'}, {group.task.nunique()} tasks"
            moved, second = group.groupby("seed").moved.mean(), select(group, epoch=2).groupby("seed").cosine.mean()
            parts.append(
                f"{label}: moved {with_interval(moved, 3)}, cosine of the second gradient {with_interval(second, 2)}"
            )
    return [f"The distance of one epoch and the direction that is left, means over tasks: {'; '.join(parts)}."]


STUDY = Study(
    options=Options,
    runs=lambda options: options.runs.values(),
    splits=("train",),
    systems=("G6",),
    measure=measure,
    claims=lambda options: [claim for run in options.runs for claim in claims_of(run)],
    tables={
        "Cosine of the task vector after each epoch: mean over tasks": vector_table,
        f"Per task, run {PAPER}": task_table,
    },
    figures={
        "shares": partial(epoch_figure, "share", "Share of the gradient norms"),
        "cosines": partial(epoch_figure, "cosine", "Cosine with the first epoch's"),
    },
    notes=notes,
)
