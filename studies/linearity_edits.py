"""Study `linearity_edits`: are features linear in task arithmetic's edits, adding and negating?

**Question.** Task arithmetic adds and subtracts task vectors τ_t = θ_t − θ0. Does adding two of them average the
features of the single edits, and does negating one mirror the features about the base's?

**Method.** Nets tuned from one pre-trained net on turned pictures; every hidden layer, test examples of the tasks
involved:

    Eq. 2   f(θ0 + λ(τ_i + τ_j)) ≈ ½ f(θ0 + 2λτ_i) + ½ f(θ0 + 2λτ_j)           all pairs
    Eq. 3   f(θ0) ≈ ½ f(θ0 + λτ_i) + ½ f(θ0 − λτ_i)                            all tasks, on D_i
    Eq. 4   f(θ0 − λτ_i) ≈ 2 f(θ0) − f(θ0 + λτ_i)                              all tasks, on D_i

*Two readings of λ*: the paper's text has 2λ at the ends of Eq. 2, the captions of its figures λ (the merged model is
then θ0 + ½λ(τ_i + τ_j)); both are measured. The baseline of Eq. 2 and 3 is between the two ends, that of Eq. 4 between
f(θ0 + λτ_i) and f(θ0). Of Eq. 4 the paper shows accuracies alone: the equation is its own, and its error by layer is
ours. Its rule bounds error / ‖g‖² and has no baseline, so that it is laxer than that of Eq. 2 and 3, by which λ = 0.2
would be undecided on digits (worst share 0.31 ± 0.04). ± is over seeds: of nets. The paper prints no thresholds; all
margins are ours and were written before the run. `fashion_edits` is the same on real pictures, Fashion-MNIST
(worlds/fashion).

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 4.3, B.1.3, Figures 4 to 10; Ilharco et al. 2023, Editing
models with task arithmetic.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import pandas as pd
from pydantic import Field

from mergeflow.linearity.affine import Combination, Linearity, affine, clone_shared, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import State
from studies.lab import Claim, Row, Section, Study, select
from studies.lab.inputs import over_seeds
from studies.lab.linearity import (
    Tasks,
    TunedModels,
    World,
    direction,
    layer_table,
    layers_figure,
    length,
    open_world,
    rows_of,
    train_world,
)

BASE = "base"


class Options(Section):
    world: World  # turned pictures
    scale: float = Field(gt=0)  # the paper's λ
    scales: list[float] = Field(min_length=1)  # of Eq. 3 and 4
    seeds: list[int] = Field(min_length=1)  # of nets


def edits_of_seed(options: Options, tasks: Tasks, seed: int) -> list[Row]:
    """Return one row for each equation, λ, tasks and layer."""
    return measure_edits(train_world(options.world, tasks(), seed), options.scale, options.scales, seed=seed)


Asked = Mapping[str, tuple[Combination, Row]]
"""Name → a combination, and what its rows say of it."""


def measure_edits(
    done: TunedModels,
    scale: float,
    scales: Sequence[float],
    compared: dict[str, dict[str, Linearity]] | None = None,
    **settings: Any,
) -> list[Row]:
    """Return rows of the three equations at every layer; edits of one task or pair are in memory at a time.

    Args:
        scale: λ of Eq. 2.
        scales: λ of Eq. 3 and 4.
        compared: gets the values of all samples by combination and layer, where they are asked for.
    """
    asked = edits(done.tuned, scale, scales)
    layers = find_layers(done.model.module)
    start = clone_shared(done.start, done.model)  # which each pass loads other weights over
    samples: dict[str, dict[str, Linearity]] = {} if compared is None else compared
    for tasks in dict.fromkeys(edit.on for edit, _ in asked.values()):
        chosen = {name: edit for name, (edit, _) in asked.items() if edit.on == tasks}
        needed = dict.fromkeys(end for edit in chosen.values() for end in edit.weights)
        ends = {end: edited(start, done.tuned, end) for end in needed}
        sources = {task: done.tests[task] for task in done.tuned if task in (tasks or ())}
        samples |= affine(done.model, sources, ends, chosen, layers, batch_size=500)
    return [row for name, (_, about) in asked.items() for row in rows_of({name: samples[name]}, **settings, **about)]


def edited(start: State, tuned: Mapping[str, State], end: str) -> State:
    """Return θ0 + λτ of an end of `edits`, named by task and λ, or θ0, named `base`."""
    if end == BASE:
        return start
    task, _, by = end.rpartition(" ")
    return combine([start, tuned[task]], [1 - float(by), float(by)])


def edits(tasks: Iterable[str], scale: float, scales: Sequence[float]) -> dict[str, tuple[Combination, Row]]:
    """Return the combinations of Eq. 2 at one λ and of Eq. 3 and 4 at several, with what their rows say of them."""
    asked: dict[str, tuple[Combination, Row]] = {}
    tasks = list(tasks)
    for reading, factor in (("2λ", 2.0), ("λ", 1.0)):
        for i, j in combinations(tasks, 2):
            pair = {f"{task} {factor * scale!r}": 0.5 for task in (i, j)}
            about = {"equation": f"Eq. 2, ends {reading}", "scale": scale, "tasks": f"{i} – {j}"}
            asked[f"{reading} {i} – {j}"] = Combination(pair, on=frozenset({i, j})), about
    for by in scales:
        for task in tasks:
            plus, minus, only = f"{task} {by!r}", f"{task} {-by!r}", frozenset({task})
            mirror = Combination({plus: 0.5, minus: 0.5}, on=only)
            asked[f"3 {task} {by:g}"] = mirror, {"equation": "Eq. 3", "scale": by, "tasks": task}
            less = Combination({BASE: 2.0, plus: -1.0}, on=only)
            asked[f"4 {task} {by:g}"] = less, {"equation": "Eq. 4", "scale": by, "tasks": task}
    return asked


def claims_on_edits(scale: float, scales: Sequence[float]) -> list[Claim]:
    """Return the claims on rows of `measure_edits`: Eq. 2 and 3 at the paper's λ, Eq. 4 at each."""
    adding = "Adding two task vectors averages the features of the single edits"
    says = {
        "Eq. 2, ends 2λ": ("L11", adding, "ends 2λ, as the text has it"),
        "Eq. 2, ends λ": ("L11", adding, "ends λ, as the captions have it"),
        "Eq. 3": ("L12", "The base's features are the mean of those of the edits ±λτ", f"λ = {scale:g}"),
    }
    claims: list[Claim] = []
    for equation, (system, sentence, where) in says.items():
        rows = partial(select, equation=equation, scale=scale)
        made = direction(system, f"{sentence}: direction.", rows), length(system, f"{sentence}: length.", rows)
        claims += [replace(claim, setting=where) for claim in made]
    negating = "Negating a task vector mirrors the features: f(θ0 − λτ) ≈ 2f(θ0) − f(θ0 + λτ)"
    for by in scales:
        rows, ours = partial(select, equation="Eq. 4", scale=by), by != scale
        error = Claim("L13", f"{negating}: by the error.", partial(largest_error, scale=by), high=0.2, unit="",
                      of="mean ‖f − g‖²/‖g‖² of each task and layer", digits=2, ours=True)  # fmt: skip
        both = (
            direction("L13", f"{negating}: direction.", rows, ours),
            length("L13", f"{negating}: length.", rows, ours),
        )
        claims += [replace(claim, setting=f"λ = {by:g}") for claim in (*both, error)]
    return claims


def largest_error(rows: pd.DataFrame, scale: float) -> dict[str, pd.Series]:
    return {"largest mean error": select(rows, equation="Eq. 4", scale=scale).groupby("seed").error.max()}


STUDY = Study(
    options=Options,
    systems=("L11", "L12", "L13"),
    measure=over_seeds(open_world, edits_of_seed),
    claims=lambda options: claims_on_edits(options.scale, options.scales),
    tables={"Means over pairs or tasks": lambda rows: layer_table(rows, "equation", "scale", "layer")},
    figures=lambda options: {"edits": lambda rows: layers_figure(select(rows, scale=options.scale), "equation")},
)

STUDIES = {"linearity_edits": STUDY, "fashion_edits": STUDY}
