"""Study `alignment` (M3): do task vectors align over the rounds of merge-and-tune while their increments do not?

**Question.** In round i every task tunes from the merge θ̄^(i−1) to θ_t^(i). How do the task vectors
τ_t^(i) = θ_t^(i) − θ0 and the increments δ_t^(i) = θ_t^(i) − θ̄^(i−1) of different tasks relate to each other?

**Method.** Cosines of all pairs of tasks after every round, in float64 over all weights. With the shared part
s = θ̄^(N−1) − θ0, τ_t = s + δ_t. If increments were orthogonal to each other and to s, every pair would have

    cos(τ_i, τ_j) = ‖s‖² / (‖s‖² + ‖δ‖²) = 1 / (1 + ρ²),    ρ = ‖δ‖ / ‖s‖,

so alignment is a matter of lengths: of how far one round goes compared with all the way before it. ρ, the cosine of δ
with s, and this prediction stand beside what was measured. `mima_N` has one learning rate schedule over the whole
budget, so that its last rounds are short from N = 8 on; `per_round_2_N` has one in every round and merges with
α = 2/T. ± is over seeds, of the mean over pairs of tasks where no pair is named.

`texts_alignment` is the same with eight real tasks on a pre-trained encoder (worlds/real-texts).

**Source.** MIMA, equations 5 to 8, Figures 5, 10 and 11, Appendix E.
"""

from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean

import pandas as pd
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.analysis.geometry import dot, norm
from studies.lab import Claim, Laboratory, Row, Section, Study, per_seed, select
from studies.lab.claims import with_interval
from studies.lab.plots import side_by_side
from studies.lab.rows import Samples, steps
from studies.lab.tuning import task_vector
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.palette import INK, MUTED, SERIES
from tasks.plotting.panels import numbered

QUARTILES = {0.25: "lower quartile", 0.5: "median", 0.75: "upper quartile"}


class Options(Section):
    rounds: list[int]  # the N of `mima_N`
    shown: list[int]  # those with a panel over the rounds
    compared: list[str]  # further runs
    similar: list[list[str]] = Field(default_factory=list)  # pairs of tasks that are similar in meaning


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield the cosines of every pair of tasks after every round (`pair`), and lengths of the last round (`last`)."""
    names = [*(f"mima_{n}" for n in options.rounds), *options.compared]
    yield from lab.by_run(names, measure_run)


def measure_run(lab: Laboratory, run: str, seed: int) -> Iterator[Row]:
    for row in lab.run(run).rounds(seed):
        for i, first in enumerate(lab.tasks):
            for j, second in list(enumerate(lab.tasks))[i + 1 :]:
                cosines = {"tau": row["cosine_tau"][i][j], "delta": row["cosine_delta"][i][j]}
                about = {"part": "pair", "seed": seed, "run": run, "round": row["round"], "steps": row["steps"]}
                yield {**about, "pair": f"{first} – {second}", **cosines}
    yield {"part": "last", "seed": seed, "run": run, **last_round(lab, run, seed)}


def last_round(lab: Laboratory, run: str, seed: int) -> Row:
    """Return ‖s‖ as `shared`, and the means over tasks of ‖δ‖ as `increment` and of cos(δ, s) as `towards`."""
    start = lab.run(run).start(seed)
    shared = task_vector(start, lab.base)
    length, increments, towards = norm(shared), [], []
    for task in lab.tasks:
        increment = task_vector(lab.run(run).expert(seed, task), start)
        increments.append(norm(increment))
        towards.append(dot(increment, shared) / (length * increments[-1]) if length else 0.0)
    return {"shared": length, "increment": fmean(increments), "towards": fmean(towards)}


# What the rows are asked


def pairs(rows: pd.DataFrame, mima: bool = True) -> pd.DataFrame:
    """Return the cosines, with N; of the runs `mima_N` alone."""
    measured = select(rows, part="pair")
    measured = measured[measured.run.str.startswith("mima_")] if mima else measured
    return measured.assign(N=measured.run.str.rpartition("_")[2].astype(int))


def final(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the cosines after the last round of each run."""
    return rows[rows["round"] == rows.groupby("run")["round"].transform("max")]


def quartile(rows: pd.DataFrame, share: float) -> pd.DataFrame:
    """Return a quartile over the pairs of the final task vectors' cosines: N × seed."""
    return final(pairs(rows)).groupby(["N", "seed"]).tau.quantile(share).unstack("seed")


def first_median(rows: pd.DataFrame) -> Samples:
    medians = quartile(rows, 0.5)
    return {f"median, N = {medians.index[0]}": medians.iloc[0]}


def similar_less_median(rows: pd.DataFrame, similar: list[list[str]]) -> Samples:
    medians, finals = quartile(rows, 0.5), final(pairs(rows))
    first, names = medians.index[0], {f"{a} – {b}" for pair in similar for a, b in (pair, pair[::-1])}
    asked = [name for name in finals.pair.unique() if name in names]
    cosines = {name: per_seed(finals, "N", value="tau", pair=name).loc[first] for name in asked}
    return {f"{name} less the median, N = {first}": value - medians.loc[first] for name, value in cosines.items()}


def largest_n(rows: pd.DataFrame) -> Samples:
    means = per_seed(final(pairs(rows)), "N", value="tau")
    return {f"N = {means.index[-1]}": means.iloc[-1]}


def by_n(rows: pd.DataFrame, *over: str, value: str) -> Iterator[tuple[int, pd.DataFrame]]:
    """Yield N and the mean cosine by `over` × seed."""
    for n, group in pairs(rows).groupby("N"):
        yield int(n), per_seed(group, *over, value=value)


def increments(rows: pd.DataFrame) -> Samples:
    """Return the mean cosine over the pairs, of every N and round."""
    return {
        f"mima_{n}, round {place:g}": means.loc[place]
        for n, means in by_n(rows, "round", value="delta")
        for place in means.index
    }


def increments_of_pairs(rows: pd.DataFrame) -> Samples:
    return {
        f"mima_{n}, {pair}, round {place:g}": cosines.loc[pair, place]
        for n, cosines in by_n(rows, "pair", "round", value="delta")
        for pair, place in cosines.index
    }


def smallest_steps(rows: pd.DataFrame) -> Samples:
    """Return the smallest change of the mean cosine from a round to the next, of each N > 1."""
    courses = ((n, means) for n, means in by_n(rows, "round", value="tau") if n > 1)
    return {f"mima_{n}, smallest step from a round to the next": means.diff().min() for n, means in courses}


def course_ends(rows: pd.DataFrame) -> str:
    *_, (n, means) = by_n(rows, "round", value="tau")
    return f"; at N = {n} from {with_interval(means.iloc[0], 2)} to {with_interval(means.iloc[-1], 2)}"


# fmt: off
def claims(options: Options) -> list[Claim]:
    exact = partial(Claim, "M3", unit="", digits=3)
    return [
        exact("Task vectors that were tuned independently are nearly orthogonal, with cosines centred around 0.0 to "
              "0.1.", first_median, low=0, high=0.1, of="median cosine over the pairs, at the smallest N,"),
        exact("Two tasks that are similar in meaning have task vectors with a larger cosine.",
              partial(similar_less_median, similar=options.similar),
              low=0, of="paired difference from the median over all pairs, at the smallest N,"),
        exact("The median and the interquartile range of the cosines of final task vectors shift steadily towards 1.",
              lambda rows: {f"{name}, {step}": values for share, name in QUARTILES.items()
                            for step, values in steps(quartile(rows, share)).items()},
              low=0, of="paired difference of each quartile over the pairs from each N to the next"),
        exact("For large N final task vectors are nearly parallel.", largest_n,
              low=0.8, of="mean cosine at the largest N", paper="about 0.9 and more (Figure 5)"),
        exact("Increments stay nearly orthogonal in every round.", increments,
              low=-0.3, high=0.3, of="mean cosine over the pairs, in every round",
              paper="near 0 (Figure 11)"),
        exact("Increments of any two tasks stay nearly orthogonal in every round.", increments_of_pairs,
              low=-0.3, high=0.3, of="cosine of every pair in every round, at every N,"),
        Claim("M3", "The cosine of task vectors increases with each round.", smallest_steps,
              low=0, of="paired difference of the mean cosine from any round to the next, at every N,", unit="",
              digits=4, also=course_ends),
    ]
# fmt: on


def lengths_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the last round's cosines beside what the lengths alone predict."""
    cosines, last = final(pairs(rows, mima=False)), select(rows, part="last")
    squares = last.assign(predicted=last.shared**2 / (last.shared**2 + last.increment**2).clip(lower=1e-30))
    parts = [
        (cosines, {"tau": "cos τ", "delta": "cos δ"}, 3),
        (last, {"shared": "‖s‖", "increment": "‖δ‖"}, 2),
        (squares, {"towards": "cos(δ, s)", "predicted": "1/(1 + ρ²)"}, 3),
    ]
    tables = [side_by_side(frame, "run", names, digits) for frame, names, digits in parts]
    return pd.concat(tables, axis=1)


def boxes_figure(rows: pd.DataFrame, x: str, x_label: str, panel: str | None = None) -> Figure:
    """Draw the pairwise cosines of τ and of δ over x as boxes; whiskers reach the extremes.

    Args:
        rows: of pairs.
    """
    parts = list(rows.groupby(panel, sort=False)) if panel else [("After the last round", rows)]
    figure, axes = panels(len(parts), 2, 3.4, sharey=True)
    for index, (axis, (title, group)) in enumerate(zip(axes, parts, strict=True)):
        dress(axis, str(title), x_label, "cosine" if index % 2 == 0 else "")
        places = sorted(group[x].unique())
        for number, (value, label) in enumerate((("tau", "task vectors τ"), ("delta", "increments δ"))):
            style = {"facecolor": SERIES[number], "edgecolor": SERIES[number], "alpha": 0.75}
            axis.boxplot(
                [group[group[x] == place][value] for place in places],
                positions=[place + (0.2 if number else -0.2) for place in range(len(places))],
                widths=0.32, whis=(0, 100), manage_ticks=False, patch_artist=True, boxprops=style,
                medianprops={"color": INK, "linewidth": 1.2}, whiskerprops={"color": MUTED}, capprops={"color": MUTED},
            )  # fmt: skip
            axis.bar([0], [0], color=SERIES[number], alpha=0.75, label=label)
        shown = [place for place in range(len(places)) if len(places) <= 8 or place % 3 == 0]
        axis.set_xticks(shown, labels=[f"{places[place]:g}" for place in shown])
    low = min(rows.tau.min(), rows.delta.min())
    axes[0].set_ylim(min(-0.2, low - 0.05), 1.05)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def matrix_figure(rows: pd.DataFrame) -> Figure:
    """Draw the mean cosines of final task vectors, at the smallest and at the largest N (the paper's Figure 10)."""
    finals = final(pairs(rows))
    tasks = list(dict.fromkeys(name for pair in finals.pair for name in pair.split(" – ")))
    figure, axes = panels(2, 2, 4.4)
    for axis, n in zip(axes, (finals.N.min(), finals.N.max()), strict=True):
        means = finals[n == finals.N].groupby("pair").tau.mean()
        values = [[1.0 if a == b else means.get(f"{a} – {b}", means.get(f"{b} – {a}")) for b in tasks] for a in tasks]
        dress(axis, f"N = {n}: cosine of τ")
        numbered(axis, tasks, values, 0, 1)
        axis.tick_params(axis="x", rotation=40)
    return figure


NOTES = [
    "Lengths go with the cosine: it follows 1/(1 + ρ²), ρ = ‖δ‖/‖s‖ of the last round, and where ρ is not small it "
    "lies above that, because δ keeps pointing along s. With one schedule over the whole budget the last rounds hardly "
    "move; with a schedule per round and α = 2/T ρ is larger.",
]


def figures(options: Options) -> dict[str, Callable[[pd.DataFrame], Figure]]:
    shown = [f"mima_{n}" for n in options.shown] + options.compared[-1:]
    return {
        "final": lambda rows: boxes_figure(final(pairs(rows)), "N", "rounds N"),
        "rounds": lambda rows: boxes_figure(
            select(pairs(rows, mima=False), run=shown), "steps", "steps per task", panel="run"
        ),
        "matrix": matrix_figure,
    }


STUDY = Study(
    options=Options,
    runs=lambda options: [*(f"mima_{n}" for n in options.rounds), *options.compared],
    systems=("M3",),
    measure=measure,
    claims=claims,
    tables={
        "The last round: mean pairwise cosines, and the lengths of τ = s + δ": lengths_table,
    },
    figures=figures,
    notes=lambda rows, options: NOTES,
)

STUDIES = {"alignment": STUDY, "texts_alignment": STUDY}
