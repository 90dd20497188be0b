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

import torch
from pydantic import Field

from mergeflow.evaluation.accuracy import accuracies, losses
from mergeflow.evaluation.averages import mean
from mergeflow.linearity.affine import combine
from mergeflow.merging.alignment import find_groups, permute, weight_matching
from mergeflow.modality import Model, State
from studies.lab.nets import NetTask, Tasks, World, has_statistics, new_net, open_world, with_statistics
from studies.lab.tuning import drawn_weights, trained
from studies.old.papers.linearity_matching.results import figure, findings, tables
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices. `worlds`: the first three tasks of each are pre-trained on, trained on, and trained on as
    the second of two. `seeds`: of weights and orders."""

    worlds: dict[str, World] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


DECLARED = Declaration(Options, systems=("L17",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_matching`."""
    options = DECLARED.chosen(io)
    rows: list[Row] = []
    for name, world in options.worlds.items():
        opened = Once(partial(open_world, world, io.root))
        pieces = kept_by_seed(io, options.seeds, partial(measure, world, opened), name)
        rows += [{"world": name, **row} for piece in pieces for row in piece["rows"]]
    result = StudyResult(tables(rows), findings(rows), [], rows)
    result.write(io, {"averages": figure(rows)})


def measure(world: World, opened: Tasks, seed: int) -> dict[str, list[Row]]:
    """Return a row for each start, of two nets of one task and of two nets of two tasks.

    Args:
        world: architecture, sizes and settings.
        opened: gives the world's tasks.
        seed: of weights and orders.
    """
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
            known = {"seed": seed, "start": start, "tasks": kind}
            rows.append(known | averages(model, {"i": tasks[i], "j": tasks[task]}, ends, seed))
    return {"rows": rows}


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
