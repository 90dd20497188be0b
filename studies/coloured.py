"""Studies `coloured_digits`, `coloured_clip`, `fashion_coloured`, …: does the theory of λ hold for coloured pictures?

**Question.** The paper's own experiment: tasks that differ in how colour goes with parity, so that two of them are
irrelevant, aligned or contradictory. Do the λ that add and unlearn a task fall where the theory says? Is a third
task reached by λ_1, λ_2 inside Equation 7's region? And how far does this depend on how long the experts are tuned?

**Method.** Drawn digits, odd or even; an odd digit is red with r_o, an even one with 1 − r_o, else green. Ψ^(0) is

- in `coloured_digits` a vision transformer (torchvision's, small) that learnt the ten digits in white, with a fresh
  head, the same for all experts of a seed;
- in `coloured_clip` the embedded CLIP, whose head is made from prompts and stays as it is: fine-tuning moves the image
  tower alone. A logit is CLIP's scale times the cosine of the picture with the mean of the five prompts "a photo of
  handwritten digit three" (and so on) of the odd or of the even digits. All experts begin with the same weights,
  whatever the seed; seeds differ in the order of the examples;
- in `coloured_clip_head` that CLIP with its head tuned beside the tower: task vectors hold a change of the head too;
- in `fashion_coloured` (worlds/fashion) the transformer of `coloured_digits` on photographs, Fashion-MNIST: it learnt
  the ten classes, and trousers, dresses, sandals, sneakers and ankle boots count as odd.

T1 has r_o = 0.95; T2 has 0.5 (irrelevant), 0.9 (aligned) or 0.05 (contradictory). In Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 with λ
from −1 to 2 by 0.2, λ is chosen on validation: by the sum of both accuracies (addition) and by their difference
(unlearning); test is looked at for these λ and for λ = 0, so that unlearning is not credited with what T1 alone does.
A third task (r_o = 0.9) is reached from r_o = 0.85 and 0.05 on a grid of λ_1, λ_2 from −2 to 3 by 0.2; a point counts
as good if its validation accuracy is within 2 points of the best, and Equation 7's region is drawn with γ̂ = α̂ of each
expert with the third task's, β = 0.01 and c = 0.02 as in the paper, with the theorem's margin 1 and the figure's 0.2.
Of λ that are equally good on validation the middle one is taken; on a plateau many are, and the chosen λ says little. α̂
is of logits less their mean over the two classes. Rules were written before the first run; that of `coloured_digits`
took the lowest of equally good λ and had 200 digits to choose by in place of 1000. With these pictures its record is
therefore the second look at test, not the first.

**Source.** Li et al. 2025, Section 4.1, Tables 1 and 2, Figures 1 and 2, Equations 7 and 11.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.analysis.geometry import cosine_matrix
from mergeflow.analysis.provable.answers import ask
from mergeflow.analysis.provable.correlation import Correlations, correlations
from mergeflow.modalities.classification import Subset
from studies.lab import Claim, Row, Section, Study, grid, table
from studies.lab.claims import Parts, Samples, Verdict, all_within, needs, with_interval, within
from studies.lab.digits import (
    Coloured,
    ColouredWorld,
    Digits,
    name_of,
    open_digits,
    pretrained,
    tuned,
)
from studies.lab.inputs import Lazy, over_seeds
from studies.lab.plots import curves, side_by_side
from studies.lab.rows import samples, select
from studies.lab.tuning import task_vector
from studies.theory.coefficients import BETA, C, out_of_domain
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.panels import OUTLINED, colour_bar, heat_map, numbered, over

FIRST, TARGET = 0.95, 0.9
CASES = {"irrelevant": 0.5, "aligned": 0.9, "contradictory": 0.05}
ONTO = (0.85, 0.05)
SCALES = grid(-1, 2, 0.2)
MARGINS = (1.0, 0.2)
CHANCE, EVEN = 50.0, 0.5  # % of two labels; r_o at which colour says nothing
READS = 85.0  # % there; the paper's expert has 94 to 96
SOLVED = 84.4  # %: twice what 92.21 lacks
GOOD = 2.0  # points below the best of the grid
OWN, ONE, TWO, BEST = "the third task's own expert", "expert 1", "expert 2", "the best of the grid"
Point = tuple[float, ...]


class Options(Section):
    seeds: list[int] = Field(min_length=1)  # of the net and the orders
    world: ColouredWorld  # digits, net and training
    lengths: list[int] = Field(min_length=1)  # steps of tuning
    samples: int = Field(200, ge=8)  # without labels, of each task
    step: float = Field(0.2, gt=0)  # of the grid of λ_1 and λ_2


def measure_seed(options: Options, digits: Lazy[dict[str, Digits]], seed: int) -> Iterator[Row]:
    """Yield α̂ of all pairs, accuracies over λ and over λ_1, λ_2, and test accuracies of what was chosen."""
    splits = digits()
    base = pretrained(options.world, splits, seed)
    colours = sorted({FIRST, TARGET, *CASES.values(), *ONTO})
    for steps in options.lengths:
        experts = tuned(options.world, base, splits["train"], colours, steps, seed)
        trained = Coloured(base, splits, {task: task_vector(state, base.start) for task, state in experts.items()})
        asked = {name_of(r): Subset.first(trained.task(r, "validation"), options.samples) for r in colours}
        alphas = correlations(ask(base.model, base.start, experts, asked).experts)
        for row in (
            *pair_rows(trained, alphas),
            *(row for case in CASES for row in case_rows(trained, case)),
            *target_rows(trained, alphas, options.step),
        ):
            yield {"seed": seed, "steps": steps, **row}


def pair_rows(trained: Coloured, alphas: Correlations) -> Iterator[Row]:
    names = list(trained.vectors)
    cosines = cosine_matrix([trained.vectors[name] for name in names])
    for i, first in enumerate(names):
        for j, second in enumerate(names):
            alike = {"alpha": alphas.values[i][j], "cosine": cosines[i][j]}
            [score] = trained.accuracies({float(first[1:]): 1.0}, (float(second[1:]),), "test")
            yield {"part": "pair", "first": first, "second": second, **alike, "test_1": score}


def case_rows(trained: Coloured, case: str) -> Iterator[Row]:
    """Yield validation accuracies over λ, and test accuracies where λ was chosen."""
    pair = (FIRST, CASES[case])
    scores = {scale: trained.accuracies({FIRST: 1.0, pair[1]: scale}, pair, "validation") for scale in SCALES}
    for scale, (first, second) in scores.items():
        yield {"part": "curve", "case": case, "scale": scale, "validation_1": first, "validation_2": second}
    chosen = {
        "addition": middle_of_best({(scale,): first + second for scale, (first, second) in scores.items()})[0],
        "unlearning": middle_of_best({(scale,): first - second for scale, (first, second) in scores.items()})[0],
        "λ = 0": 0.0,
    }
    experts = {f"expert_{n}": trained.accuracies({task: 1.0}, (task,), "test")[0] for n, task in enumerate(pair, 1)}
    for way, scale in chosen.items():
        first, second = trained.accuracies({FIRST: 1.0, pair[1]: scale}, pair, "test")
        yield {"part": "chosen", "case": case, "way": way, "scale": scale, "test_1": first, "test_2": second, **experts}


def middle_of_best(scores: Mapping[Point, float]) -> Point:
    """Return the point with the best score; of equally good ones that nearest to their mean, the first if two are.

    Accuracies of few samples tie on whole plateaus, of which the first point is a corner.

    Args:
        scores: point → score; scores that differ by rounding alone are equal.
    """
    most = max(scores.values())
    tied = [point for point, score in scores.items() if score > most - 1e-9]
    middle = np.mean(tied, axis=0)
    return min(tied, key=lambda point: round(float(np.linalg.norm(middle - point)), 9))


def target_rows(trained: Coloured, alphas: Correlations, step: float) -> Iterator[Row]:
    """Yield accuracies on the third task over λ_1 and λ_2, with Equation 7's promise, and what they are to reach."""
    values = grid(-2, 3, step)
    points = [(first, second) for first in values for second in values]
    gammas = [alphas.of(name_of(colour), name_of(TARGET)) for colour in ONTO]
    promised = {margin: out_of_domain(points, gammas, BETA, C, margin) for margin in MARGINS}
    scores: dict[Point, float] = {
        p: trained.accuracies(dict(zip(ONTO, p, strict=True)), (TARGET,), "validation")[0] for p in points
    }
    for number, (point, score) in enumerate(scores.items()):
        inside = {f"promised_{margin:g}": bool(promised[margin][number]) for margin in MARGINS}
        row = {"part": "grid", "scale_1": point[0], "scale": point[1], "validation_1": score, **inside}
        yield {**row, "good": score >= max(scores.values()) - GOOD}
    best = middle_of_best(scores)
    judged: dict[str, dict[float, float]] = {
        OWN: {TARGET: 1.0},
        ONE: {ONTO[0]: 1.0},
        TWO: {ONTO[1]: 1.0},
        BEST: dict(zip(ONTO, best, strict=True)),
    }
    for way, scales in judged.items():
        at = {"scale_1": best[0], "scale": best[1]} if way == BEST else {}
        [test] = trained.accuracies(scales, (TARGET,), "test")
        yield {"part": "target", "way": way, "test_1": test, "gamma_1": gammas[0], "gamma_2": gammas[1], **at}


# What the rows are asked


def alpha(rows: pd.DataFrame, first: float, second: float) -> pd.Series:
    return samples(rows, "alpha", part="pair", first=name_of(first), second=name_of(second))


def alike(first: float, second: float, rows: pd.DataFrame) -> Samples:
    return {"α̂": alpha(rows, first, second)}


def own_tasks(rows: pd.DataFrame) -> Samples:
    pairs = select(rows, part="pair")
    return {name: samples(pairs, "test_1", first=name, second=name) for name in pairs["first"].unique()}


def chosen(rows: pd.DataFrame, case: str, way: str) -> pd.DataFrame:
    """Return the scores with the λ of one way to choose it, gaps to the experts and the sum of both, by seed."""
    chosen_rows = select(rows, part="chosen", case=case, way=way).set_index("seed").sort_index()
    return chosen_rows.assign(
        gap_1=chosen_rows.expert_1 - chosen_rows.test_1,
        gap_2=chosen_rows.expert_2 - chosen_rows.test_2,
        total=chosen_rows.test_1 + chosen_rows.test_2,
    )


def curve(rows: pd.DataFrame, case: str) -> pd.DataFrame:
    return select(rows, part="curve", case=case)


def worse_task(rows: pd.DataFrame) -> pd.Series:
    """Return the validation accuracy of the worse of two contradictory tasks at the λ where it is best, by seed."""
    scores = curve(rows, "contradictory")
    return scores[["validation_1", "validation_2"]].min(axis=1).groupby(scores.seed).max()


def falls(
    level: Callable[[pd.DataFrame, str], pd.Series], least: float, digits: int, rows: pd.DataFrame
) -> tuple[Verdict, str]:
    """Judge whether something falls by a margin from aligned to irrelevant to contradictory, and tell the levels."""
    levels = {case: level(rows, case) for case in ("aligned", "irrelevant", "contradictory")}
    steps: Parts = {f"{a} – {b}": (levels[a] - levels[b], least, math.inf) for a, b in pairwise(levels)}
    return all_within(steps), ", ".join(f"{case} {with_interval(values, digits)}" for case, values in levels.items())


def fall(case: str, rows: pd.DataFrame) -> Samples:
    fallen = chosen(rows, case, "λ = 0").test_2 - chosen(rows, case, "unlearning").test_2
    return {"T2 falls from λ = 0 to the chosen λ by": fallen}


def before(case: str, rows: pd.DataFrame) -> Samples:
    return {"T2 at λ = 0": chosen(rows, case, "λ = 0").test_2}


def largest_left(case: str, rows: pd.DataFrame) -> Samples:
    scores = curve(rows, case)
    return {"T2, the largest": scores[scores.scale <= 0].groupby("seed").validation_2.max()}


def share_gaps(case: str, rows: pd.DataFrame) -> Samples:
    """Return the loss of each task in a sum, in % of what its expert has above chance."""
    choice = chosen(rows, case, "addition")
    return {f"T{n} below its expert": 100 * choice[f"gap_{n}"] / (choice[f"expert_{n}"] - CHANCE) for n in (1, 2)}


def unlearned(case: str, most: float, lost: float, rows: pd.DataFrame) -> tuple[Verdict, str]:
    choice = chosen(rows, case, "unlearning")
    text = f"T2 {with_interval(choice.test_2)} %, T1 {with_interval(choice.gap_1)} points below its expert"
    return all_within({"T2": (choice.test_2, -math.inf, most), "T1": (choice.gap_1, -math.inf, lost)}), text


def kept_and_unlearned(rows: pd.DataFrame) -> tuple[Verdict, str]:
    scores = curve(rows, "aligned")
    able = ((scores.validation_2 <= 70) & (scores.validation_1 >= 90)).groupby(scores.seed).any()
    return not able.any(), f"in {able.sum()} of {len(able)} seeds some λ does"


def target(rows: pd.DataFrame, way: str) -> pd.Series:
    return samples(rows, "test_1", part="target", way=way)


def room(rows: pd.DataFrame) -> pd.Series:
    """Return by how much the third task's own expert is better than the better of the two, by seed."""
    return target(rows, OWN) - pd.concat([target(rows, way) for way in (ONE, TWO)], axis=1).max(axis=1)


def gained_of_room(rows: pd.DataFrame) -> Samples:
    better = pd.concat([target(rows, way) for way in (ONE, TWO)], axis=1).max(axis=1)
    return {"less the better expert and the share": target(rows, BEST) - better - 0.44 * room(rows)}


def target_levels(rows: pd.DataFrame) -> str:
    best, trained, first, second = (with_interval(target(rows, way)) for way in (BEST, OWN, ONE, TWO))
    return f"; {best} %, its own expert {trained}, expert 1 {first}, expert 2 {second}"


def overlap(rows: pd.DataFrame, margin: float) -> pd.DataFrame:
    """Return IoU and precision of Equation 7's region against the good points, in %, by seed; 0 of an empty region."""
    cells = select(rows, part="grid")
    inside, good = cells[f"promised_{margin:g}"].astype(bool), cells.good.astype(bool)
    counts = pd.DataFrame({"both": inside & good, "either": inside | good, "inside": inside}).groupby(cells.seed).sum()
    shares = {"iou": counts.both / counts.either, "precision": counts.both / counts.inside}
    return 100 * pd.DataFrame(shares).fillna(0.0)


def precision(margin: float, rows: pd.DataFrame) -> tuple[Verdict, str]:
    shares_of = overlap(rows, margin)
    text = f"precision {with_interval(shares_of.precision)} %, IoU {with_interval(shares_of.iou)} %"
    return within(shares_of.precision, low=80), text


# Claims, written before the run
# fmt: off

def claims(options: Options) -> list[Claim]:
    return [claim.of_part(partial(select, steps=steps), f"{steps} steps")
            for steps in sorted(options.lengths) for claim in [*set_ups(), *of_pairs(), *of_targets()]]


SHAPE = needs(lambda rows: {f"expert of r_o = {EVEN:g}": own_tasks(rows)[name_of(EVEN)]},
              "accuracy where colour says nothing, of experts that read shape", "%", low=READS)
ROOM = needs(lambda rows: {"its own expert less the better of the two": room(rows)},
             "room on the third task", low=1)


def set_ups() -> list[Claim]:
    """State the set-up: experts that solve their tasks, and how alike they are."""
    return [
        Claim("P2", "Each expert solves its own task.", own_tasks, low=SOLVED, unit="%", paper="92.2 to 96.2 %",
              of="accuracy of each, which may lack twice what the paper's smallest lacks,", needs=SHAPE),
        Claim("P5", "α̂: contradictory < irrelevant < aligned.", of="by ≥ 0.05 each", paper="−0.849, 0.164, 0.891",
              decide=partial(falls, lambda rows, case: alpha(rows, FIRST, CASES[case]), 0.05, 2)),
        *(Claim("P5", f"{pair} has α̂ near 0.", partial(alike, a, b), low=-0.3, high=0.3, of="α̂", unit="", digits=2,
                paper=paper, needs=SHAPE)
          for pair, a, b, paper in (("The pair called irrelevant", FIRST, CASES["irrelevant"], "0.164"),
                                        ("The pair of the third task", *ONTO, "0.115"))),
    ]


def of_pairs() -> list[Claim]:
    """State what adding and subtracting does to two tasks."""
    limits = {"irrelevant": (55, 3), "contradictory": (15, 4)}
    printed = {"irrelevant": "T2 50.34 %, T1 0.56 points below its expert",
               "contradictory": "T2 4.97 %, T1 0.61 points below its expert"}
    return [
        *(claim
          for case, (most, lost) in limits.items()
          for claim in (
              Claim("P6", f"A{'n' * (case[0] == 'i')} {case} task is unlearned while T1 is kept.", paper=printed[case],
                    decide=partial(unlearned, case, most, lost),
                    of=f"T2 ≤ {most} %, T1 within {lost} points of its expert",
                    needs=needs(partial(before, case), "what there is to unlearn", "%", low=most)),
              Claim("P6", f"Unlearning the {case} task is the merit of ΔΨ_2.", partial(fall, case), low=5,
                    of="paired difference", ours=True))),
        Claim("P6", "No λ unlearns an aligned task and keeps T1.", decide=kept_and_unlearned, ours=True,
              of="no λ with T2 ≤ 70 % and T1 ≥ 90 %, in every seed; nearly given by the data: 95 % of the pictures of "
                 "the two tasks are the same"),
        Claim("P6", "Addition: the best sum of both accuracies falls from aligned to irrelevant to contradictory.",
              ours=True, of="paired differences ≥ 0",
              decide=partial(falls, lambda rows, case: chosen(rows, case, "addition").total, 0, 1)),
        *(Claim("P6", f"Every λ ≤ 0 unlearns the {case} task.", partial(largest_left, case), high=most, unit="%",
                of="T2 on validation, at every λ tried that is not above 0,", needs=SHAPE)
          for case, (most, _) in limits.items()),
        *(Claim("P6", f"Adding two {case} tasks does both.", partial(share_gaps, case), high=2 * share,
                unit="% of the headroom", of="each gap to the expert, twice the paper's larger share,", needs=SHAPE,
                paper=f"{points:g} points, {share:g} % of what the expert has above chance")
          for case, points, share in (("irrelevant", 5.65, 12.8), ("aligned", 3.23, 7.1))),
        Claim("P6", "No λ adds contradictory tasks.", lambda rows: {"the worse task at the best λ": worse_task(rows)},
              high=85, of="accuracy on validation", unit="%", paper="62.52 % on T2"),
    ]


def of_targets() -> list[Claim]:
    """State what two experts give for a third task, and whether Equation 7 says which λ do."""
    return [
        Claim("P7", "λ_1, λ_2 chosen on validation are better on the third task than either expert.", gained_of_room,
              low=0, of="paired difference less 44 % of the room above the better expert, half of the paper's share,",
              also=target_levels, paper="3.64 points gained, 89 % of the room of 4.11", needs=ROOM),
        Claim("P7", "They reach the third task's own expert.",
              lambda rows: {"less its own expert": target(rows, BEST) - target(rows, OWN)},
              low=-1, of="paired difference", ours=True),
        Claim("P8", f"Equation 7's region with margin {MARGINS[-1]:g} is that of the good points.",
              lambda rows: {"IoU": overlap(rows, MARGINS[-1]).iou}, low=50, unit="%", needs=SHAPE,
              of="IoU, where good is within 2 points of the best, by our definition,"),
        *(Claim("P8", f"The points of Equation 7 with margin {margin:g} are good.", needs=SHAPE,
                decide=partial(precision, margin), of="precision ≥ 80 %",
                caveat="good is within 2 points of the best, by our definition: with 10 points more of them are")
          for margin in MARGINS),
    ]


def chosen_table(rows: pd.DataFrame) -> pd.DataFrame:
    choices = select(rows, part="chosen")
    less = choices.assign(less_1=choices.test_1 - choices.expert_1, less_2=choices.test_2 - choices.expert_2)
    shown = {"scale": "λ", "test_1": "T1, %", "less_1": "less its expert", "test_2": "T2, %", "less_2": "less its own"}
    return side_by_side(less, ["steps", "case", "way"], shown)


TABLES = {
    "Addition and unlearning, λ chosen on validation, test accuracy": chosen_table,
    "A task that neither expert was tuned on (r_o = 0.9), %": lambda rows: table(
        select(rows, part="target"), "way", "steps", value="test_1"),
}
# fmt: on


def scales_figure(rows: pd.DataFrame) -> Figure:
    """Draw validation accuracy on both tasks over λ, a panel for each length and case."""
    scores = select(rows, part="curve")
    scores = scores.assign(where=scores.case + ", " + scores.steps.astype(str) + " steps")
    tasks = {"validation_1": "T1", "validation_2": "T2"}
    long = scores.melt(["where", "scale", "seed"], list(tasks), "task", "accuracy")
    return curves(
        long, "scale", "task", panel="where", labels=tasks, x_label="λ", y_label="accuracy, %", columns=len(CASES)
    )


def targets_figure(rows: pd.DataFrame) -> Figure:
    """Draw validation accuracy on the third task over λ_1 and λ_2, with the two regions of Equation 7 and the best."""
    lengths = sorted(rows.steps.unique())
    figure, axes = panels(len(lengths), 2, 3.9, sharey=True)
    for panel, steps in zip(axes, lengths, strict=True):
        dress(panel, f"{steps} steps", "λ₁", "λ₂" if panel is axes[0] else "")
        drawn = draw_plane(panel, select(rows, part="grid", steps=steps))
    colour_bar(axes, drawn, "accuracy on the third task, %")
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def draw_plane(panel: Axes, cells: pd.DataFrame) -> QuadMesh:
    def plane(column: str) -> pd.DataFrame:
        return cells.assign(value=cells[column].astype(float)).pivot_table(
            index="scale", columns="scale_1", values="value"
        )

    scores = plane("validation_1")
    ones, twos = list(scores.columns), list(scores.index)
    drawn = heat_map(panel, ones, twos, scores)
    for margin, style in (("0.2", "solid"), ("1", "dashed")):
        promised = plane(f"promised_{margin}").to_numpy()
        if promised.min() < 0.5 < promised.max():
            lines = panel.contour(ones, twos, promised, levels=[0.5], colors="white", linestyles=style)
            lines.set_path_effects(OUTLINED)
            over(panel, [], [], f"Equation 7, margin {margin}", linestyle=style)
    two, at = np.unravel_index(scores.to_numpy().argmax(), scores.shape)
    over(panel, [ones[at]], [twos[two]], BEST, marker="*", markersize=11, linestyle="")
    over(panel, [1, 0], [0, 1], "each expert alone", marker="o", markersize=5, linestyle="")
    return drawn


def pairs_figure(rows: pd.DataFrame) -> Figure:
    """Draw α̂ of all experts, the cosines of their task vectors, and each expert's accuracy on every task."""
    shown = {"alpha": "α̂", "cosine": "cosine", "test_1": "accuracy, %"}
    parts = [(steps, key) for steps in sorted(rows.steps.unique()) for key in shown]
    figure, axes = panels(len(parts), len(shown), 3.1)
    for panel, (steps, key) in zip(axes, parts, strict=True):
        pairs = select(rows, part="pair", steps=steps)
        cells = pairs.pivot_table(index="first", columns="second", values=key)
        dress(panel, f"{shown[key]}, {steps} steps", "task, r_o", "expert, r_o" if key == "alpha" else "")
        limits = (0, 100) if key == "test_1" else (-1, 1)
        numbered(panel, [name[1:] for name in cells], cells.to_numpy().tolist(), *limits)
    return figure


STUDY = Study(
    options=Options,
    systems=("P1", "P2", "P5", "P6", "P7", "P8"),
    measure=over_seeds(open_digits, measure_seed),
    claims=claims,
    tables=TABLES,
    figures={"scales": scales_figure, "targets": targets_figure, "pairs": pairs_figure},
)
STUDIES = {"coloured_digits": STUDY, "coloured_clip": STUDY, "coloured_clip_head": STUDY, "fashion_coloured": STUDY}
