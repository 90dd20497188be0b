"""Study `linearity_stitches` (L14, L15): can the back half of the base use averaged or mirrored features?

**Question.** If features are linear in edits, the layers after a block should not mind whether a feature comes from an
edited net or from arithmetic on other nets' features. Nothing is learned between the halves.

**Method.** The net is the base θ0 after a hidden layer, on a feature h of the layer; accuracy on test examples. All
pairs of tasks, all λ of the grid, layers counted from 1 (index 0-based: one less).

- *Addition*: h = ½ f(θ0 + λτ_i) + ½ f(θ0 + λτ_j); controls h = f(θ0 + λτ_i) and h = f(θ0 + λτ_j). x = accuracy on
  D_i, y on D_j.
- *Negation*: h = 2 f(θ0) − f(θ0 + λτ_i) beside h = f(θ0 − λτ_i); accuracy on D_i, and on the control task, which is
  the one of the pre-training (the paper does not say which its D_PT is for CLIP).

The addition is judged at λ = 1, the paper's case of the fine-tuned models, and pooled over λ = 0.3, 0.5 and 1, which is
ours. The gap of the negation leaves λ = 0 out, where both features are the same by construction.

Margins are ours and were written before the run. The base of rotated digits does know the control task, and has not
unlearned it before it was tuned: negation can only take from D_i what the upright digits gave it.

**Source.** Zhou et al. 2024, Cross-Task Linearity, Section 4.3 and footnote 5, Figures 9 and 10.
"""

from functools import partial

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.linearity.layers import find_layers
from studies.lab.linear_rows import by_seed
from studies.lab.nets import Tasks, World, open_world, train_world
from studies.old.claims import judge
from studies.old.papers.linearity_stitches.measuring import stitch_rows
from studies.old.pieces import Once, kept_by_seed
from studies.old.results import Finding, StudyResult, Table, with_interval
from studies.old.rows import Row
from studies.old.verdicts import within
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style
from tasks.plotting.intervals import curve
from tasks.project.declaration import Declaration
from tasks.project.sections import Section
from tasks.project.stage import StageIO

BETTER, FROM = 0.8, 0.3  # share of (pair, λ ≥ .3) in which the average has the better minimum
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
    tasks = Once(partial(open_world, options.world, io.root))
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


def findings(rows: list[Row]) -> list[Finding]:
    """Hold the two statements against the rows, for each layer."""
    found = []
    for index in sorted({row["index"] for row in rows}):
        place = f"after hidden layer {index} (index {index - 1} from 0)"
        added = by_seed(rows, what="addition", index=index).values()
        for words, scales, which, ours in (
            ("the finetuned models' averaged feature (λ = 1)", lambda scale: scale == 1, "λ = 1", False),
            ("the averaged feature", lambda scale: scale >= FROM, f"λ ≥ {FROM}", True),
        ):
            shares = [_better([row for row in own if scales(row["scale"])]) for own in added]
            found.append(
                Finding(
                    "L14",
                    f"{words[0].upper()}{words[1:]} serves both tasks, a single one its own only: {place}.",
                    f"share {with_interval(shares, 2)}",
                    within(shares, low=BETTER),
                    f"larger minimum than both controls in a share ≥ {BETTER} of (pair, {which})",
                    ours,
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
        gaps = [_gaps(own) for own in by_seed(rows, what="negation", index=index).values()]
        found.append(
            judge(
                "L15",
                f"Mirrored features and the negated net's give the same accuracies on both tasks (Eq. 4): {place}.",
                {"mean gap on D_i": [gap[0] for gap in gaps], "on the control": [gap[1] for gap in gaps]},
                f"mean gap for 0 < λ ≤ 1 at most {GAP:g} points, on each",
                high=GAP,
            )
        )
    return found


def _better(rows: list[Row]) -> float:
    least = {(row["tasks"], row["scale"], row["kind"]): min(row["first"], row["second"]) for row in rows}
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


def _gaps(rows: list[Row]) -> tuple[float, float]:
    """Return the mean gap of the two ways to negate on D_i and on the control, in points; at λ = 0 there is none."""
    values = {
        (row["tasks"], row["scale"], row["kind"]): (row["first"], row["second"])
        for row in rows
        if 0 < row["scale"] <= 1
    }
    pairs = [(value, values[*key[:2], "negated"]) for key, value in values.items() if key[2] == "mirrored"]
    return tuple(float(np.mean([abs(one[at] - other[at]) for one, other in pairs])) for at in (0, 1))  # type: ignore[return-value]


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
