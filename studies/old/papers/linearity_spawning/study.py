"""Study `linearity_spawning` (L5): how long must two nets train together before their features average?

**Question.** A net is trained for k epochs, cloned, and both clones are trained to the end on the same task in
different orders. With k = 0 they share the random weights alone. From which k on are they linearly connected, and
are their features?

**Method.** A small residual net on one task; k of the choices, the same number of epochs in all. Barrier of accuracy
at α = ½: the mean of the ends' accuracies less the middle's, in points, with BatchNorm's statistics averaged like
weights and computed again on training pictures. 1 − cos and coef of each block at α = ½, statistics of all three
nets computed again. Margins are ours and were written before the run.

**Source.** Frankle et al. 2020, Linear mode connectivity and the lottery ticket hypothesis; Zhou et al. 2024,
Cross-Task Linearity, Figure 1, which cites it.
"""

from functools import partial
from typing import Any

from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.evaluation.accuracy import accuracies
from mergeflow.linearity.affine import Combination, affine, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import Model, State
from studies.lab.linear_rows import mean_over, rows_of
from studies.lab.nets import NetTask, Tasks, World, new_net, open_world, with_statistics
from studies.lab.tuning import drawn_weights, trained
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import Finding, StudyResult, Table, with_interval
from studies.old.rows import Row, tidy
from studies.old.verdicts import within
from tasks.plotting.drawing import dress, legend, panels
from tasks.plotting.intervals import curve
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

HIGH, LOW = 10.0, 2.0  # points of the barrier at k = 0, and at the largest k


class Options(Section):
    """The study's choices. `world`: its first task is trained on. `spawn`: k, ascending. `epochs`: in all."""

    world: World
    spawn: list[int] = Field(min_length=2)
    epochs: int = Field(ge=1)
    seeds: list[int] = Field(min_length=1)


DECLARED = Declaration(Options, systems=("L5",))


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_spawning`."""
    options = DECLARED.chosen(io)
    tasks = Once(partial(open_world, options.world, io.root))
    pieces = kept_by_seed(io, options.seeds, partial(measure, options, tasks))
    parts = {key: [row for piece in pieces for row in piece[key]] for key in ("features", "barriers")}
    rows, barriers = parts.values()
    told = tidy({"part": part, **row} for part, own in parts.items() for row in own)
    result = StudyResult(tables(rows, barriers), findings(rows, barriers, options), [], told)
    result.write(io, {"spawning": spawning_figure(rows, barriers)})


def measure(options: Options, opened: Tasks, seed: int) -> dict[str, list[Row]]:
    """Return the rows of one seed: features by block and the barrier, for each k.

    Args:
        options: the study's choices.
        opened: gives the world's tasks.
        seed: of weights and order.
    """
    tasks = opened()
    task = tasks[next(iter(tasks))]
    model = new_net(options.world, tasks, seed)
    start, done = drawn_weights(model), 0
    features: list[Row] = []
    barriers: list[Row] = []
    for k in sorted(options.spawn):
        if k > done:
            start = trained(model, start, task.train, _epochs(options, k - done), seed * 100 + k)
            done = k
        ends = [
            trained(model, start, task.train, _epochs(options, options.epochs - k), seed * 100 + 50 + n) for n in (0, 1)
        ]
        known = {"seed": seed, "k": k}
        features += [{**row, **known} for row in _features(model, ends, task)]
        barriers.append({**known, **barrier(model, ends, task)})
    return {"features": features, "barriers": barriers}


def _epochs(options: Options, epochs: int) -> Any:
    return options.world.tune.model_copy(update={"epochs": epochs})


def _features(model: Model, ends: list[dict[str, Any]], task: NetTask) -> list[Row]:
    half = Combination({"0": 0.5, "1": 0.5}, with_statistics(model, combine(ends, [0.5, 0.5]), [task.train]))
    named = {str(n): with_statistics(model, end, [task.train]) for n, end in enumerate(ends)}
    return rows_of(affine(model, {"test": task.test}, named, {"half": half}, find_layers(model.module), batch_size=250))


def barrier(model: Model, ends: list[dict[str, Any]], task: NetTask) -> Row:
    """Return the ends' mean accuracy and the barriers at α = ½, in points, by how BatchNorm's statistics came about.

    Args:
        model: the network, whose weights are overwritten.
        ends: the weights of two nets.
        task: the task they were trained on.
    """
    nets = [*ends, combine(ends, [0.5, 0.5])]
    first, second, middle = (_accuracy(model, net, task) for net in nets)
    again = [_accuracy(model, with_statistics(model, net, [task.train]), task) for net in nets]
    own = (first + second) / 2
    return {"ends": own, "interpolated": own - middle, "recomputed": (again[0] + again[1]) / 2 - again[2]}


def _accuracy(model: Model, state: State, task: NetTask) -> float:
    model.load(state)
    return 100 * accuracies(model, {"own": task.test})["own"]


def findings(features: list[Row], barriers: list[Row], options: Options) -> list[Finding]:
    """Hold the statements against the rows, BatchNorm's statistics computed again.

    Args:
        features: by block, as of `measure`.
        barriers: as of `barrier`, for each k and seed.
        options: the study's choices.
    """
    first, last = min(options.spawn), max(options.spawn)
    high, low = (mean_over(barriers, "recomputed", k=k) for k in (first, last))
    deepest = max(row["depth"] for row in features)
    near, far = (mean_over(features, "distance", k=k, depth=deepest) for k in (last, first))
    falls = [a - b for a, b in zip(far, near, strict=True)]
    return [
        Finding(
            "L5",
            f"Without training together (k = {first}) two orders end in different valleys.",
            f"barrier {with_interval(high)} points",
            within(high, low=HIGH),
            f"barrier of accuracy at α = ½ ≥ {HIGH:g} points",
        ),
        Finding(
            "L5",
            f"After k = {last} epochs together they end in one.",
            f"barrier {with_interval(low)} points",
            within(low, high=LOW),
            f"barrier at most {LOW:g} points",
        ),
        Finding(
            "L5",
            "Features grow linear over k.",
            f"1 − cos in the last block {with_interval(far, 3)} at k = {first}, {with_interval(near, 3)} at k = {last}",
            within(falls, low=0),
            "paired difference of 1 − cos above 0, over seeds",
        ),
    ]


def tables(rows: list[Row], barriers: list[Row]) -> list[Table]:
    """Return barriers over k, and features by block."""
    lines = [
        {
            "k": k,
            **{
                label: with_interval(mean_over(barriers, key, k=k))
                for label, key in (
                    ("ends, %", "ends"),
                    ("barrier, statistics averaged", "interpolated"),
                    ("barrier, computed again", "recomputed"),
                )
            },
        }
        for k in sorted({row["k"] for row in barriers})
    ]
    blocks = [
        {
            "k": k,
            "block": layer,
            "1 − cos": with_interval(mean_over(rows, "distance", k=k, layer=layer), 4),
            "baseline": with_interval(mean_over(rows, "base", k=k, layer=layer), 3),
            "coef": with_interval(mean_over(rows, "coef", k=k, layer=layer), 2),
        }
        for k, layer in dict.fromkeys((row["k"], row["layer"]) for row in rows)
    ]
    return [Table("Accuracy and its barrier at α = ½, points", lines), Table("Features at α = ½", blocks)]


def spawning_figure(rows: list[Row], barriers: list[Row]) -> Figure:
    """Draw the barriers and 1 − cos of some blocks over k."""
    figure, (left, right) = panels(2, 2, 3.8)
    steps = sorted({row["k"] for row in barriers})
    dress(left, "Barrier", "epochs together, k", "points of accuracy")
    for number, (key, label) in enumerate((("interpolated", "statistics averaged"), ("recomputed", "computed again"))):
        curve(left, {k: mean_over(barriers, key, k=k) for k in steps}, label, number)
    dress(right, "Features", "epochs together, k", "1 − cos")
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    for number, layer in enumerate(dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1]))):
        curve(
            right,
            {k: list(by_k) for k in steps if (by_k := mean_over(rows, "distance", k=k, layer=layer))},
            layer,
            number + 2,
        )
    legend(figure, 10.0, loc="outside lower center")
    return figure
