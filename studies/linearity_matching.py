"""Study `linearity_matching` (L17): when does it pay to match the units of two nets before they are averaged?

**Question.** A recipe may say `align: weight_matching`, which puts each expert's units into the order in which its
weights are nearest to the base's. The study linearity_controls shows what that does to features. What does it do to the
accuracy of the average: for nets of different random weights, of the same random weights, and of one pre-training?

**Method.** In each world two nets are trained, both on one task in different orders, or on two tasks, from

- `pre-trained`: one net that was trained on a third task;
- `common start`: the same random weights, without pre-training;
- `different starts`: different random weights.

Nets without pre-training get as many epochs more as the pre-training had. ½θ_i + ½θ_j is judged as it is and with the
units of θ_j matched to those of θ_i: accuracy and loss, mean over the tests of both tasks. *ends* is the mean accuracy
of the two nets, each on its own test; *moved* the share of hidden units that the matching puts elsewhere. BatchNorm's
statistics of averages are computed again on training pictures of both tasks. ± is over seeds, of weights and orders.
Margins are ours and were written before the run.

**Source.** Ainsworth et al. 2023, Git Re-Basin; Zhou et al. 2024, Cross-Task Linearity, Section 5, B.3.
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
from studies.lab import Claim, Laboratory, Row, Section, Study, select, table
from studies.lab.inputs import Lazy
from studies.lab.linearity import NetTask, Tasks, World, has_statistics, new_net, open_world, with_statistics
from studies.lab.plots import bars
from studies.lab.rows import Samples, samples
from studies.lab.tuning import drawn_weights, trained

STARTS, KINDS = ("pre-trained", "common start", "different starts"), ("one task", "two tasks")


class Options(Section):
    """The study's choices. `worlds`: the first three tasks of each are pre-trained on, trained on, and trained on as
    the second of two. `seeds`: of weights and orders."""

    worlds: dict[str, World] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield one row for each world, seed, start and number of tasks."""
    for name, world in options.worlds.items():
        opened = Lazy(partial(open_world, world, lab.io.root))
        yield from lab.by_seed(partial(measure_seed, name, world, opened), options.seeds, name)


def measure_seed(name: str, world: World, opened: Tasks, seed: int) -> list[Row]:
    """Return a row for each start, of two nets of one task and of two nets of two tasks."""
    tasks = opened()
    first, i, j = list(tasks)[:3]
    model = new_net(world, tasks, seed)
    drawn, other = drawn_weights(model), drawn_weights(new_net(world, tasks, seed + 1_000))
    pretrained = trained(model, drawn, tasks[first].train, world.pretrain, seed)
    longer = world.tune.model_copy(update={"epochs": world.tune.epochs + world.pretrain.epochs})
    rows = []
    from_nothing = trained(model, drawn, tasks[i].train, longer, seed)
    for start, (one, begin, tuning) in {
        "pre-trained": (trained(model, pretrained, tasks[i].train, world.tune, seed), pretrained, world.tune),
        "common start": (from_nothing, drawn, longer),
        "different starts": (from_nothing, other, longer),
    }.items():
        for kind, task in (("one task", i), ("two tasks", j)):
            ends = {"i": one, "j": trained(model, begin, tasks[task].train, tuning, seed + 1)}
            known = {"world": name, "seed": seed, "start": start, "tasks": kind}
            rows.append(known | averages(model, {"i": tasks[i], "j": tasks[task]}, ends, seed))
    return rows


def averages(model: Model, tasks: Mapping[str, NetTask], ends: Mapping[str, State], seed: int) -> Row:
    """Return accuracy in percent and loss in nats of the average of two nets, as they are and matched.

    Args:
        model: the network, whose weights are overwritten.
        tasks: `i` and `j`, which may be the same task.
        ends: θ_i and θ_j.
        seed: of the matching's visits.
    """
    groups = find_groups({name: value.shape for name, value in ends["i"].items()})
    orders = weight_matching(ends["i"], ends["j"], groups, seed)
    still = torch.cat([order == torch.arange(len(order)) for order in orders])
    row: Row = {"moved": 100 * (1 - float(still.float().mean())), "ends": mean(dict(_own(model, tasks, ends)))}
    for way, end in (("plain", ends["j"]), ("matched", permute(ends["j"], groups, orders))):
        state = combine([ends["i"], end], [0.5, 0.5])
        if has_statistics(model):
            state = with_statistics(model, state, [task.train for task in tasks.values()])
        model.load(state)
        tests = {name: task.test for name, task in tasks.items()}
        row |= {f"accuracy_{way}": 100 * mean(accuracies(model, tests)), f"loss_{way}": mean(losses(model, tests))}
    return row


def _own(model: Model, tasks: Mapping[str, NetTask], ends: Mapping[str, State]) -> Iterator[tuple[str, float]]:
    """Yield each net's accuracy on its own test."""
    for name, state in ends.items():
        model.load(state)
        yield name, 100 * accuracies(model, {name: tasks[name].test})[name]


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


COLUMNS = {
    "ends": "ends, %",
    "accuracy_plain": "average, %",
    "accuracy_matched": "matched, %",
    "loss_plain": "loss, nat",
    "loss_matched": "matched, nat",
    "moved": "units moved, %",
}


def averages_table(rows: pd.DataFrame) -> pd.DataFrame:
    key = ["world", "start", "tasks"]
    parts = [table(rows, key, value=value).rename(columns={value: label}) for value, label in COLUMNS.items()]
    return pd.concat(parts, axis=1)


def accuracy_figure(world: str, rows: pd.DataFrame) -> Figure:
    """Draw accuracies of the ends, the average and the matched average, a group for each start and number of tasks."""
    labels = {"ends": "each net alone", "accuracy_plain": "average", "accuracy_matched": "average, units matched"}
    long = select(rows, world=world).melt(["seed", "start", "tasks"], list(labels), "net", "accuracy")
    return bars(long.assign(net=long.net.map(labels), where=long.start + "\n" + long.tasks), "where", "net")


STUDY = Study(
    options=Options,
    systems=("L17",),
    measure=measure,
    claims=lambda options: [claim for world in options.worlds for claim in claims_of(world)],
    tables={"½θ_i + ½θ_j on the tests of both tasks": averages_table},
    figures=lambda options: {f"averages {world}": partial(accuracy_figure, world) for world in options.worlds},
)
