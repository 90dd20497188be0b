"""Study `cost` (M7): what do joint training, merge-and-tune and one-shot merging cost, and what do they reach?

**Question.** A team wants one model for T tasks. It can train on all data at once, tune and average in rounds, or
merge experts once. How good is each, for how many steps, images, seconds and how much sending of weights?

**Method.** Every row spends its budget on the same tasks with the same batch size and optimiser. Joint training
minimises Σ_t L_t, one batch of every task a step; its learning rate is chosen on validation, before any look at test,
by the mean over the seeds that every rate was trained with. Runs in rounds are taken as their last merge, with the rate
of single tasks. The one-shot rows merge the experts of a run once, by the best on validation of average, task
arithmetic, TIES, CART and TSV-M and their arguments; where CART takes the largest rank that is tried, more
may do better, and the best of these is the best that was tried, not the best there is. A *step* is one batch of one
task through the model and back (a joint step counts T). *Selection* is the validation accuracy of every candidate,
counted in examples through the model, without gradients; joint training's candidates are its learning rates, each of
which had to be trained as well, which the table does not count. *Sent* is what would cross a network if each task's
data stayed where it is: T experts to the place that merges, and the merge back to T tasks, once per round; for joint
training the examples themselves move. Times are processor seconds of the thread that trains or merges, which other
work on the machine changes little; they stand beside the result, because they differ from run to run. Two rows are
compared over the seeds that both have; of the one-shot rows the one that is best on validation is compared. ± is over
seeds: the order of the batches.

**Source.** MIMA, Sections 4 and 5.1 (equal budget S = K·N); the accounting is ours, as reviewers asked for.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

from pydantic import Field

from mergeflow.evaluation.averages import mean
from mergeflow.merging import configure
from studies.lab.inputs import Accuracy, Laboratory, State
from studies.old.papers.cost.figures import cost_figure
from studies.old.papers.cost.rates import best_rate, rate_note, rate_table, try_rates
from studies.old.papers.cost.results import (
    accuracies,
    called,
    choice_table,
    cost_table,
    findings,
    label,
    notes,
    time_tables,
)
from studies.old.papers.cost.rows import tidy_rows
from studies.old.pieces import choose_scale, grid, kept, kept_by_run
from studies.old.results import StudyResult, keep_times
from studies.old.rows import Row, of
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    joint: runs of joint training. rates: like the first of these but for the learning rate; the best one on validation
    takes its place. iterative: runs whose last merge is the model. one_shot: runs whose experts are merged once.
    keep, rank_ratio: values tried for TIES and CART beside their scale.
    """

    joint: list[str] = Field(min_length=1)
    rates: list[str] = Field(default_factory=list)
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
    runs=lambda options: [*options.joint, *options.rates, *options.iterative, *options.one_shot],
    splits=("validation", "test"),
    systems=("M7",),
)


def run(io: StageIO) -> None:
    """Write `outputs/studies/cost`."""
    inputs = Laboratory(io)
    options = DECLARED.chosen(io)
    rates = kept(io, "rates", lambda: {"tried": try_rates(inputs, [options.joint[0], *options.rates])})["tried"]
    best = best_rate(rates)["run"]
    options = options.model_copy(update={"joint": [best, *options.joint[1:]]})
    names = [*options.joint, *options.iterative, *options.one_shot]
    rows = kept_by_run(inputs, names, partial(measure, inputs, options))
    size = sum(tensor.numel() * tensor.element_size() for tensor in inputs.base.values()) / 2**20
    table = cost_table(rows, inputs.tasks, size)
    result = StudyResult(
        [table, choice_table(rows), rate_table(rates, label)],
        findings(rows),
        [*notes(rows), rate_note(rates)],
        tidy_rows(rows, rates),
    )
    points = {
        called(rows, name): (fmean(row["examples"] for row in of(rows, run=name)), accuracies(rows, name))
        for name in names
    }
    keep_times(io, time_tables(rows))
    result.write(io, {"accuracy": cost_figure(points)})


def measure(inputs: Laboratory, options: Options, name: str, seed: int) -> Row:
    """Return a row's test accuracy, its training's cost, and how many candidates its selection tried.

    Args:
        inputs: the study's inputs.
        options: its choices.
        name: the training run of the row.
        seed: of the run.
    """
    source = inputs.run(name)
    row: Row = {"run": name, "seed": seed, "tried": 0, "chosen": "", "rounds": 0, "selecting": 0.0, "merging": {}}
    if name in options.joint:
        test = inputs.accuracy(source.model(seed), "test")
    elif name in options.iterative:
        row["rounds"] = source.rounds(seed)[-1]["round"]
        test = inputs.accuracy(source.merged(seed, row["rounds"]), "test")
    else:
        found = best_merge(inputs, options, source.experts(seed))
        test, row["rounds"] = found.pop("test"), 1
        row |= found
    cost, steps = source.cost(seed), len(inputs.tasks) if name in options.joint else 1
    times = {key: cost[key] for key in ("processor_seconds", "gpu_seconds", "peak_memory_mib")}
    trained = {"budget": cost["steps"] * steps // len(inputs.tasks), "task_steps": cost["steps"] * steps}
    per_round = {"per_round": cost["rounds"], "examples": cost["examples"]}
    rates = 1 + len(options.rates) if name == options.joint[0] and options.rates else 0
    selection = (row["tried"] or rates) * sum(len(examples) for examples in inputs.examples("validation").values())
    return {**row, **trained, **per_round, "times": times, "test": test, "selection": selection}


def best_merge(inputs: Laboratory, options: Options, experts: Mapping[str, State]) -> dict[str, Any]:
    """Return the best merge of the competing methods on validation: its test accuracy, and what finding it took.

    Args:
        inputs: the study's inputs.
        options: its choices.
        experts: their weights by task.
    """
    blind, results, tried = inputs.blind(), [], 0
    scorer, merging, begun = blind.scorer(experts), dict[str, float](), time.thread_time()
    for family in families(options):
        for value in family.values:
            args = {family.argument: value} if family.argument else {}
            chosen = choose_scale(blind, scorer, family.method, family.scales, family.start, args, test=False)
            tried += chosen.tried
            results.append((mean(chosen.validation), family.method, chosen.args))
    selecting = time.thread_time() - begun
    for _, method, args in results:
        begun = time.thread_time()
        inputs.scorer(experts).merge(configure(method, args))
        merging[method] = time.thread_time() - begun
    validation, method, args = max(results, key=lambda result: result[0])
    test: Accuracy = inputs.accuracy(scorer.merge(configure(method, args)), "test")
    listed = ", ".join(f"{name} {value:g}" for name, value in args.items())
    found = {"test": test, "chosen": f"{method} ({listed})", "tried": tried, "validation": validation}
    return {**found, "selecting": selecting, "merging": merging}


def families(options: Options) -> list[Family]:
    """Return the competing methods."""
    return [
        Family("average", [1.0], 1.0),
        Family("task_arithmetic", grid(0, 1, 0.05), 0.3),
        Family("ties", grid(0.2, 1.8, 0.1), 1.0, "keep", options.keep),
        Family("cart", [0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0], 2.0, "rank_ratio", options.rank_ratio),
        Family("tsv", [0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0, 2.5, 3.0], 1.2),
    ]
