"""Study `linearity_edits` (L11–L13): are features linear in task arithmetic's edits, adding and negating?

**Question.** Task arithmetic adds and subtracts task vectors τ_t = θ_t − θ0. Does adding two of them average the
features of the single edits, and does negating one mirror the features about the base's?

**Method.** Nets tuned from one pre-trained net on rotated digits; every hidden layer, test examples of the tasks
involved:

    Eq. 2   f(θ0 + λ(τ_i + τ_j)) ≈ ½ f(θ0 + 2λτ_i) + ½ f(θ0 + 2λτ_j)           all pairs
    Eq. 3   f(θ0) ≈ ½ f(θ0 + λτ_i) + ½ f(θ0 − λτ_i)                            all tasks, on D_i
    Eq. 4   f(θ0 − λτ_i) ≈ 2 f(θ0) − f(θ0 + λτ_i)                              all tasks, on D_i

*Two readings of λ*: the paper's text has 2λ at the ends of Eq. 2, the captions of its figures λ (the merged model is
then θ0 + ½λ(τ_i + τ_j)); both are measured. The baseline of Eq. 2 and 3 is between the two ends, that of Eq. 4 between
f(θ0 + λτ_i) and f(θ0). Of Eq. 4 the paper shows accuracies alone: the equation is its own, and its error by layer is
ours. Its rule bounds error / ‖g‖² and has no baseline, so that it is laxer than that of Eq. 2 and 3, by which λ = 0.2
would be undecided (worst share 0.31 ± 0.04). Margins are ours and were written before the run.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 4.3, B.1.3; Ilharco et al. 2023, Editing models with task
arithmetic.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

from pydantic import Field

from mergeflow.linearity.affine import Combination, Linearity, affine, apart, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import State
from studies.lab.linear_rows import (
    DIRECTION_RULE,
    LENGTH_RULE,
    by_seed,
    direction,
    length,
    mean_over,
    read_samples,
    rows_of,
    samples_file,
    worst_share,
    write_samples,
)
from studies.lab.nets import Tasks, Tuned, World, open_world, train_world
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import Finding, StudyResult, Table, with_interval
from studies.old.rows import Row
from studies.old.verdicts import within
from tasks.plotting.linearity import linearity_figure
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

ERROR = 0.2  # of Eq. 4
BASE = "base"


class Options(Section):
    """The study's choices. `world`: rotated digits. `scale`: the paper's λ. `scales`: of Eq. 3 and 4. `seeds`: of
    nets."""

    world: World
    scale: float = Field(gt=0)
    scales: list[float] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


DECLARED = Declaration(Options, systems=("L11", "L12", "L13"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_edits`."""
    options = DECLARED.chosen(io)
    tasks = Once(partial(open_world, options.world, io.root))
    pieces = kept_by_seed(io, options.seeds, partial(measure, io, options, tasks))
    rows = [row for piece in pieces for row in piece["rows"]]
    found = read_samples(samples_file(io, options.seeds[0]))
    result = StudyResult(tables(rows), findings(rows, options.scale, options.scales), [], rows)
    folder = result.write(io, {"edits": linearity_figure(found)})
    write_samples(found, folder / "samples.parquet")


def measure(io: StageIO, options: Options, tasks: Tasks, seed: int) -> dict[str, list[Row]]:
    """Return the rows of one seed.

    Args:
        io: the stage's files, where samples are kept.
        options: the study's choices.
        tasks: gives the world's tasks.
        seed: of weights and order.
    """
    done = train_world(options.world, tasks(), seed)
    found, rows, asked = measure_edits(done, options.scale, options.scales, seed=seed)
    write_samples(examples_of(found, asked, options.scale), samples_file(io, seed))
    return {"rows": rows}


Asked = Mapping[str, tuple[Combination, Row]]
"""Name → a combination, and what is known of it."""


def examples_of(
    found: Mapping[str, dict[str, Linearity]], asked: Asked, scale: float
) -> dict[str, dict[str, Linearity]]:
    """Return equation → what was found of the first of its combinations at a scale.

    Args:
        found: of each combination.
        asked: the combinations.
        scale: λ.
    """
    shown: dict[str, dict[str, Linearity]] = {}
    for name, (_, known) in asked.items():
        if known["scale"] == scale:
            shown.setdefault(known["equation"], found[name])
    return shown


def measure_edits(
    done: Tuned, scale: float, scales: Sequence[float], **known: Any
) -> tuple[dict[str, dict[str, Linearity]], list[Row], Asked]:
    """Measure the three equations at every layer; the edits of one task, or of one pair, are in memory at a time.

    Args:
        done: models tuned from one start.
        scale: λ of Eq. 2.
        scales: λ of Eq. 3 and 4.
        known: what else is in every row, such as the seed.

    Returns:
        What was found of each combination, its rows, and the combinations with what is known of them.
    """
    asked = edits(done.tuned, scale, scales)
    layers = find_layers(done.model.module)
    start = apart(done.start, done.model)  # which each pass loads other weights over
    found: dict[str, dict[str, Linearity]] = {}
    for tasks in dict.fromkeys(one.on for one, _ in asked.values()):
        own = {name: one for name, (one, _) in asked.items() if one.on == tasks}
        needed = dict.fromkeys(end for one in own.values() for end in one.weights)
        ends = {end: edited(start, done.tuned, end) for end in needed}
        sources = {task: done.tests[task] for task in done.tuned if task in (tasks or ())}
        found |= affine(done.model, sources, ends, own, layers, batch_size=500)
    rows = [row for name, (_, told) in asked.items() for row in rows_of({name: found[name]}, **known, **told)]
    return found, rows, asked


def edited(start: State, tuned: Mapping[str, State], end: str) -> State:
    """Return θ0 + λτ of an end of `edits`, named by task and λ, or θ0, named `base`.

    Args:
        start: θ0.
        tuned: task → θ_t.
        end: its name.
    """
    if end == BASE:
        return start
    task, _, by = end.rpartition(" ")
    return combine([start, tuned[task]], [1 - float(by), float(by)])


def edits(tasks: Iterable[str], scale: float, scales: Sequence[float]) -> dict[str, tuple[Combination, Row]]:
    """Return the combinations of each equation, with what is known of them.

    Args:
        tasks: whose models are edited.
        scale: λ of Eq. 2.
        scales: λ of Eq. 3 and 4.
    """
    asked: dict[str, tuple[Combination, Row]] = {}
    tasks = list(tasks)
    for reading, factor in (("2λ", 2.0), ("λ", 1.0)):
        for i, j in combinations(tasks, 2):
            pair = {f"{task} {factor * scale!r}": 0.5 for task in (i, j)}
            known = {"equation": f"Eq. 2, ends {reading}", "scale": scale, "tasks": f"{i} – {j}"}
            asked[f"{reading} {i} – {j}"] = Combination(pair, on=frozenset({i, j})), known
    for by in scales:
        for task in tasks:
            plus, minus, only = f"{task} {by!r}", f"{task} {-by!r}", frozenset({task})
            mirror = Combination({plus: 0.5, minus: 0.5}, on=only)
            asked[f"3 {task} {by:g}"] = mirror, {"equation": "Eq. 3", "scale": by, "tasks": task}
            less = Combination({BASE: 2.0, plus: -1.0}, on=only)
            asked[f"4 {task} {by:g}"] = less, {"equation": "Eq. 4", "scale": by, "tasks": task}
    return asked


def findings(rows: list[Row], scale: float, scales: Sequence[float]) -> list[Finding]:
    """Hold the equations against the rows.

    Args:
        rows: of all seeds.
        scale: λ at which Eq. 2 and 3 are judged.
        scales: λ at which Eq. 4 is.
    """
    found = []
    said = {
        "Eq. 2, ends 2λ": (
            "L11",
            "Adding two task vectors averages the features of the single edits (ends 2λ, as the text has it)",
        ),
        "Eq. 2, ends λ": ("L11", "The same with ends λ, as the captions have it"),
        "Eq. 3": ("L12", "The base's features are the mean of those of the edits ±λτ"),
    }
    for equation, (system, claim) in said.items():
        own = [row for row in rows if row["equation"] == equation and row["scale"] == scale]
        told, verdict = direction(own)
        found.append(Finding(system, f"{claim}: direction, λ = {scale:g}.", told, verdict, DIRECTION_RULE))
        told, verdict = length(own)
        found.append(Finding(system, f"{claim}: length, λ = {scale:g}.", told, verdict, LENGTH_RULE))
    for by in scales:
        errors = [max(row["error"] for row in own) for own in by_seed(rows, equation="Eq. 4", scale=by).values()]
        claim = "Negating a task vector mirrors the features: f(θ0 − λτ) ≈ 2f(θ0) − f(θ0 + λτ)"
        own = [row for row in rows if row["equation"] == "Eq. 4" and row["scale"] == by]
        for name, rule, written in (("direction", direction, DIRECTION_RULE), ("length", length, LENGTH_RULE)):
            told, verdict = rule(own)
            found.append(Finding("L13", f"{claim}: {name}, λ = {by:g}.", told, verdict, written, ours=by != scale))
        claim = f"{claim}, by the error, λ = {by:g}."
        found.append(
            Finding(
                "L13",
                claim,
                f"largest mean error {with_interval(errors, 2)}",
                within(errors, high=ERROR),
                f"mean ‖f − g‖²/‖g‖² ≤ {ERROR} for each task and layer",
                ours=True,
            )
        )
    return found


def tables(rows: list[Row]) -> list[Table]:
    """Return means by equation, λ and layer."""
    lines = []
    for equation, scale, layer in dict.fromkeys((row["equation"], row["scale"], row["layer"]) for row in rows):
        wanted = {"equation": equation, "scale": scale, "layer": layer}
        lines.append(
            {
                "equation": equation,
                "λ": scale,
                "layer": layer,
                "1 − cos": with_interval(mean_over(rows, "distance", **wanted), 4),
                "baseline": with_interval(mean_over(rows, "base", **wanted), 3),
                "worst share": with_interval([worst_share(own) for own in by_seed(rows, **wanted).values()], 2),
                "coef": with_interval(mean_over(rows, "coef", **wanted), 2),
                "error": with_interval(mean_over(rows, "error", **wanted), 3),
            }
        )
    return [Table("Means over pairs or tasks", lines)]
