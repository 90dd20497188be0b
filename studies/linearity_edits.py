"""Studies `linearity_edits`, `linearity_stitches`, `linearity_experts` (L1, L4, L11–L15): are features linear in edits?

**Question.** Task arithmetic adds and subtracts task vectors τ_t = θ_t − θ0. Does adding two of them average the
features of the single edits, and does negating one mirror the features about the base's (*edits*)? Then the layers
after a block should not mind whether a feature comes from an edited net or from arithmetic on other nets' features
(*stitches*); nothing is learned between the halves. Do the project's own experts, vision transformers tuned from one
CLIP, behave alike, and do the features of their averages too (*experts*)?

**Method of edits.** Nets tuned from one pre-trained net on turned pictures; every hidden layer, test examples of the
tasks involved:

    Eq. 2   f(θ0 + λ(τ_i + τ_j)) ≈ ½ f(θ0 + 2λτ_i) + ½ f(θ0 + 2λτ_j)           all pairs
    Eq. 3   f(θ0) ≈ ½ f(θ0 + λτ_i) + ½ f(θ0 − λτ_i)                            all tasks, on D_i
    Eq. 4   f(θ0 − λτ_i) ≈ 2 f(θ0) − f(θ0 + λτ_i)                              all tasks, on D_i

*Two readings of λ*: the paper's text has 2λ at the ends of Eq. 2, the captions of its figures λ (the merged model is
then θ0 + ½λ(τ_i + τ_j)); both are measured. The baseline of Eq. 2 and 3 is between the two ends, that of Eq. 4 between
f(θ0 + λτ_i) and f(θ0). Of Eq. 4 the paper shows accuracies alone: the equation is its own, and its error by layer is
ours. Its rule bounds error / ‖g‖² and has no baseline, so that it is laxer than that of Eq. 2 and 3, by which λ = 0.2
would be undecided on digits (worst share 0.31 ± 0.04).

**Method of stitches.** The net is the base θ0 after a hidden layer, on a feature h of the layer; accuracy on test
examples. All pairs of tasks, all λ of the grid, layers counted from 1 (index 0-based: one less).

- *Addition*: h = ½ f(θ0 + λτ_i) + ½ f(θ0 + λτ_j); controls h = f(θ0 + λτ_i) and h = f(θ0 + λτ_j). x = accuracy on
  D_i, y on D_j. Judged at λ = 1, the paper's case of the fine-tuned models, and pooled over λ = 0.3, 0.5 and 1, which
  is ours.
- *Negation*: h = 2 f(θ0) − f(θ0 + λτ_i) beside h = f(θ0 − λτ_i); accuracy on D_i, and on the control task, which is
  the one of the pre-training (the paper does not say which its D_PT is for CLIP). The gap leaves λ = 0 out, where both
  features are the same by construction.

The base of turned pictures does know the control task, and has not unlearned it before it was tuned: negation can only
take from D_i what the upright pictures gave it.

**Method of experts.** The experts of one training run, one for each task, from the project's base. f is a block's
output of all tokens, flattened; test examples, the first of every task. *Edits* and *stitches* as above; the control
task of a negation are all the other tasks: their mean. *Pairs* (L1): αθ_i + (1 − α)θ_j against αf(θ_i) + (1 − α)f(θ_j),
all pairs, α ∈ {¼, ½, ¾}, examples of both tasks; the baseline is between the two experts. *Modes* (L4): the loss along
the path, on D_i and on D_j, each with its own head. Linear mode connectivity holds where the ends differ by at most 0.1
nat and the barrier is at most 0.1 nat. No path has a barrier above its chord (280 of a pair, a data set and a seed): it
fails because expert i is worse on D_j than expert j, as in the paper. The column "gap of the loss" has the smaller of a
pair's two.

± is over seeds: of nets, or of the order of the experts' batches. The paper prints no thresholds; all margins are ours
and were written before the run. `fashion_edits` is `linearity_edits` on real pictures, Fashion-MNIST (worlds/fashion).

**Source.** Zhou et al. 2024, Cross-Task Linearity, Sections 4.2 and 4.3 and footnote 5, B.1.3, Figures 4 to 10; Ilharco
et al. 2023, Editing models with task arithmetic.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.errors import MergeflowError
from mergeflow.linearity.affine import Combination, Linearity, affine, clone_shared, combine
from mergeflow.linearity.layers import find_layers
from mergeflow.linearity.pairs import measure_pairs
from mergeflow.modalities.classification import Subset
from mergeflow.modality import State
from studies.lab import Claim, Laboratory, Row, Section, Study, curves, select, table
from studies.lab.claims import with_interval
from studies.lab.linearity import (
    ENDS,
    Tasks,
    Tuned,
    TunedModels,
    World,
    by_seed,
    direction,
    farthest_pairs,
    layer_table,
    layers_figure,
    length,
    loss_gaps,
    not_connected,
    path_rows,
    rows_of,
    train_world,
    worst_share,
)
from studies.lab.plots import side_by_side
from studies.lab.rows import Samples
from studies.theory.linearity import front, stitch
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style

BASE = "base"
ALPHAS = (0.25, 0.5, 0.75)
BETTER, FROM = 0.8, 0.3  # share of (pair, λ ≥ .3) in which the average has the better minimum
DROP, GAP = 4.0, 5.0  # drop on D_i in drops on the control; points between the two kinds of negation for λ ≤ 1
NEGATED = 0.5  # λ at which D_i is still above chance
BATCH = 1000


# Edits


class EditOptions(Section):
    """Choices of edits. `world`: turned pictures. `scale`: the paper's λ. `scales`: of Eq. 3 and 4. `seeds`: of
    nets."""

    world: World
    scale: float = Field(gt=0)
    scales: list[float] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


def measure_all_edits(lab: Laboratory, options: EditOptions) -> Iterator[Row]:
    """Yield one row for each seed, equation, λ, tasks and layer."""
    yield from by_seed(lab, options.world, partial(edits_of_seed, options), options.seeds)


def edits_of_seed(options: EditOptions, tasks: Tasks, seed: int) -> list[Row]:
    return measure_edits(train_world(options.world, tasks(), seed), options.scale, options.scales, seed=seed)


Asked = Mapping[str, tuple[Combination, Row]]
"""Name → a combination, and what its rows say of it."""


def measure_edits(
    done: Tuned,
    scale: float,
    scales: Sequence[float],
    compared: dict[str, dict[str, Linearity]] | None = None,
    **settings: Any,
) -> list[Row]:
    """Return rows of the three equations at every layer; edits of one task or pair are in memory at a time.

    Args:
        done: models tuned from one start.
        scale: λ of Eq. 2.
        scales: λ of Eq. 3 and 4.
        compared: gets the values of all samples by combination and layer, where they are asked for.
        settings: what else is in every row, such as the seed.
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
    """Return the combinations of each equation, with what their rows say of them.

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


EDITS = Study(
    question="are features linear in task arithmetic's edits, adding and negating?",
    options=EditOptions,
    systems=("L11", "L12", "L13"),
    measure=measure_all_edits,
    claims=lambda options: claims_on_edits(options.scale, options.scales),
    tables={"Means over pairs or tasks": lambda rows: layer_table(rows, "equation", "scale", "layer")},
    figures=lambda options: {"edits": lambda rows: layers_figure(select(rows, scale=options.scale), "equation")},
)


# Stitches


class Halves:
    """Front halves of nets edited by task vectors, and the back half of their base, cut at several layers.

    Args:
        done: models tuned from one start.
        layers: where they are cut.
    """

    def __init__(self, done: Tuned, layers: Sequence[str]) -> None:
        self.done, self.layers = done, layers
        self.of_base = cache(lambda on: self._front(done.start, on))
        self.base_alone = cache(lambda layer, on: self.accuracy([(1.0, self.of_base(on)[layer])], layer, on))
        self._alone: dict[tuple[str, float, str, str], float] = {}

    def fronts(self, task: str, scale: float, on: str) -> dict[str, Tensor]:
        """Return layer → f(θ0 + λτ) on a task's examples, [n, …]; for λ = 0 those of the base, which is asked once.

        Args:
            task: whose task vector τ is.
            scale: λ.
            on: whose examples are looked at.
        """
        if not scale:
            return self.of_base(on)
        return self._front(combine([self.done.start, self.done.tuned[task]], [1 - scale, scale]), on)

    def accuracy(self, terms: Sequence[tuple[float, Tensor]], layer: str, on: str) -> float:
        """Return the accuracy of the base's back half on Σ c f, in [0, 1]."""
        done = self.done
        return float(stitch(done.model, done.tests[on], done.start, layer, terms, batch_size=BATCH).mean())

    def alone(self, task: str, scale: float, layer: str, on: str, features: Tensor) -> float:
        """Return the accuracy on one edit's features alone, which several pairs ask for and one computes.

        Args:
            task: whose task vector τ is.
            scale: λ.
            layer: the layer.
            on: whose examples they are features of.
            features: f(θ0 + λτ) there, [n, …].
        """
        key = task, scale, layer, on
        if key not in self._alone:
            self._alone[key] = self.accuracy([(1.0, features)], layer, on)
        return self._alone[key]

    def _front(self, state: State, on: str) -> dict[str, Tensor]:
        return front(self.done.model, self.done.tests[on], state, self.layers, batch_size=BATCH)


def stitch_rows(
    done: Tuned, layers: Sequence[str], add: Sequence[float], negate: Sequence[float], **settings: Any
) -> list[Row]:
    """Return the rows of additions of all pairs and negations of all tasks, by layer.

    Args:
        done: models tuned from one start.
        layers: where they are stitched; their index counts the model's from 1.
        add: λ of additions.
        negate: λ of negations.
        settings: what else is in every row, such as the seed.
    """
    indices = {layer: number for number, layer in enumerate(find_layers(done.model.module), 1) if layer in layers}
    halves = Halves(done, list(indices))
    rows: list[Row] = []
    for i, j in combinations(done.tuned, 2):
        for scale in add:
            about = {"what": "addition", "tasks": f"{i} – {j}", "scale": scale}
            rows += [{**settings, **about, **row} for row in addition(halves, i, j, scale)]
    for task in done.tuned:
        for scale in negate:
            about = {"what": "negation", "tasks": task, "scale": scale}
            rows += [{**settings, **about, **row} for row in negation(halves, task, scale)]
    return sorted(({**row, "index": indices[row["layer"]]} for row in rows), key=lambda row: row["index"])


def addition(halves: Halves, i: str, j: str, scale: float) -> Iterator[Row]:
    """Yield, by layer, accuracies in % of the averaged feature and of the two controls on D_i and D_j.

    Args:
        halves: of the nets of one seed.
        i: the first task.
        j: the second task.
        scale: λ of both task vectors.
    """
    features = {(task, on): halves.fronts(task, scale, on) for task in (i, j) for on in (i, j)}
    for layer in halves.layers:
        accuracies = {
            "average": [
                halves.accuracy([(0.5, features[i, on][layer]), (0.5, features[j, on][layer])], layer, on)
                for on in (i, j)
            ]
        }
        for kind, task in (("only i", i), ("only j", j)):
            accuracies[kind] = [halves.alone(task, scale, layer, on, features[task, on][layer]) for on in (i, j)]
        for kind, (first, second) in accuracies.items():
            yield {"layer": layer, "kind": kind, "first": 100 * first, "second": 100 * second}


def negation(halves: Halves, task: str, scale: float) -> Iterator[Row]:
    """Yield, by layer, accuracies in % of mirrored features and of the negated net's.

    Args:
        halves: of the nets of one seed.
        task: i, whose task vector is negated; `first` is the accuracy on it.
        scale: λ of the task vector; for 0 both kinds are the base.

    Yields:
        Rows whose `second` is the mean over the control tasks.
    """
    controls = halves.done.controls(task)
    accuracies: dict[tuple[str, str, str], float] = {}
    for on in (task, *controls):
        base, plus, minus = (halves.fronts(task, by, on) for by in (0.0, scale, -scale))
        for layer in halves.layers:
            terms = {"mirrored": [(2.0, base[layer]), (-1.0, plus[layer])], "negated": [(1.0, minus[layer])]}
            for kind, states in terms.items():
                value = halves.accuracy(states, layer, on) if scale else halves.base_alone(layer, on)
                accuracies[layer, kind, on] = value
    for layer, kind in dict.fromkeys(key[:2] for key in accuracies):
        second = float(np.mean([accuracies[layer, kind, on] for on in controls]))
        yield {"layer": layer, "kind": kind, "first": 100 * accuracies[layer, kind, task], "second": 100 * second}


class StitchOptions(Section):
    """Choices of stitches. `world`: turned pictures. `add`, `negate`: λ. `seeds`: of nets."""

    world: World
    add: list[float] = Field(min_length=1)
    negate: list[float] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


def measure_stitches(lab: Laboratory, options: StitchOptions) -> Iterator[Row]:
    """Yield accuracies of stitched nets for each seed, layer, λ, kind of feature, and pair or task."""
    yield from by_seed(lab, options.world, partial(stitches_of_seed, options), options.seeds)


def stitches_of_seed(options: StitchOptions, tasks: Tasks, seed: int) -> list[Row]:
    done = train_world(options.world, tasks(), seed)
    return stitch_rows(done, find_layers(done.model.module), options.add, options.negate, seed=seed)


def better(rows: pd.DataFrame, index: int, scales: Sequence[float]) -> Samples:
    """Return the share of (pair, λ) in which the averaged feature has a larger minimum than both controls."""
    additions = select(rows, what="addition", index=index, scale=list(scales))
    least = additions.assign(least=additions[["first", "second"]].min(axis=1))
    wide = least.pivot(index=["seed", "tasks", "scale"], columns="kind", values="least")
    return {"share": (wide["average"] > wide[["only i", "only j"]].max(axis=1)).groupby("seed").mean()}


def drops(rows: pd.DataFrame, index: int) -> pd.DataFrame:
    """Return the loss of mirrored features from λ = 0 to `NEGATED`, in points: `first` on D_i, `second`."""
    mirrored = select(rows, what="negation", kind="mirrored", index=index)
    means = mirrored.groupby(["scale", "seed"])[["first", "second"]].mean()
    scales = means.index.unique("scale")
    return means.loc[scales.min()] - means.loc[scales[scales <= NEGATED].max()]


def margin(rows: pd.DataFrame, index: int) -> Samples:
    lost = drops(rows, index)
    return {f"drop on D_i less {DROP:g} × that on the control": lost["first"] - DROP * lost["second"]}


def both_drops(rows: pd.DataFrame, index: int) -> str:
    lost = drops(rows, index)
    first, second = with_interval(lost["first"]), with_interval(lost["second"])
    return f"; the drop on D_i is {first} points, on the control {second}"


def gaps(rows: pd.DataFrame, index: int) -> Samples:
    """Return the mean gap of the two ways to negate on D_i and on the control; at λ = 0 there is none."""
    negations = select(rows, what="negation", index=index)
    negations = negations[(negations.scale > 0) & (negations.scale <= 1)]
    wide = negations.pivot(index=["seed", "tasks", "scale"], columns="kind", values=["first", "second"])
    names = {"first": "mean gap on D_i", "second": "on the control"}
    distances = {name: (wide[key, "mirrored"] - wide[key, "negated"]).abs() for key, name in names.items()}
    return {name: values.groupby("seed").mean() for name, values in distances.items()}


# fmt: off
def claims_on_stitches(indices: Sequence[int], add: Sequence[float]) -> list[Claim]:
    """Return the claims on rows of `stitch_rows`.

    Args:
        indices: of the layers, from 1.
        add: λ of additions.
    """
    serves = "serves both tasks, a single one its own only"
    larger = "share of (pair, λ) whose minimum is larger than that of both controls,"
    claims: list[Claim] = []
    for index in sorted(indices):
        place = f"after hidden layer {index} (index {index - 1} from 0)"
        made = [
            Claim("L14", f"The finetuned models' averaged feature (λ = 1) {serves}.",
                  partial(better, index=index, scales=[1.0]), low=BETTER, of=f"{larger} λ = 1", unit="", digits=2,
                  caveat=f"{BETTER:g} is ours, the paper prints no share"),
            Claim("L14", f"The averaged feature {serves}.",
                  partial(better, index=index, scales=[by for by in add if by >= FROM]), low=BETTER,
                  of=f"{larger} λ ≥ {FROM}", unit="", digits=2, ours=True),
            Claim("L15", "With λ accuracy falls on D_i and stays on the control task.",
                  partial(margin, index=index), low=0,
                  of=f"drop on D_i less {DROP:g} × that on the control, λ = {NEGATED:g},",
                  caveat=f"{DROP:g} × is ours; the control are the other tasks, not ImageNet",
                  also=partial(both_drops, index=index)),
            Claim("L15",
                  "Mirrored features and the negated net's give the same accuracies on both tasks (Eq. 4).",
                  partial(gaps, index=index), high=GAP, of="mean gap for 0 < λ ≤ 1, on each,"),
        ]
        claims += [replace(claim, setting=place) for claim in made]
    return claims
# fmt: on


def stitch_table(rows: pd.DataFrame, what: str) -> pd.DataFrame:
    """Return means over pairs or tasks: `first` on D_i, `second` on D_j, or on the control of a negation."""
    chosen, key = select(rows, what=what), ["index", "scale", "kind"]
    return side_by_side(chosen, key, {"first": "first", "second": "second"})


def middle_layer(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the last hidden layer but one."""
    return select(rows, index=sorted(rows["index"].dropna().unique())[-2:][0])


def addition_figure(rows: pd.DataFrame) -> Figure:
    """Draw means over seeds and λ ≥ 0.3 of each pair as points (D_i, D_j), after the last hidden layer but one."""
    additions = select(middle_layer(rows), what="addition")
    additions = additions[additions.scale >= FROM]
    means = additions.groupby(["kind", "tasks"], sort=False)[["first", "second"]].mean().reset_index()
    figure, (panel,) = panels(1, 1, 4.2)
    dress(panel, "Addition", "accuracy on D_i, %", "accuracy on D_j, %", grid="both")
    for number, (kind, points) in enumerate(means.groupby("kind", sort=False)):
        panel.plot(points["first"], points.second, label=kind, **series_style(number) | {"linestyle": ""})
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def negation_figure(rows: pd.DataFrame) -> Figure:
    """Draw accuracy on D_i and on the control over λ, after the last hidden layer but one."""
    negations = select(middle_layer(rows), what="negation")
    columns = ["seed", "scale", "kind", "first", "second"]
    long = negations[columns].melt(columns[:3], columns[3:], "on", "accuracy")
    long = long.assign(on=long.kind + ", " + long.on.map({"first": "D_i", "second": "control"}))
    return curves(long, "scale", "on", title="Negation", x_label="λ", y_label="accuracy, %")


STITCHES = Study(
    question="can the back half of the base use averaged or mirrored features?",
    options=StitchOptions,
    systems=("L14", "L15"),
    measure=measure_stitches,
    claims=lambda options: claims_on_stitches(range(1, len(options.world.hidden) + 1), options.add),
    tables={
        "Addition: accuracy in %, mean over pairs": partial(stitch_table, what="addition"),
        "Negation: accuracy in %, mean over tasks": partial(stitch_table, what="negation"),
    },
    figures={"addition": addition_figure, "negation": negation_figure},
)


# Experts


class ExpertOptions(Section):
    """Choices of experts.

    run: whose experts are looked at. images: of each task. path: number of α of the loss between two experts, ends
    among them. scale, scales: λ of edits. add, negate: λ of stitches. blocks: where they are, from 1.
    """

    run: str
    images: int = Field(ge=32)
    path: int = Field(ge=3)
    scale: float = Field(gt=0)
    scales: list[float] = Field(min_length=1)
    add: list[float] = Field(min_length=1)
    negate: list[float] = Field(min_length=1)
    blocks: list[int] = Field(min_length=1)


def measure_experts(lab: Laboratory, options: ExpertOptions) -> Iterator[Row]:
    """Yield rows for each seed: `pairs` by layer and α, `paths` of losses, `edits`, `stitches`."""
    yield from lab.by_seed(partial(experts_of_seed, lab, options), lab.run(options.run).seeds)


def experts_of_seed(lab: Laboratory, options: ExpertOptions, seed: int) -> Iterator[Row]:
    """Yield the rows of one seed's experts.

    Raises:
        MergeflowError: the model has fewer blocks than the choices name.
    """
    tests = {task: Subset.first(examples, options.images) for task, examples in lab.examples("test").items()}
    done = TunedModels(lab.model, lab.base, lab.run(options.run).experts(seed), tests)
    layers = find_layers(done.model.module)
    if max(options.blocks) > len(layers) or min(options.blocks) < 1:
        raise MergeflowError(
            f"studies.{lab.io.stage.name}.blocks is {options.blocks}, but the model has {len(layers)} blocks: "
            f"expected 1 to {len(layers)}."
        )
    edits = measure_edits(done, options.scale, options.scales, seed=seed)
    for compared in measure_pairs(done.model, done.tests, done.tuned, layers, ALPHAS, on_own_tasks=True):
        name = f"{compared.first} – {compared.second}"
        for alpha, by_layer in compared.samples.items():
            yield from rows_of({name: by_layer}, part="pairs", seed=seed, alpha=alpha)
    alphas = [round(step / (options.path - 1), 6) for step in range(options.path)]
    for i, j in combinations(done.tuned, 2):
        both = {task: done.tests[task] for task in (i, j)}
        ends = done.tuned[i], done.tuned[j]
        yield from path_rows(done.model, ends, both, alphas, part="paths", seed=seed, pair=f"{i} – {j}")
    yield from ({"part": "edits", **row} for row in edits)
    blocks = [layers[block - 1] for block in options.blocks]
    stitched = stitch_rows(done, blocks, options.add, options.negate, seed=seed)
    yield from ({"part": "stitches", **row} for row in stitched)


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, part="pairs")


def smallest_gap(rows: pd.DataFrame) -> Samples:
    return {"smallest": loss_gaps(select(rows, part="paths")).groupby("seed").gap.min()}


def claims_on_experts(options: ExpertOptions) -> list[Claim]:
    return [
        direction(
            "L1",
            "Features of averaged experts point where their averaged features do, in all pairs, blocks and α.",
            pairs,
        ),
        length("L1", "Features of averaged experts have the length of their averaged features too.", pairs),
        not_connected("on D_i and D_j", smallest_gap, ENDS),
        *claims_on_edits(options.scale, options.scales),
        *claims_on_stitches(options.blocks, options.add),
    ]


def pair_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return each pair's worst share, and its smaller gap of the loss of its two tasks."""
    shares = {name: worst_share(features) for name, features in pairs(rows).groupby("combination", sort=False)}
    long = pd.DataFrame(shares).rename_axis(columns="pair").stack().rename("share").reset_index()
    gaps = loss_gaps(select(rows, part="paths")).groupby(["pair", "seed"], sort=False).gap.min().reset_index()
    return pd.concat([table(long, "pair", value="share", digits=3), table(gaps, "pair", value="gap", digits=2)], axis=1)


EXPERTS = Study(
    question="are the features of the project's own experts linear in their weights?",
    options=ExpertOptions,
    runs=lambda options: [options.run],
    splits=("test",),
    systems=("L1", "L4", "L11", "L12", "L13", "L14", "L15"),
    measure=measure_experts,
    claims=claims_on_experts,
    tables={
        "Pairs: means over pairs and α, by block": lambda rows: layer_table(pairs(rows), "layer"),
        "Pairs, all α: worst share, and gap of the loss in nats": pair_table,
        "Edits: means over pairs or tasks": lambda rows: layer_table(
            select(rows, part="edits"), "equation", "scale", "layer"
        ),
        "Addition of stitched features: accuracy in %, mean over pairs": partial(stitch_table, what="addition"),
        "Negation of stitched features: accuracy in %, mean over tasks": partial(stitch_table, what="negation"),
    },
    figures={
        "pairs": lambda rows: layers_figure(farthest_pairs(pairs(rows), [0, 1]), "combination"),
        "addition": addition_figure,
        "negation": negation_figure,
    },
)

STUDIES = {
    "linearity_edits": EDITS,
    "fashion_edits": EDITS,
    "linearity_stitches": STITCHES,
    "linearity_experts": EXPERTS,
}
