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

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from pydantic import Field, field_validator

from mergeflow.analysis.geometry import norm
from mergeflow.modalities.subset import Subset
from mergeflow.training import FineTuneSettings, fine_tune
from studies.lab.inputs import Laboratory
from studies.old.claims import judge
from studies.old.papers.gradients.figures import gradient_figure
from studies.old.papers.gradients.vectors import (
    COSINES,
    HIGH,
    STEP,
    over_tasks,
    vector_cosines,
    vector_findings,
    vector_table,
)
from studies.old.pieces import kept_all
from studies.old.results import Cell, Finding, StudyResult, Table, with_interval
from studies.old.rows import Row, by_seed, tidy
from studies.theory.gradients import cosines_to_first, mean_gradient, shares
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

BATCHES, IMAGES, GD = "batches", "all images", "GD"
PAPER = "paper"
EPOCHS = 5


class Options(Section):
    """The study's choices.

    runs: words → run with `keep_epochs`; `paper` is the one at the paper's relative step. images: training images per
    task of a full gradient. steps: η of gradient descent.
    """

    runs: dict[str, str] = Field(min_length=1)
    images: int
    steps: list[float]

    @field_validator("runs")
    @classmethod
    def _has_paper(cls, runs: dict[str, str]) -> dict[str, str]:
        if PAPER not in runs:
            raise ValueError(f"one of the runs must be named {PAPER}, found {', '.join(runs)}")
        return runs


DECLARED = Declaration(Options, runs=lambda options: options.runs.values(), splits=("train",), systems=("G6",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/gradients`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    measures = {
        f"{label}_{task}_{seed}": partial(_measure, inputs, options, label, task, seed)
        for label, name in options.runs.items()
        for task in inputs.run(name).tuned
        for seed in inputs.run(name).seeds
    }
    tasks = inputs.run(options.runs[PAPER]).tuned
    measures |= {f"{task}_descent": partial(_descents, inputs, task, options) for task in tasks}
    rows = [row for one in kept_all(io, measures, "tasks") for row in one["rows"]]
    result = StudyResult(
        [epoch_table("share", rows), epoch_table("cosine", rows), vector_table(rows), task_table(rows)],
        [finding for label in options.runs for finding in findings(rows, label)],
        notes(rows),
        tidy_rows(rows),
    )
    result.write(io, {"epochs": gradient_figure(rows)})


def _measure(inputs: Laboratory, options: Options, label: str, task: str, seed: int) -> Row:
    """Return what a run recorded of its batches, its steps, and the gradients over the same images."""
    source, base, data = inputs.run(options.runs[label]), inputs.base, _subset(inputs, task, options.images)
    epochs = source.training(seed, task)["epochs"]
    states = [base, *(source.epoch(seed, task, row["epoch"]) for row in epochs)]
    moves = [{n: after[n] - before[n] for n in base} for before, after in pairwise(states)]
    gradients = []
    for state in states[:-1]:
        inputs.model.load(state)
        gradients.append(mean_gradient(inputs.model, data))
    found = {
        BATCHES: ([row["gradient_norm"] for row in epochs], [row["cosine_to_first"] for row in epochs]),
        IMAGES: ([norm(one) for one in gradients], cosines_to_first(gradients)),
        STEP: ([norm(move) for move in moves], cosines_to_first(moves)),
    }
    moved = epochs[0]["distance"]
    rows = {kind: _row(label, task, seed, kind, moved, *curves) for kind, curves in found.items()}
    rows[STEP] |= vector_cosines(base, states[1:], gradients[0])
    return {"rows": list(rows.values())}


def _descents(inputs: Laboratory, task: str, options: Options) -> Row:
    """Return gradient descent's gradients for every η, over as many steps as the run `paper` has epochs."""
    data, seed = _subset(inputs, task, options.images), inputs.seeds[0]
    count = len(inputs.run(options.runs[PAPER]).training(seed, task)["epochs"])
    rows = []
    for step in options.steps:
        inputs.model.load(inputs.base)
        settings = FineTuneSettings.model_validate(
            {"regime": "full_batch_gd", "epochs": count, "learning_rate": step, "batch_size": 256}
        )
        saved = inputs.io.scratch / f"{task}_descent.pt"
        epochs = fine_tune(inputs.model, [data], settings, seed, saved, lambda: 0.0).trajectory.as_json()
        norms, cosines = ([row[key] for row in epochs] for key in ("gradient_norm", "cosine_to_first"))
        rows.append(_row(GD, task, seed, f"{GD} {step:g}", epochs[0]["distance"], norms, cosines))
    return {"rows": rows}


def _row(run: str, task: str, seed: int, kind: str, moved: float, norms: list[float], cosines: list[float]) -> Row:
    """Return a row; `moved` is the distance from θ0 after the first epoch."""
    told = {"run": run, "task": task, "seed": seed, "kind": kind, "moved": moved}
    return {**told, "share": shares(norms), "cosine": cosines}


def _subset(inputs: Laboratory, task: str, images: int) -> Subset:
    """Return evenly spaced training images of a task."""
    data = inputs.examples("train")[task]
    return Subset(data, torch.linspace(0, len(data) - 1, min(images, len(data))).long())


def tidy_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return one row for each run, seed, task, kind of gradient and epoch; of `step` with the task vector's cosines."""
    settings, curves = ("seed", "run", "task", "kind", "moved"), ("share", "cosine", *COSINES)
    return tidy(
        {
            **{key: row[key] for key in settings},
            "epoch": epoch + 1,
            **{key: row[key][epoch] for key in curves if key in row},
        }
        for row in rows
        for epoch in range(len(row["share"]))
    )


def epoch_table(what: str, rows: Sequence[Row]) -> Table:
    """Return shares or cosines over the epochs, the mean over tasks with its interval over seeds."""

    def line(run: str, kind: str) -> dict[str, Cell]:
        own = [row for row in rows if (row["run"], row["kind"]) == (run, kind)]
        cells: dict[str, Cell] = {"run": run, "gradient": kind}
        for index in range(len(own[0][what])):
            cells[f"epoch {index + 1}"] = with_interval(over_tasks(own, what, index), 2)
        if what == "cosine":
            cells["moved in epoch 1"] = f"{fmean(row['moved'] for row in own):.3f}"
        return cells

    titles = {
        "share": "Share of each epoch in the sum of the norms",
        "cosine": "Cosine with the first epoch's gradient, and ‖θ − θ0‖ after it",
    }
    cells = dict.fromkeys((row["run"], row["kind"]) for row in rows)
    return Table(f"{titles[what]}: mean over tasks", [line(*cell) for cell in cells])


def task_table(rows: Sequence[Row]) -> Table:
    """Return, per task of the run `paper`, the first epoch's share and the lowest cosine of the first five epochs."""
    own = [row for row in rows if row["run"] == PAPER]
    lines: list[dict[str, Cell]] = []
    for task in dict.fromkeys(row["task"] for row in own):
        line: dict[str, Cell] = {"task": task}
        for kind in (BATCHES, IMAGES):
            found = [row for row in own if (row["task"], row["kind"]) == (task, kind)]
            line[f"first share, {kind}"] = with_interval([row["share"][0] for row in found], 2)
            line[f"lowest cosine, {kind}"] = with_interval([min(row["cosine"][:EPOCHS]) for row in found], 2)
        lines.append(line)
    return Table(f"Per task, run {PAPER}", lines)


def findings(rows: Sequence[Row], run: str) -> list[Finding]:
    """Hold the paper's statements against one run; another rate than the paper's is an addition of ours."""
    own = {kind: [r for r in rows if (r["run"], r["kind"]) == (run, kind)] for kind in (BATCHES, IMAGES)}
    return [
        judge(
            "G6",
            f"The first epoch has the largest share of the gradient norms: run {run}.",
            {kind: by_seed(found, _lead_of_the_first) for kind, found in own.items()},
            "share of the first epoch less the largest later one ≥ 0, mean over tasks",
            low=0,
            unit="",
            digits=2,
            ours=run != PAPER,
        ),
        judge(
            "G6",
            f"Gradients of the first {EPOCHS} epochs keep a cosine above {HIGH} with the first epoch's: run {run}.",
            {kind: _lowest(found) for kind, found in own.items()},
            f"smallest cosine of the first {EPOCHS} epochs ≥ {HIGH}, mean over tasks (the paper's own number)",
            low=HIGH,
            unit="",
            digits=2,
            ours=run != PAPER,
        ),
        *vector_findings(rows, run, ours=run != PAPER),
    ]


def _lead_of_the_first(rows: Sequence[Row]) -> float:
    """Return the first epoch's share less the largest later one, the mean over tasks."""
    return fmean(row["share"][0] - max(row["share"][1:]) for row in rows)


def _lowest(rows: Sequence[Row]) -> list[float]:
    """Return the smallest mean cosine over tasks of the first epochs, one value per seed."""
    count = min(EPOCHS, len(rows[0]["cosine"]))
    courses = [over_tasks(rows, "cosine", epoch) for epoch in range(count)]
    return [min(course) for course in zip(*courses, strict=True)]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return how far each run goes in its first epoch beside what its gradients keep."""
    parts = []
    for run, kind in dict.fromkeys((row["run"], row["kind"]) for row in rows):
        if run == GD or kind == IMAGES:
            own = [row for row in rows if (row["run"], row["kind"]) == (run, kind)]
            moved = by_seed(own, lambda one: fmean(row["moved"] for row in one))
            second = by_seed(own, lambda one: fmean(row["cosine"][1] for row in one))
            label = f"{kind if run == GD else f'{run}, {kind}'}, {len({row['task'] for row in own})} tasks"
            parts.append(
                f"{label}: moved {with_interval(moved, 3)}, cosine of the second gradient {with_interval(second, 2)}"
            )
    return [f"The distance of one epoch and the direction that is left, means over tasks: {'; '.join(parts)}."]
