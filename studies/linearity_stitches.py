"""Study `linearity_stitches`: can the back half of the base use averaged or mirrored features?

**Question.** Where features are linear in edits, the layers after a block should not mind whether a feature comes from
an edited net or from arithmetic on other nets' features. Is it so? Nothing is learned between the halves.

**Method.** The net is the base θ0 after a hidden layer, on a feature h of the layer; accuracy on test examples. All
pairs of tasks, all λ of the grid, layers counted from 1 (index 0-based: one less). Nets as of `linearity_edits`.

- *Addition*: h = ½ f(θ0 + λτ_i) + ½ f(θ0 + λτ_j); controls h = f(θ0 + λτ_i) and h = f(θ0 + λτ_j). x = accuracy on
  D_i, y on D_j. Judged at λ = 1, the paper's case of the fine-tuned models, and pooled over λ = 0.3, 0.5 and 1, which
  is ours.
- *Negation*: h = 2 f(θ0) − f(θ0 + λτ_i) beside h = f(θ0 − λτ_i); accuracy on D_i, and on the control task, which is
  the one of the pre-training (the paper does not say which its D_PT is for CLIP). The gap leaves λ = 0 out, where both
  features are the same by construction.

The base of turned pictures does know the control task, and has not unlearned it before it was tuned: negation can only
take from D_i what the upright pictures gave it. ± is over seeds: of nets. The paper prints no thresholds; all margins
are ours and were written before the run.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 4.3 and footnote 5, B.1.3, Figures 4 to 10; Ilharco et al.
2023, Editing models with task arithmetic.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.linearity.affine import combine
from mergeflow.linearity.layers import find_layers
from mergeflow.modality import State
from studies.lab import Claim, Row, Section, Study, curves, select
from studies.lab.claims import with_interval
from studies.lab.inputs import over_seeds
from studies.lab.linearity import Tasks, TunedModels, World, open_world, train_world
from studies.lab.plots import scatter, side_by_side
from studies.lab.rows import Samples
from studies.theory.linearity import front, stitch

BETTER, FROM = 0.8, 0.3  # share of (pair, λ ≥ .3) in which the average has the better minimum
DROP, GAP = 4.0, 5.0  # drop on D_i in drops on the control; points between the two kinds of negation for λ ≤ 1
NEGATED = 0.5  # λ at which D_i is still above chance
BATCH = 1000


class Halves:
    """Front halves of nets edited by task vectors, and the back half of their base, cut at several layers."""

    def __init__(self, done: TunedModels, layers: Sequence[str]) -> None:
        self.done, self.layers = done, layers
        self.of_base = cache(lambda on: self._front(done.start, on))
        self.base_alone = cache(lambda layer, on: self.accuracy([(1.0, self.of_base(on)[layer])], layer, on))
        self._alone: dict[tuple[str, float, str, str], float] = {}

    def fronts(self, task: str, scale: float, on: str) -> dict[str, Tensor]:
        """Return layer → f(θ0 + λτ) on the examples of a task, [n, …]; for λ = 0 those of the base, asked once."""
        if not scale:
            return self.of_base(on)
        return self._front(combine([self.done.start, self.done.tuned[task]], [1 - scale, scale]), on)

    def accuracy(self, terms: Sequence[tuple[float, Tensor]], layer: str, on: str) -> float:
        """Return the accuracy of the base's back half on Σ c f, in [0, 1]."""
        done = self.done
        return float(stitch(done.model, done.tests[on], done.start, layer, terms, batch_size=BATCH).mean())

    def alone(self, task: str, scale: float, layer: str, on: str, features: Tensor) -> float:
        """Return the accuracy on the features f(θ0 + λτ) of one edit alone, which several pairs ask for."""
        key = task, scale, layer, on
        if key not in self._alone:
            self._alone[key] = self.accuracy([(1.0, features)], layer, on)
        return self._alone[key]

    def _front(self, state: State, on: str) -> dict[str, Tensor]:
        return front(self.done.model, self.done.tests[on], state, self.layers, batch_size=BATCH)


def stitch_rows(
    done: TunedModels, layers: Sequence[str], add: Sequence[float], negate: Sequence[float], **settings: Any
) -> list[Row]:
    """Return the rows of additions of all pairs and negations of all tasks, by layer.

    Args:
        layers: where they are stitched; their index counts the model's from 1.
        add, negate: λ of additions and of negations.
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
    """Yield, by layer, accuracies in % of the averaged feature and of the two controls on D_i and D_j."""
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
    """Yield, by layer, accuracies in % of mirrored features and of the negated net's, which for λ = 0 are the base's.

    `first` is the accuracy on the task, `second` the mean over its controls.
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


class Options(Section):
    """The study's choices. `world`: turned pictures. `add`, `negate`: λ. `seeds`: of nets."""

    world: World
    add: list[float] = Field(min_length=1)
    negate: list[float] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


def stitches_of_seed(options: Options, tasks: Tasks, seed: int) -> list[Row]:
    """Return accuracies of stitched nets for each layer, λ, kind of feature, and pair or task."""
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
    """Return the claims on rows of `stitch_rows`, for layers by their index from 1 and λ of additions."""
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
    on_i = {"first": "accuracy on D_i, %"}
    return scatter(means, on_i, "second", "kind", y_label="accuracy on D_j, %", height=4.2)


def negation_figure(rows: pd.DataFrame) -> Figure:
    """Draw accuracy on D_i and on the control over λ, after the last hidden layer but one."""
    negations = select(middle_layer(rows), what="negation")
    columns = ["seed", "scale", "kind", "first", "second"]
    long = negations[columns].melt(columns[:3], columns[3:], "on", "accuracy")
    long = long.assign(on=long.kind + ", " + long.on.map({"first": "D_i", "second": "control"}))
    return curves(long, "scale", "on", title="Negation", x_label="λ", y_label="accuracy, %")


STUDY = Study(
    options=Options,
    systems=("L14", "L15"),
    measure=over_seeds(open_world, stitches_of_seed),
    claims=lambda options: claims_on_stitches(range(1, len(options.world.hidden) + 1), options.add),
    tables={
        "Addition: accuracy in %, mean over pairs": partial(stitch_table, what="addition"),
        "Negation: accuracy in %, mean over tasks": partial(stitch_table, what="negation"),
    },
    figures={"addition": addition_figure, "negation": negation_figure},
)
