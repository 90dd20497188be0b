"""Study `linearity_stitches` (L14, L15): can the back half of the base use averaged or mirrored features?

**Question.** If features are linear in edits, the layers after a block should not mind whether a feature comes from an
edited net or from arithmetic on other nets' features. Nothing is learned between the halves.

**Method.** The net is the base θ0 after a hidden layer, on a feature h of the layer; accuracy on test examples. All
pairs of tasks, all λ of the grid, layers counted from 1 (index 0-based: one less).

- *Addition*: h = ½ f(θ0 + λτ_i) + ½ f(θ0 + λτ_j); controls h = f(θ0 + λτ_i) and h = f(θ0 + λτ_j). x = accuracy on
  D_i, y on D_j.
- *Negation*: h = 2 f(θ0) − f(θ0 + λτ_i) beside h = f(θ0 − λτ_i); accuracy on D_i, and on the control task, which is
  the one of the pre-training (the paper does not say which its D_PT is for CLIP).

Margins are ours and were written before the run. The base of rotated digits does know the control task, and has not
unlearned it before it was tuned: negation can only take from D_i what the upright digits gave it.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 4.3 and footnote 5, Figures 9 and 10.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import combinations
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.linearity.affine import combine
from mergeflow.linearity.layers import find_layers
from mergeflow.linearity.stitch import front, stitch
from mergeflow.modality import State
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style
from tasks.plotting.intervals import curve
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO
from tasks.studies.linear_rows import by_seed
from tasks.studies.nets import Tasks, Tuned, World, open_world, train_world
from tasks.studies.pieces import kept_by_seed, once
from tasks.studies.results import Finding, StudyResult, Table, with_interval
from tasks.studies.rows import Row
from tasks.studies.verdicts import within

BETTER, FROM = 0.8, 0.3  # share of (pair, λ ≥ .3) in which the average has the better minimum
BATCH = 1000
DROP, GAP = 4.0, 5.0  # drop on D_i in drops on the control; points between the two kinds of negation for λ ≤ 1


class Options(Section):
    """The study's choices. `world`: rotated digits. `add`, `negate`: λ. `seeds`: of nets."""

    world: World
    add: list[float] = Field(min_length=1)
    negate: list[float] = Field(min_length=1)
    seeds: list[int] = Field(min_length=1)


DECLARED = Declaration(Options, systems=("L14", "L15"))


def run(io: StageIO) -> None:
    """Write `outputs/studies/linearity_stitches`."""
    options = DECLARED.chosen(io)
    tasks = once(partial(open_world, options.world, io.root))
    pieces = kept_by_seed(io, options.seeds, partial(measure, options, tasks))
    rows = [row for piece in pieces for row in piece["rows"]]
    result = StudyResult(tables(rows), findings(rows), [], rows)
    result.write(io, {"stitches": stitch_figure(rows)})


def measure(options: Options, tasks: Tasks, seed: int) -> dict[str, list[Row]]:
    """Return the rows of one seed.

    Args:
        options: the study's choices.
        tasks: gives the world's tasks.
        seed: of weights and order.
    """
    done = train_world(options.world, tasks(), seed)
    return {"rows": stitch_rows(done, find_layers(done.model.module), options.add, options.negate, seed=seed)}


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
        """Return layer → f(θ0 + λτ) on a task's examples, [n, …]; for λ = 0 what is kept of the base.

        Args:
            task: whose task vector τ is.
            scale: λ.
            on: whose examples are looked at.
        """
        if not scale:
            return self.of_base(on)
        return self._front(combine([self.done.start, self.done.tuned[task]], [1 - scale, scale]), on)

    def accuracy(self, terms: Sequence[tuple[float, Tensor]], layer: str, on: str) -> float:
        """Return the accuracy of the base's back half on Σ c f, in [0, 1].

        Args:
            terms: (c, f), features of a layer.
            layer: the layer.
            on: whose examples they are features of.
        """
        done = self.done
        return float(stitch(done.model, done.tests[on], done.start, layer, terms, batch_size=BATCH).mean())

    def alone(self, task: str, scale: float, layer: str, on: str, features: Tensor) -> float:
        """Return the accuracy on one edit's features alone, which several pairs ask for and one computes.

        Args:
            task: whose task vector τ is.
            scale: λ.
            layer: the layer.
            on: whose examples they are features of.
            features: f(θ0 + λτ) there.
        """
        key = task, scale, layer, on
        if key not in self._alone:
            self._alone[key] = self.accuracy([(1.0, features)], layer, on)
        return self._alone[key]

    def _front(self, state: State, on: str) -> dict[str, Tensor]:
        return front(self.done.model, self.done.tests[on], state, self.layers, batch_size=BATCH)


def stitch_rows(
    done: Tuned, layers: Sequence[str], add: Sequence[float], negate: Sequence[float], **known: Any
) -> list[Row]:
    """Return the rows of additions of all pairs and negations of all tasks, by layer.

    Args:
        done: models tuned from one start.
        layers: where they are stitched; their index counts the model's from 1.
        add: λ of additions.
        negate: λ of negations.
        known: what else is in every row, such as the seed.
    """
    indices = {layer: number for number, layer in enumerate(find_layers(done.model.module), 1) if layer in layers}
    halves = Halves(done, list(indices))
    rows: list[Row] = []
    for i, j in combinations(done.tuned, 2):
        for scale in add:
            known_here = {"what": "addition", "tasks": f"{i} – {j}", "scale": scale}
            rows += [{**known, **known_here, **row} for row in addition(halves, i, j, scale)]
    for task in done.tuned:
        for scale in negate:
            known_here = {"what": "negation", "tasks": task, "scale": scale}
            rows += [{**known, **known_here, **row} for row in negation(halves, task, scale)]
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
        found = {
            "average": [
                halves.accuracy([(0.5, features[i, on][layer]), (0.5, features[j, on][layer])], layer, on)
                for on in (i, j)
            ]
        }
        for kind, task in (("only i", i), ("only j", j)):
            found[kind] = [halves.alone(task, scale, layer, on, features[task, on][layer]) for on in (i, j)]
        for kind, (first, second) in found.items():
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
    found: dict[tuple[str, str, str], float] = {}
    for on in (task, *controls):
        base, plus, minus = (halves.fronts(task, by, on) for by in (0.0, scale, -scale))
        for layer in halves.layers:
            terms = {"mirrored": [(2.0, base[layer]), (-1.0, plus[layer])], "negated": [(1.0, minus[layer])]}
            for kind, own in terms.items():
                value = halves.accuracy(own, layer, on) if scale else halves.base_alone(layer, on)
                found[layer, kind, on] = value
    for layer, kind in dict.fromkeys(key[:2] for key in found):
        second = float(np.mean([found[layer, kind, on] for on in controls]))
        yield {"layer": layer, "kind": kind, "first": 100 * found[layer, kind, task], "second": 100 * second}


def findings(rows: list[Row]) -> list[Finding]:
    """Hold the two statements against the rows, for each layer."""
    found = []
    for index in sorted({row["index"] for row in rows}):
        place = f"after hidden layer {index} (index {index - 1} from 0)"
        shares = [_better(own) for own in by_seed(rows, what="addition", index=index).values()]
        claim = f"The averaged feature serves both tasks, a single one its own only: {place}."
        found.append(
            Finding(
                "L14",
                claim,
                f"share {with_interval(shares, 2)}",
                within(shares, low=BETTER),
                f"larger minimum than both controls in a share ≥ {BETTER} of (pair, λ ≥ {FROM})",
            )
        )
        drops = [_drops(own) for own in by_seed(rows, what="negation", index=index).values()]
        margin = [on_task - DROP * on_control for on_task, on_control in drops]
        on_task, on_control = (with_interval([pair[which] for pair in drops]) for which in (0, 1))
        told = f"the drop on D_i is {on_task} points, on the control {on_control}"
        claim = f"With λ accuracy falls on D_i and stays on the control task: {place}."
        found.append(
            Finding(
                "L15",
                claim,
                told,
                within(margin, low=0),
                f"at the largest λ the drop on D_i ≥ {DROP:g} × that on the control",
            )
        )
        gaps = [_gap(own) for own in by_seed(rows, what="negation", index=index).values()]
        claim = f"Mirrored features and the negated net's give the same accuracies (Eq. 4): {place}."
        found.append(
            Finding(
                "L15",
                claim,
                f"mean gap {with_interval(gaps)} points",
                within(gaps, high=GAP),
                f"mean gap for λ ≤ 1 at most {GAP:g} points",
            )
        )
    return found


def _better(rows: list[Row]) -> float:
    least = {
        (row["tasks"], row["scale"], row["kind"]): min(row["first"], row["second"])
        for row in rows
        if row["scale"] >= FROM
    }
    cases = dict.fromkeys(key[:2] for key in least)
    return float(
        np.mean([least[*case, "average"] > max(least[*case, "only i"], least[*case, "only j"]) for case in cases])
    )


def _drops(rows: list[Row]) -> tuple[float, float]:
    """Return what mirrored features lose from the smallest to the largest λ on D_i and on the control, in points."""
    ends = min(row["scale"] for row in rows), max(row["scale"] for row in rows)
    own = [row for row in rows if row["kind"] == "mirrored"]
    start, end = ([row for row in own if row["scale"] == scale] for scale in ends)
    return tuple(
        float(np.mean([row[key] for row in start]) - np.mean([row[key] for row in end])) for key in ("first", "second")
    )  # type: ignore[return-value]


def _gap(rows: list[Row]) -> float:
    values = {
        (row["tasks"], row["scale"], row["kind"]): (row["first"], row["second"]) for row in rows if row["scale"] <= 1
    }
    pairs = [(value, values[*key[:2], "negated"]) for key, value in values.items() if key[2] == "mirrored"]
    return float(np.mean([abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True)]))


def tables(rows: list[Row]) -> list[Table]:
    """Return means over pairs or tasks, by layer, λ and kind."""
    made = []
    for what, first, second in (("addition", "D_i", "D_j"), ("negation", "D_i", "control")):
        lines = []
        own = [row for row in rows if row["what"] == what]
        for index, scale, kind in dict.fromkeys((row["index"], row["scale"], row["kind"]) for row in own):
            seeds = by_seed(own, index=index, scale=scale, kind=kind).values()
            means = {key: [float(np.mean([row[key] for row in one])) for one in seeds] for key in ("first", "second")}
            lines.append(
                {
                    "layer": index,
                    "λ": scale,
                    "h": kind,
                    f"{first}, %": with_interval(means["first"]),
                    f"{second}, %": with_interval(means["second"]),
                }
            )
        made.append(Table(f"{what.capitalize()}: accuracy, mean over pairs or tasks", lines))
    return made


def stitch_figure(rows: list[Row]) -> Figure:
    """Draw addition as points (D_i, D_j) after the last hidden layer but one, and negation over λ there."""
    middle = sorted({row["index"] for row in rows})[-2:][0]
    own = [row for row in rows if row["index"] == middle]
    figure, (left, right) = panels(2, 2, 4.2)
    dress(left, f"Addition, after layer {middle}", "accuracy on D_i, %", "accuracy on D_j, %", grid="both")
    for number, kind in enumerate(("average", "only i", "only j")):
        points = [(row["first"], row["second"]) for row in own if row["kind"] == kind]
        left.plot(*zip(*points, strict=True), label=kind, **series_style(number) | {"linestyle": "", "markersize": 3})
    dress(right, f"Negation, after layer {middle}", "λ", "accuracy, %")
    negated = [row for row in own if row["what"] == "negation"]
    for number, (kind, key, label) in enumerate(
        (
            ("mirrored", "first", "mirrored, D_i"),
            ("negated", "first", "negated, D_i"),
            ("mirrored", "second", "mirrored, control"),
            ("negated", "second", "negated, control"),
        )
    ):
        samples = {
            scale: [
                float(np.mean([row[key] for row in one])) for one in by_seed(negated, kind=kind, scale=scale).values()
            ]
            for scale in sorted({row["scale"] for row in negated})
        }
        curve(right, samples, label, number)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
