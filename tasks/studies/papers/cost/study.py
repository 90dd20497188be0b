"""Study `cost` (M7): what do joint training, merge-and-tune and one-shot merging cost, and what do they reach?

**Question.** A team wants one model for T tasks. It can train on all data at once, tune and average in rounds, or
merge experts once. How good is each, for how many steps, images, seconds and how much sending of weights?

**Method.** Every row spends its budget on the same tasks with the same batch size and optimiser. `joint` minimises
Σ_t L_t, one batch of every task a step. `MIMA N` and `ATM N` (task arithmetic with α = 0.25 between rounds) are taken
as their last merge. The one-shot rows merge experts once, by the
best on validation of average, task arithmetic, TIES, CART and TSV-M and their arguments. A *step* is one batch of one
task through the encoder and back (a joint step counts T); images per second contain the validations during training.
*Selection* is the validation accuracy of every candidate, counted in images through the encoder, without gradients.
*Sent* is what would cross a network if each task's data stayed where it is: T experts to the place that merges, and
the merge back to T tasks, once per round; for joint training the images themselves move.

**Source.** MIMA, Sections 4 and 5.1 (equal budget S = K·N); the accounting is ours, as reviewers asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from mergeflow import layout
from mergeflow.evaluation.statistics import mean
from mergeflow.merging import configure
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO
from tasks.studies.inputs import Accuracy, State, StudyInputs, mean_accuracy
from tasks.studies.papers.cost.figures import cost_figure
from tasks.studies.pieces import Row, choose_scale, grid, kept
from tasks.studies.results import Cell, Finding, StudyResult, Table, with_interval

STUDY = "cost"


class Options(Section):
    """The study's choices.

    iterative: runs whose last merge is the model. one_shot: runs whose experts are merged once. keep, rank_ratio:
    values tried for TIES and CART beside their scale.
    """

    iterative: list[str]
    one_shot: list[str]
    keep: list[float]
    rank_ratio: list[float]


@dataclass(frozen=True)
class Family:
    """A method that competes: the values of one argument, the scales, and where the walk over them begins."""

    method: str
    scales: Sequence[float]
    start: float
    argument: str | None = None
    values: Sequence[float] = (0.0,)


DECLARED = Declaration(
    Options,
    runs=lambda options: ["joint", *options.iterative, *options.one_shot],
    splits=("validation", "test"),
    systems=("M7",),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/cost`."""
    inputs = StudyInputs(io)
    options = Options.model_validate(inputs.options(STUDY))
    names = ["joint", *options.iterative, *options.one_shot]
    pieces = [(name, seed) for name in names for seed in inputs.seeds]
    rows = []
    for done, (name, seed) in enumerate(pieces):
        io.report("models", done, len(pieces))
        rows.append(kept(io, f"{name}_{seed}", partial(measure, inputs, options, name, seed)))
    size = sum(tensor.numel() * tensor.element_size() for tensor in inputs.base.values()) / 2**20
    table = cost_table(rows, inputs.tasks, size)
    result = StudyResult([table, choice_table(rows)], findings(rows), notes(rows))
    points = {
        label(name): (
            fmean(row["cost"]["examples"] for row in rows if row["run"] == name),
            [mean_accuracy(row["test"]) for row in rows if row["run"] == name],
        )
        for name in names
    }
    result.write(io.out(layout.study(STUDY)), {"accuracy": cost_figure(points)})


def measure(inputs: StudyInputs, options: Options, name: str, seed: int) -> Row:
    """Return a row's test accuracy, its training's cost, and how many candidates its selection tried."""
    source = inputs.run(name)
    row: Row = {"run": name, "seed": seed, "cost": source.cost(seed), "tried": 0, "chosen": "", "merges": 0}
    if name == "joint":
        test = inputs.accuracy(source.model(seed), "test")
    elif name in options.iterative:
        rounds = source.rounds(seed)[-1]["round"]
        test, row["merges"] = inputs.accuracy(source.merged(seed, rounds), "test"), rounds
    else:
        best, row["tried"] = best_merge(inputs, options, source.experts(seed))
        test, row["chosen"], row["merges"] = best["test"], best["chosen"], 1
    return {**row, "test": test, "selection_images": row["tried"] * _validation_images(inputs)}


def best_merge(inputs: StudyInputs, options: Options, experts: Mapping[str, State]) -> tuple[dict[str, Any], int]:
    """Return the best merge of the competing methods on validation, and how many candidates were tried."""
    scorer, results, tried = inputs.scorer(experts), [], 0
    for family in families(options):
        for value in family.values:
            args = {family.argument: value} if family.argument else {}
            chosen = choose_scale(inputs, scorer, family.method, family.scales, family.start, args, test=False)
            tried += chosen.tried
            results.append((mean(chosen.validation), family.method, chosen.args))
    _, method, args = max(results, key=lambda result: result[0])
    test: Accuracy = inputs.accuracy(scorer.merge(configure(method, args)), "test")
    listed = ", ".join(f"{name} {value:g}" for name, value in args.items())
    return {"test": test, "chosen": f"{method} ({listed})"}, tried


def families(options: Options) -> list[Family]:
    """Return the competing methods."""
    return [
        Family("average", [1.0], 1.0),
        Family("task_arithmetic", grid(0, 1, 0.05), 0.3),
        Family("ties", grid(0.4, 1.8, 0.1), 1.0, "keep", options.keep),
        Family("cart", [0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0], 2.0, "rank_ratio", options.rank_ratio),
        Family("tsv", [0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0], 1.2),
    ]


def label(name: str) -> str:
    """Return what a row is called.

    Example:
        >>> label("mima_16"), label("joint"), label("one_epoch")
        ('MIMA N = 16', 'joint training', 'one-shot, one epoch')
    """
    kind, _, rounds = name.partition("_")
    if kind in ("mima", "atm"):
        return f"{kind.upper()} N = {rounds}"
    return "joint training" if name == "joint" else f"one-shot, {name.replace('_', ' ')}"


def cost_table(rows: Sequence[Row], tasks: Sequence[str], size: float) -> Table:
    """Return accuracy beside cost; `size` of one model in MiB."""

    def line(name: str) -> dict[str, Cell]:
        own = [row for row in rows if row["run"] == name]
        costs = [row["cost"] for row in own]
        per_step = len(tasks) if name == "joint" else 1
        return {
            "model": label(name),
            "test accuracy, %": with_interval([mean_accuracy(row["test"]) for row in own]),
            "task steps": round(per_step * fmean(cost["steps"] for cost in costs)),
            "images": round(fmean(cost["examples"] for cost in costs)),
            "seconds": with_interval([cost["seconds"] for cost in costs], 0),
            "GPU-seconds": round(fmean(cost["gpu_seconds"] for cost in costs)),
            "images/s": round(fmean(cost["examples_per_second"] for cost in costs)),
            "peak MiB": max(cost["peak_memory_mib"] for cost in costs),
            "merges": own[0]["merges"],
            "sent, MiB": round(2 * own[0]["merges"] * len(tasks) * size) if own[0]["merges"] else "the data",
            "selection images": round(fmean(row["selection_images"] for row in own)),
        }

    return Table("Accuracy and cost of one seed", [line(name) for name in _names(rows)])


def choice_table(rows: Sequence[Row]) -> Table:
    """Return what validation chose for the one-shot rows."""
    return Table(
        "What validation chose for the one-shot merges",
        [
            {
                "model": label(row["run"]),
                "seed": row["seed"],
                "candidates": row["tried"],
                "chosen": row["chosen"],
                "test accuracy, %": round(mean_accuracy(row["test"]), 1),
            }
            for row in rows
            if row["tried"]
        ],
    )


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Say what the paper leaves open: how MIMA stands to joint training and to the best one-shot merge."""
    accuracy = {name: fmean(mean_accuracy(r["test"]) for r in rows if r["run"] == name) for name in _names(rows)}
    mima = [name for name in accuracy if name.startswith("mima")]
    most = max(mima, key=lambda name: int(name.partition("_")[2]))
    once = max((row["run"] for row in rows if row["tried"]), key=accuracy.__getitem__)
    listed = ", ".join(f"{label(name)} {value:.1f} %" for name, value in accuracy.items())
    return [
        Finding(
            "M7",
            "With many rounds MIMA comes within 2 points of joint training at the same budget.",
            listed,
            accuracy[most] >= accuracy["joint"] - 2,
        ),
        Finding(
            "M7",
            "At the same budget MIMA with many rounds beats the best one-shot merge.",
            f"{label(most)} {accuracy[most]:.1f} % against {label(once)} {accuracy[once]:.1f} %",
            accuracy[most] > accuracy[once],
        ),
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """Return how to read the seconds."""
    rate = [row["cost"]["examples_per_second"] for row in rows]
    accuracy = {name: fmean(mean_accuracy(r["test"]) for r in rows if r["run"] == name) for name in _names(rows)}
    behind = [
        f"{label(name)} {value - accuracy['joint']:+.1f}"
        for name, value in accuracy.items()
        if name.startswith(("m", "a"))
    ]
    return [
        f"Points against joint training: {', '.join(behind)}. The average moves the common model by 1/T of the sum "
        "of the increments; α = 0.25 (ATM) moves it twice as far each time and makes up for part of the lag.",
        f"Seconds are wall time, {min(rate):.0f} to {max(rate):.0f} images/s over all runs: compare them only where "
        "the machine did nothing else. Steps, images and MiB sent do not depend on the machine. Merging itself takes "
        "well under a second for any method here; what MIMA costs beyond one-shot merging is N − 1 more exchanges.",
    ]


def _validation_images(inputs: StudyInputs) -> int:
    return sum(len(examples) for examples in inputs.examples("validation").values())


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["run"] for row in rows))
