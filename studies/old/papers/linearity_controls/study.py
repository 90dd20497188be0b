"""Study `linearity_controls` (L17, L18): does linearity need pre-training, and pre-training on something true?

**Question.** The paper trains two nets from different random weights, with and without matching their units, and finds
features less linear than after a common pre-training. Such a pair differs from a tuned one in two things: it has no
pre-training, and it has no common beginning. Which of the two matters? And what if the pre-training's labels are
random?

**Method.** *digits*: two nets trained on two angles, α = ½, hidden layers of the MLP, on the tests of both:

- `normal`: both tuned from one pre-trained net;
- `common start` (ours): both trained from the same random weights, without pre-training;
- `weight matching`, `activation matching`: different random weights, units of the second permuted towards the first
  (Git Re-Basin; activations on 2 000 training pictures of each task);
- `none`: different random weights as they are.

Nets without pre-training get as many steps more as the pre-training had. *splits*: a residual net is pre-trained on a
split with its labels, and on the same pictures with random labels (drawn once); from each, two nets are tuned on the
same split with other rates and orders (B.3 of the paper) and two on different splits (Section 5 says so). BatchNorm's
statistics are computed again. Margins are ours and were written before the run.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 5, B.3, Figures 11 and 12; Ainsworth et al. 2023, Git
Re-Basin.
"""

from functools import partial

import numpy as np
import torch
from pydantic import Field

from mergeflow.evaluation.accuracy import accuracies
from mergeflow.linearity.affine import Combination, Linearity, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.merging.alignment import find_groups, permute, weight_matching
from mergeflow.modalities.classification import Classification
from mergeflow.modality import Model, State
from studies.lab.linear_rows import read_samples, rows_of, samples_file, write_samples
from studies.lab.nets import NetTask, Tasks, Tuning, World, has_statistics, new_net, open_world, with_statistics
from studies.lab.tuning import drawn_weights, trained
from studies.old.papers.linearity_controls.results import ORDER, findings, tables
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import StudyResult
from studies.old.rows import Row
from studies.theory.linearity import activation_matching
from tasks.plotting.linearity import linearity_figure
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO


class Options(Section):
    """The study's choices.

    digits: a world of rotated digits. pair: the two angles. splits: a world of class splits. rates: of the two nets
    tuned on one split. seeds: of weights, orders and random labels.
    """

    digits: World
    pair: list[float] = Field(min_length=2, max_length=2)
    splits: World
    rates: list[float] = Field(min_length=2, max_length=2)
    seeds: list[int] = Field(min_length=1)


DECLARED = Declaration(Options, systems=("L17", "L18"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_controls`."""
    options = DECLARED.chosen(io)
    works = {"matching": matching, "labels": labels}
    turned = options.digits.model_copy(update={"angles": [0.0, *options.pair]})
    worlds = {"matching": turned, "labels": options.splits}
    opened = {name: Once(partial(open_world, world, io.root)) for name, world in worlds.items()}
    pieces = {
        name: kept_by_seed(io, options.seeds, partial(work, io, options, opened[name]), name)
        for name, work in works.items()
    }
    rows = {name: [row for piece in found for row in piece["rows"]] for name, found in pieces.items()}
    facts = [row for found in pieces.values() for piece in found for row in piece["facts"]]
    shown = {name: read_samples(samples_file(io, f"{name}_{options.seeds[0]}")) for name in works}
    result = StudyResult(tables(rows, facts), findings(rows), [], [*rows["matching"], *rows["labels"]])
    folder = result.write(io, {name: linearity_figure(found) for name, found in shown.items()})
    for name, found in shown.items():
        write_samples(found, folder / f"samples_{name}.parquet")


def matching(io: StageIO, options: Options, opened: Tasks, seed: int) -> dict[str, list[Row]]:
    """Return rows of the five settings on rotated digits.

    Args:
        io: the stage's files, where samples are kept.
        options: the study's choices.
        opened: gives the rotated tasks.
        seed: of weights and order.
    """
    tasks, world = opened(), options.digits
    first, i, j = tasks
    model = new_net(world, tasks, seed)
    start, other = drawn_weights(model), drawn_weights(new_net(world, tasks, seed + 1_000))
    pretrained = trained(model, start, tasks[first].train, world.pretrain, seed)
    longer = world.tune.model_copy(update={"epochs": world.tune.epochs + world.pretrain.epochs})
    ends: dict[str, tuple[State, State]] = {
        "normal": _two(model, pretrained, pretrained, tasks[i], tasks[j], world.tune, seed),
        "common start": _two(model, start, start, tasks[i], tasks[j], longer, seed),
        "none": _two(model, start, other, tasks[i], tasks[j], longer, seed),
    }
    a, b = ends["none"]
    groups = find_groups({name: value.shape for name, value in a.items()})
    samples = _both(tasks[i].train, tasks[j].train, 2_000)
    ends["weight matching"] = a, permute(b, groups, weight_matching(a, b, groups, seed))
    ends["activation matching"] = a, permute(b, groups, activation_matching(model, samples, a, b, groups))
    layers = find_layers(model.module)
    found = {name: _half(model, tasks, i, j, ends[name], layers) for name in ORDER}
    write_samples(found, samples_file(io, f"matching_{seed}"))
    facts = [
        {
            "seed": seed,
            "setting": name,
            "distance of weights": _apart(*ends[name]),
            "accuracy": float(
                np.mean([_accuracy(model, state, tasks[task]) for task, state in zip((i, j), ends[name], strict=True)])
            ),
        }
        for name in ORDER
    ]
    return {"rows": rows_of(found, seed=seed, world="digits"), "facts": facts}


def labels(io: StageIO, options: Options, opened: Tasks, seed: int) -> dict[str, list[Row]]:
    """Return rows of a pre-training with true and with random labels, tuned on one split and on two.

    Args:
        io: the stage's files, where samples are kept.
        options: the study's choices.
        opened: gives the tasks of the splits.
        seed: of weights, order and random labels.
    """
    tasks, world = opened(), options.splits
    first, i, j = list(tasks)[:3]
    generator = torch.Generator().manual_seed(seed)
    true = tasks[first].train
    drawn = torch.randint(0, int(true.labels.max()) + 1, true.labels.shape, generator=generator)
    found, facts = {}, []
    for name, data in (
        ("true labels", true),
        ("random labels", Classification(first, true.inputs, drawn, encode=true.encode)),
    ):
        model = new_net(world, tasks, seed)
        start = trained(model, drawn_weights(model), data, world.pretrain, seed)
        model.load(start)
        memory = 100 * accuracies(model, {first: data})[first]
        facts.append({"seed": seed, "setting": name, "distance of weights": float("nan"), "accuracy": memory})
        tunings = [world.tune.model_copy(update={"learning_rate": rate}) for rate in options.rates]
        same = tuple(trained(model, start, tasks[i].train, one, seed + n) for n, one in enumerate(tunings))
        other = _two(model, start, start, tasks[i], tasks[j], world.tune, seed)
        layers = find_layers(model.module)
        found[f"{name}, one task"] = _half(model, tasks, i, i, same, layers)  # type: ignore[arg-type]
        found[f"{name}, two tasks"] = _half(model, tasks, i, j, other, layers)
    write_samples(found, samples_file(io, f"labels_{seed}"))
    return {"rows": rows_of(found, seed=seed, world="splits"), "facts": facts}


def _two(
    model: Model, first: State, second: State, i: NetTask, j: NetTask, tuning: Tuning, seed: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return trained(model, first, i.train, tuning, seed), trained(model, second, j.train, tuning, seed + 1)


def _half(
    model: Model, tasks: dict[str, NetTask], i: str, j: str, ends: tuple[State, State], layers: list[str]
) -> dict[str, Linearity]:
    """Compare the middle of two nets with the mean of their features, on the tests of their tasks."""
    named, state = {"i": ends[0], "j": ends[1]}, None
    if has_statistics(model):
        state = with_statistics(model, combine(ends, [0.5, 0.5]), [tasks[i].train, tasks[j].train])
        named = {
            end: with_statistics(model, own, [tasks[task].train])
            for (end, own), task in zip(named.items(), (i, j), strict=True)
        }
    half = {"half": Combination({"i": 0.5, "j": 0.5}, state)}
    return affine(model, {task: tasks[task].test for task in (i, j)}, named, half, layers, batch_size=500)["half"]


def _both(a: Classification, b: Classification, count: int) -> Classification:
    inputs = torch.cat([a.inputs[:count], b.inputs[:count]])
    return Classification("both", inputs, torch.cat([a.labels[:count], b.labels[:count]]), encode=a.encode)


def _apart(a: State, b: State) -> float:
    return float(sum((a[name].double() - b[name].double()).square().sum() for name in a) ** 0.5)


def _accuracy(model: Model, state: State, task: NetTask) -> float:
    model.load(state)
    return 100 * accuracies(model, {"own": task.test})["own"]
