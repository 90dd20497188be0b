"""Study `gradients` (G6): does the first epoch dominate fine-tuning, in length and in direction?

**Question.** Task arithmetic is one joint gradient step where task vectors are gradients at θ0. Over the epochs of
fine-tuning, is the first gradient the longest, and do the later ones keep its direction?

**Method.** For every task and epoch k, the share ‖g_k‖ / Σ_k' ‖g_k'‖ and cos(g_k, g_1), where g_k is

- *batches*: of the run `converged` (AdamW), for the share the mean norm of the epoch's batch gradients, for the cosine
  the mean of these gradients;
- *all images*: the gradient over a fixed set of training images at the weights with which epoch k begins;
- *step*: what the epoch did, θ^(k) − θ^(k−1);
- *GD η*: the same gradient along full-batch gradient descent from θ0 with step η, one step an epoch: the setting of the
  theory.

**Source.** Zhou et al. 2025, On Task Vectors and Gradients, Section 2.1, Figures 3a and 3b.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean

import torch

from mergeflow import layout
from mergeflow.analysis.geometry import norm
from mergeflow.analysis.gradients import cosines_to_first, mean_gradient, shares
from mergeflow.modalities.subset import Subset
from mergeflow.training import FineTuneSettings, fine_tune
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO
from tasks.studies.inputs import StudyInputs
from tasks.studies.papers.gradients.figures import gradient_figure
from tasks.studies.pieces import Row, kept
from tasks.studies.results import Cell, Finding, StudyResult, Table, with_interval

STUDY = "gradients"
BATCHES, IMAGES, STEP = "batches", "all images", "step"


class Options(Section):
    """The study's choices. `images`: training images per task of a full gradient. `steps`: η of gradient descent."""

    images: int
    steps: list[float]


DECLARED = Declaration(Options, runs=lambda options: ["converged"], splits=("train",), systems=("G6",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/gradients`."""
    inputs = StudyInputs(io)
    options = Options.model_validate(inputs.options(STUDY))
    rows: list[Row] = []
    for done, task in enumerate(inputs.tasks):
        io.report("tasks", done, len(inputs.tasks))
        for seed in inputs.seeds:
            rows += kept(io, f"{task}_{seed}", partial(_recorded, inputs, task, seed))["rows"]
        rows += kept(io, f"{task}_images", partial(_at_epochs, inputs, task, options.images))["rows"]
        rows += kept(io, f"{task}_descent", partial(_descents, inputs, task, options))["rows"]
    result = StudyResult(
        [epoch_table("share", rows), epoch_table("cosine", rows), task_table(rows)], findings(rows), notes(rows)
    )
    result.write(io.out(layout.study(STUDY)), {"epochs": gradient_figure(rows)})


def _recorded(inputs: StudyInputs, task: str, seed: int) -> Row:
    """Return what `converged` recorded of its batches, and its steps from epoch to epoch."""
    source, base = inputs.run("converged"), inputs.base
    epochs = source.training(seed, task)["epochs"]
    states = [base, *(source.epoch(seed, task, row["epoch"]) for row in epochs)]
    moves = [{n: after[n] - before[n] for n in base} for before, after in pairwise(states)]
    batches = {
        "norms": [row["gradient_norm"] for row in epochs],
        "cosines": [row["cosine_to_first"] for row in epochs],
    }
    steps = {"norms": [norm(move) for move in moves], "cosines": cosines_to_first(moves)}
    moved = epochs[0]["distance"]
    return {"rows": [_row(task, seed, BATCHES, moved, **batches), _row(task, seed, STEP, moved, **steps)]}


def _at_epochs(inputs: StudyInputs, task: str, images: int) -> Row:
    """Return the gradient over the same images where each epoch of `converged` begins, for the first seed."""
    source, seed, data = inputs.run("converged"), inputs.seeds[0], _subset(inputs, task, images)
    epochs = source.training(seed, task)["epochs"]
    gradients = []
    for number in range(len(epochs)):
        inputs.model.load(source.epoch(seed, task, number) if number else inputs.base)
        gradients.append(mean_gradient(inputs.model, data))
    norms, cosines = [norm(gradient) for gradient in gradients], cosines_to_first(gradients)
    return {"rows": [_row(task, seed, IMAGES, epochs[0]["distance"], norms, cosines)]}


def _descents(inputs: StudyInputs, task: str, options: Options) -> Row:
    """Return gradient descent's gradients for every η, over as many steps as `converged` has epochs."""
    data, seed = _subset(inputs, task, options.images), inputs.seeds[0]
    count = len(inputs.run("converged").training(seed, task)["epochs"])
    rows = []
    for step in options.steps:
        inputs.model.load(inputs.base)
        settings = FineTuneSettings.model_validate(
            {"regime": "full_batch_gd", "epochs": count, "learning_rate": step, "batch_size": 256}
        )
        saved = inputs.io.scratch / "descent.pt"
        epochs = fine_tune(inputs.model, [data], settings, seed, saved, lambda: 0.0).trajectory.as_json()
        norms, cosines = ([row[key] for row in epochs] for key in ("gradient_norm", "cosine_to_first"))
        rows.append(_row(task, seed, f"GD {step:g}", epochs[0]["distance"], norms, cosines))
    return {"rows": rows}


def _row(task: str, seed: int, kind: str, moved: float, norms: list[float], cosines: list[float]) -> Row:
    """Return a row; `moved` is the distance from θ0 after the first epoch."""
    return {"task": task, "seed": seed, "kind": kind, "moved": moved, "share": shares(norms), "cosine": cosines}


def _subset(inputs: StudyInputs, task: str, images: int) -> Subset:
    """Return evenly spaced training images of a task."""
    data = inputs.examples("train")[task]
    return Subset(data, torch.linspace(0, len(data) - 1, min(images, len(data))).long())


def epoch_table(what: str, rows: Sequence[Row]) -> Table:
    """Return shares or cosines over the epochs, mean over tasks and seeds."""

    def line(kind: str) -> dict[str, Cell]:
        own = [row for row in rows if row["kind"] == kind]
        cells: dict[str, Cell] = {"gradient": kind}
        for index in range(len(own[0][what])):
            cells[f"epoch {index + 1}"] = f"{fmean(row[what][index] for row in own):.2f}"
        if what == "cosine":
            cells["moved in epoch 1"] = f"{fmean(row['moved'] for row in own):.3f}"
        return cells

    titles = {
        "share": "Share of each epoch in the sum of the norms",
        "cosine": "Cosine with the first epoch's gradient, and ‖θ − θ0‖ after it",
    }
    return Table(f"{titles[what]}: mean over tasks", [line(kind) for kind in _kinds(rows)])


def task_table(rows: Sequence[Row]) -> Table:
    """Return, per task, the first epoch's share and the lowest cosine of the first five epochs."""
    lines: list[dict[str, Cell]] = []
    for task in dict.fromkeys(row["task"] for row in rows):
        line: dict[str, Cell] = {"task": task}
        for kind in (BATCHES, IMAGES):
            own = [row for row in rows if row["task"] == task and row["kind"] == kind]
            line[f"first share, {kind}"] = with_interval([row["share"][0] for row in own], 2)
            line[f"lowest cosine, {kind}"] = with_interval([min(row["cosine"][:5]) for row in own], 2)
        lines.append(line)
    return Table("Per task", lines)


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statements against the rows."""
    descent = next(kind for kind in _kinds(rows) if kind.startswith("GD"))
    return [
        *(_largest_first(rows, kind) for kind in (BATCHES, IMAGES)),
        *(_keeps_direction(rows, kind) for kind in (BATCHES, IMAGES, descent)),
    ]


def _largest_first(rows: Sequence[Row], kind: str) -> Finding:
    own = _by_task(rows, kind, "share")
    first = sum(share[0] == max(share) for share in own.values())
    measured = f"largest on {first} of {len(own)} tasks; mean share {fmean(share[0] for share in own.values()):.2f}"
    claim = f"The first epoch has the largest gradient share ({kind})."
    return Finding(
        "G6", claim, f"{measured} (equal shares: {1 / len(next(iter(own.values()))):.2f})", first == len(own)
    )


def _keeps_direction(rows: Sequence[Row], kind: str) -> Finding:
    own = _by_task(rows, kind, "cosine")
    course = [fmean(cosine[index] for cosine in own.values()) for index in range(len(next(iter(own.values()))))]
    claim = f"The cosine with the first gradient stays above 0.8 for five epochs ({kind})."
    return Finding("G6", claim, ", ".join(f"{value:.2f}" for value in course), min(course[:5]) > 0.8)


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what decides the cosine."""
    parts = []
    for kind in _kinds(rows):
        if kind.startswith("GD") or kind == IMAGES:
            own = [row for row in rows if row["kind"] == kind]
            moved, second = fmean(row["moved"] for row in own), fmean(row["cosine"][1] for row in own)
            parts.append(f"{kind}: moved {moved:.3f}, cosine of the second gradient {second:.2f}")
    return [
        f"The distance of one epoch decides ({'; '.join(parts)}). Gradients keep the first one's direction as long as "
        "the weights stay within the reach of θ0's linear approximation; an epoch of batches with AdamW leaves it.",
        "Length and direction pull apart: where the first epoch learns most, its share is large because the loss and "
        "its gradient fall after it, and what is left points elsewhere; where the direction is kept, little was learnt "
        "and all epochs have about the same share.",
    ]


def _by_task(rows: Sequence[Row], kind: str, what: str) -> dict[str, list[float]]:
    """Return shares or cosines over the epochs per task, mean over seeds."""
    own = [row for row in rows if row["kind"] == kind]
    tasks = dict.fromkeys(row["task"] for row in own)
    grouped = {task: [row[what] for row in own if row["task"] == task] for task in tasks}
    return {task: [fmean(values) for values in zip(*lists, strict=True)] for task, lists in grouped.items()}


def _kinds(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["kind"] for row in rows))
