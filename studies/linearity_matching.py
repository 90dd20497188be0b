"""Study `linearity_matching`: when does it pay to match the units of two nets before they are averaged?

**Question.** A recipe may say `align: weight_matching`, which puts each expert's units into the order in which its
weights are nearest to the base's: what does it do to the accuracy of an average?

**Method.** In each world two nets are trained, both on one task in different orders, or on two tasks, from

- `pre-trained`: one net that was trained on a third task;
- `common start`: the same random weights, without pre-training;
- `different starts`: different random weights.

Nets without pre-training get as many epochs more as the pre-training had. ½θ_i + ½θ_j is judged as it is and with the
units of θ_j matched to those of θ_i: accuracy and loss, mean over the tests of both tasks; BatchNorm's statistics are
computed again on training pictures. *ends* is the mean accuracy of the two nets, each on its own test; *moved* the
share of hidden units that the matching puts elsewhere. ± is over seeds: of weights and orders. Margins are ours and
were written before the run.

**Source.** Ainsworth et al. 2023, Git Re-Basin; Zhou et al. 2024, Cross-Task Linearity, Section 5.
"""

from collections.abc import Iterator, Mapping
from functools import partial

import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.accuracy import accuracies, losses
from mergeflow.evaluation.averages import mean
from mergeflow.linearity.affine import combine
from mergeflow.merging.alignment import find_groups, permute, weight_matching
from mergeflow.modality import Model, State
from studies.lab import Claim, Laboratory, Row, Section, Study, select
from studies.lab.linearity import (
    NetTask,
    Tasks,
    World,
    accuracy_of,
    by_seed,
    new_net,
    pretrained,
    with_statistics,
)
from studies.lab.plots import dots, side_by_side
from studies.lab.rows import Samples, samples
from studies.lab.tuning import drawn_weights, trained
from studies.linearity_controls import without_pretraining

STARTS, KINDS = ("pre-trained", "common start", "different starts"), ("one task", "two tasks")


class Options(Section):
    # the first three tasks of each are pre-trained on, trained on, and trained on as the second of two
    worlds: dict[str, World] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)  # of weights and orders


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield one row for each world, seed, start and number of tasks."""
    for name, world in options.worlds.items():
        yield from by_seed(lab, world, partial(averages_of_seed, name, world), options.seeds, name)


def averages_of_seed(name: str, world: World, opened: Tasks, seed: int) -> list[Row]:
    """Return a row for each start, of two nets of one task and of two nets of two tasks."""
    tasks = opened()
    i, j = list(tasks)[1:3]
    model, drawn, base = pretrained(world, tasks, seed)
    other, longer = drawn_weights(new_net(world, tasks, seed + 1_000)), without_pretraining(world)
    rows = []
    from_nothing = trained(model, drawn, tasks[i].train, longer, seed)
    for start, (expert, begin, tuning) in {
        "pre-trained": (trained(model, base, tasks[i].train, world.tune, seed), base, world.tune),
        "common start": (from_nothing, drawn, longer),
        "different starts": (from_nothing, other, longer),
    }.items():
        for kind, task in (("one task", i), ("two tasks", j)):
            ends = {"i": expert, "j": trained(model, begin, tasks[task].train, tuning, seed + 1)}
            about = {"world": name, "seed": seed, "start": start, "tasks": kind}
            rows.append(about | averages(model, {"i": tasks[i], "j": tasks[task]}, ends, seed))
    return rows


def averages(model: Model, tasks: Mapping[str, NetTask], ends: Mapping[str, State], seed: int) -> Row:
    """Return accuracy in percent and loss in nats of the average of two nets, as they are and matched.

    Args:
        model: the network, whose weights are overwritten.
        tasks: `i` and `j`, which may be the same task.
    """
    groups = find_groups({name: value.shape for name, value in ends["i"].items()})
    orders = weight_matching(ends["i"], ends["j"], groups, seed)
    still = torch.cat([order == torch.arange(len(order)) for order in orders])
    accuracy_by_task = {name: accuracy_of(model, state, tasks[name]) for name, state in ends.items()}
    row: Row = {"moved": 100 * (1 - float(still.float().mean())), "ends": mean(accuracy_by_task)}
    for way, end in (("plain", ends["j"]), ("matched", permute(ends["j"], groups, orders))):
        middle = combine([ends["i"], end], [0.5, 0.5])
        model.load(with_statistics(model, middle, [task.train for task in tasks.values()]))
        tests = {name: task.test for name, task in tasks.items()}
        row |= {f"accuracy_{way}": 100 * mean(accuracies(model, tests)), f"loss_{way}": mean(losses(model, tests))}
    return row


def mean_of(rows: pd.DataFrame, value: str, start: str, kind: str) -> pd.Series:
    return samples(rows, value, start=start, tasks=kind)


def gain(rows: pd.DataFrame, start: str, kind: str) -> pd.Series:
    """Return how many points the average is better with matched units, by seed."""
    return mean_of(rows, "accuracy_matched", start, kind) - mean_of(rows, "accuracy_plain", start, kind)


def against_common_start(rows: pd.DataFrame) -> Samples:
    return {
        kind: mean_of(rows, "accuracy_matched", "different starts", kind)
        - mean_of(rows, "accuracy_plain", "common start", kind)
        for kind in KINDS
    }


def less_the_ends(rows: pd.DataFrame) -> Samples:
    start = ("different starts", "one task")
    return {"less the ends": mean_of(rows, "accuracy_matched", *start) - mean_of(rows, "ends", *start)}


# fmt: off
def claims_of(world: str) -> list[Claim]:
    """Return when matching pays in one world."""
    made = [
        Claim("L17", "Matching pays for nets of different starts.",
              lambda rows: {kind: gain(rows, "different starts", kind) for kind in KINDS},
              low=10, of="gain in accuracy of the average", ours=True),
        Claim("L17", "Matching is needless for nets that begin with the same weights, pre-trained or not.",
              lambda rows: {f"{s}, {kind}": gain(rows, s, kind) for s in STARTS[:2] for kind in KINDS},
              low=-0.5, high=0.5, of="change of accuracy", ours=True),
        Claim("L17", "Matching stands in for the same beginning.", against_common_start,
              low=-1, of="matched averages of different starts less plain ones of a common start", ours=True),
        Claim("L17", "Matched nets of one task may be averaged.", less_the_ends,
              low=-5, of="the average of different starts less its ends", ours=True),
    ]
    return [claim.of_part(partial(select, world=world), world) for claim in made]
# fmt: on


AVERAGES = {
    "ends": "ends, %",
    "accuracy_plain": "average, %",
    "accuracy_matched": "matched, %",
    "loss_plain": "loss, nat",
    "loss_matched": "matched, nat",
    "moved": "units moved, %",
}


def accuracy_figure(world: str, rows: pd.DataFrame) -> Figure:
    """Draw accuracies of the ends, the average and the matched average, a group for each start and number of tasks."""
    labels = {"ends": "each net alone", "accuracy_plain": "average", "accuracy_matched": "average, units matched"}
    long = select(rows, world=world).melt(["seed", "start", "tasks"], list(labels), "net", "accuracy")
    named = long.assign(net=long.net.map(labels), where=long.start + ", " + long.tasks)
    return dots(named, "where", "net", y_label="accuracy, %")


STUDY = Study(
    options=Options,
    systems=("L17",),
    measure=measure,
    claims=lambda options: [claim for world in options.worlds for claim in claims_of(world)],
    tables={
        "½θ_i + ½θ_j on the tests of both tasks": lambda rows: side_by_side(rows, ["world", "start", "tasks"], AVERAGES)
    },
    figures=lambda options: {f"averages {world}": partial(accuracy_figure, world) for world in options.worlds},
)
