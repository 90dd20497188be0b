"""Study `interference` (C3): do centred task vectors interfere less, and does that explain the rank curve?

**Question.** CART explains why a low rank of centred task vectors merges well by two curves: row-space interference
I(k), said to be lower for centred task vectors at every rank and layer, and the reconstruction error R(k), which falls
steeply first. A theorem bounds the interference L of a one-layer linear model by O(I²). Do curves and bound hold?

**Method.** For every weight matrix that inputs meet, with τ_t = θ_t − θ0, or centred at the experts' mean, and the k
leading singular values and right singular vectors of every task,

    I(k) = Σ_{i≠j} ‖Σ̃_i V_iᵀ V_j Σ̃_j‖_F,  Σ̃ = Σ / ‖τ‖_F;      R(k) = Σ_t ‖τ_t − SVD_k(τ_t)‖²_F.

Equation 5 prints the product the other way round, V_i Σ̃_i Σ̃_j V_jᵀ, whose norm is ‖Σ̃_i Σ̃_j‖_F: no direction enters
it, so that it tells how the singular values fall and nothing of row spaces. Both are measured
(`studies.theory.interference` says why the first is meant), the first also with Σ̃ normalised by what is kept.
Beside them stands what Theorem 1 calls task interference, for inputs isotropic in a task's own row space,

    L_k = Σ_t ‖Σ_{s≠t} SVD_k(τ_s) V_t‖²_F / Σ_t ‖SVD_k(τ_t)‖²_F,

with λ = 1 as there. Unlike I(k) it sees that contributions of opposite sign cancel. Centring takes away what all task
vectors have in common (the table's common part, 1/T at right angles) and makes the rest add up to zero: with two tasks
the centred ones are ±1 times one matrix, and I(k) is the largest there is. `visual.proj` is measured transposed, since
it multiplies its inputs from the right; position embeddings are measured as they are stored.

*The bound.* Random tasks on the linear model in float64, with a known overlap of their row spaces, a known ratio
s_max / α of singular values and noise η on the inputs. `studies.theory.interference` has what is printed,
what must be read otherwise, and a constant that is smaller by s_max / α.

`texts_interference` is the same on a real encoder, all-MiniLM-L6-v2, tuned on eight real tasks (worlds/real-texts).

**Source.** CART, Section 4.2, equations 5 to 7 and 9, Figures 2, 3 and 8, appendices A and C.1. The constant called
derived is derived in `studies/theory/interference.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure
from pydantic import Field

from mergeflow.merging.matrices import rank_of
from studies.lab import Claim, Laboratory, Row, Section, Study, curves, table
from studies.lab.claims import Samples, Verdict, with_interval, within
from studies.lab.plots import root_axis
from studies.lab.rows import select
from studies.lab.study import Figures, Tables
from studies.theory.equivalence import log_log_slope
from studies.theory.interference import (
    Setting,
    TaskFactors,
    bounds,
    draw_tasks,
    factor_tasks,
    kind_of,
    measured_interference,
    reconstruction_error,
    row_space_interference,
    task_interference,
    task_matrices,
)
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style

ORIGINS = ("centred", "original")
USED = 0.08
MEASURES = {"whole": "I(k)", "kept": "I(k), Σ̃ by what is kept", "spectral": "I(k) as printed", "loss": "L_k"}
DRAWN = {"whole": "I(k), a pair of tasks", "spectral": "I(k) as printed", "loss": "task interference L_k"}
BOUNDS = {
    "L": "measured",
    "printed": "printed, k₃ = c r s_max⁴/α²",
    "derived": "derived, k₃ = c r s_max³/α",
    "pairwise": "pairwise",
}
TICKS = (0, 0.08, 0.32, 1)  # of k / r
OVERLAPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
CONDITIONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
ROUNDING = 1e-18


class Options(Section):
    run: str  # whose experts
    counts: list[int]  # the first so many of their tasks
    shown: list[int]  # those with figures and findings
    compared: dict[str, int]  # run → number of tasks: experts that share more
    ratios: list[float]  # k / r, ascending; 0.08 and 1 are among them
    draws: int = Field(2, ge=1)  # random draws of the linear model for each of its settings


def measure(lab: Laboratory, options: Options) -> list[Row]:
    """Measure every `part`.

    layer: one row for each run, number of tasks, seed, layer, origin and ratio, with the term k₃ I in `theorem`;
    common: how much of the task vectors is common to all; draws, overlap, condition, readings: of the linear model,
    where `draw` tells the draws of a setting.
    """
    cases = [*((options.run, count) for count in options.counts), *options.compared.items()]
    pieces = {
        f"{name}_{count}_{seed}": partial(measure_layers, lab, name, count, seed, options.ratios)
        for name, count in cases
        for seed in lab.run(name).seeds
    }
    rows = sorted(lab.cached(pieces, "experts"), key=lambda row: row["part"] == "common")
    return [*rows, *lab.keep("theorem", partial(theorem_rows, options.draws))]


def measure_layers(lab: Laboratory, name: str, count: int, seed: int, ratios: Sequence[float]) -> Iterator[Row]:
    """Yield the curves of every layer of one run's experts, and how much of their task vectors is common to all."""
    part = lab.first(count)
    experts = part.run(name).experts(seed)
    about = {"seed": seed, "run": name, "tasks": count}
    layers: dict[str, dict[str, dict[str, list[float]]]] = {}
    common = torch.zeros(2, dtype=torch.float64)  # ‖mean τ‖², mean ‖τ‖²
    for origin in ORIGINS:
        for tensor, vectors in task_matrices(part.base, experts, origin == "centred"):
            layers.setdefault(tensor, {})[origin] = curves_of(factor_tasks(vectors), ratios)
            if origin == "original":
                stack = torch.stack(list(vectors))
                common += torch.stack([stack.mean(dim=0).square().sum(), stack.square().sum() / len(stack)])
    for tensor, origins in layers.items():
        for origin, by_measure in origins.items():
            for place, ratio in enumerate(ratios):
                layer = {"layer": tensor, "kind": kind_of(tensor), "origin": origin, "ratio": ratio}
                measured = {measure: values[place] for measure, values in by_measure.items()}
                yield {"part": "layer", **about, **layer, **measured}
    yield {"part": "common", **about, "common": float(common[0] / common[1])}


def curves_of(factors: TaskFactors, ratios: Sequence[float]) -> dict[str, list[float]]:
    ranks = [rank_of(factors.shape, ratio, "ceil") for ratio in ratios]
    curves, error = row_space_interference(factors), reconstruction_error(factors)
    pairs = len(factors.triples) * (len(factors.triples) - 1)
    return {
        "whole": (curves.whole[ranks] / pairs).tolist(),
        "kept": (curves.truncated[ranks] / pairs).tolist(),
        "spectral": (curves.spectral[ranks] / pairs).tolist(),
        "error": (error[ranks] / error[0]).tolist(),
        "loss": [task_interference(factors, rank) for rank in ranks],
        "theorem": [
            rank * condition_of(factors, rank) ** 2 * float(curves.truncated[rank]) / pairs for rank in ranks
        ],  # k3 I over what ‖V_sᵀ V_t‖ ≤ 1 gives
    }


def condition_of(factors: TaskFactors, rank: int) -> float:
    """Return s_max / α over the k leading singular values of all tasks."""
    values = [sigma[:rank] for _, sigma, _ in factors.triples]
    return float(max(sigma[0] for sigma in values) / min(sigma[-1] for sigma in values))


def theorem_rows(draws: int) -> Iterator[Row]:
    """Yield `draws` (how loose, over all settings), `overlap` (L over I), `condition` and `readings`."""
    for setting, number in product(settings(), range(draws)):
        yield {"part": "draws", **draw(setting, number)}
    for tasks, noise, overlap in product((2, 4, 8), (0.0, 0.01), OVERLAPS):
        yield {"part": "overlap", **draw(Setting(tasks=tasks, overlap=overlap, noise=noise), 0)}
    for condition, number in product(CONDITIONS, range(draws)):
        shared = Setting(condition=condition, shared=1, weakest=True, samples=64)
        yield {"part": "condition", **draw(shared, number)}
    for row in readings():
        yield {"part": "readings", **row}


def settings() -> Iterator[Setting]:
    for tasks, rank, overlap, condition in product((2, 4, 8), (1, 4), (0.01, 0.25, 1.0), (1.0, 10.0)):
        for noise, weakest, shared in product((0.0, 0.01), (False, True), {1, rank}):
            yield Setting(tasks, 64, rank, overlap, shared, weakest, condition, noise)


def draw(setting: Setting, seed: int, full: bool = False) -> Row:
    drawn = draw_tasks(setting, seed, full)
    return {"draw": seed, **asdict(setting), "L": measured_interference(drawn), **asdict(bounds(drawn))}


def readings() -> Iterator[Row]:
    """Yield tasks with equal and with orthogonal row spaces, with inputs in the row space and anywhere."""
    for (tasks, overlap), full in product((("equal", 1.0), ("orthogonal", 0.0)), (False, True)):
        row = draw(Setting(overlap=overlap), 0, full)
        yield {"row spaces": tasks, "a": "ℝ^d" if full else "ℝ^r", **row}


# What the layers are asked


def layers_of(rows: pd.DataFrame, run: str, count: int) -> pd.DataFrame:
    return select(rows, part="layer", run=run, tasks=count)


def pairs(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return `centred` and `original` of every seed, layer and ratio."""
    return rows.set_index(["seed", "layer", "ratio", "origin"])[measure].unstack("origin")


def share_lower(rows: pd.DataFrame, measure: str) -> pd.Series:
    """Return the share of points where centred task vectors have less, in %, by seed."""
    both = pairs(rows, measure)
    return 100 * (both.centred < both.original).groupby("seed").mean()


def middle_ratio(rows: pd.DataFrame, measure: str) -> float:
    """Return the median of centred / original over all points."""
    both = pairs(rows, measure)
    both = both[both.original > 0]
    return float((both.centred / both.original).median())


def left_out(rows: pd.DataFrame) -> pd.Series:
    """Return the share of R(0) that is left at 8 % of the ranks, of the median layer, by seed."""
    return select(rows, origin="centred", ratio=USED).groupby("seed").error.median()


def falls_steeply(rows: pd.DataFrame) -> tuple[Verdict, str]:
    left = 100 * (1 - left_out(rows))
    curves = select(rows, origin="centred").sort_values("ratio").groupby(["seed", "layer"]).error
    falling = bool((curves.diff().dropna() <= 0).all())
    text = f"the median layer has {with_interval(left)} % of ‖θ_t − θ̄‖² in the first 8 %"
    return within(left, low=50) if falling else False, text


def rises_gradually(rows: pd.DataFrame) -> Samples:
    """Return the share of the task vectors at 8 % of the ranks less that of I(r), in points, of the median layer."""
    centred = select(rows, origin="centred").set_index(["seed", "layer"])
    risen = select(centred, ratio=USED).whole / select(centred, ratio=1.0).whole
    share = 1 - left_out(rows)
    return {"share of ‖θ_t − θ̄‖² less share of I(r), median layer": 100 * share - 100 * risen.groupby("seed").median()}


# What the draws of the linear model are asked


def holds(rows: pd.DataFrame, bound: str) -> pd.Series:
    return rows[bound] * (1 + 1e-9) + ROUNDING >= rows.L


def never_broken(rows: pd.DataFrame) -> tuple[Verdict, str]:
    draws = select(rows, part="draws")
    broken, worst = int((~holds(draws, "printed")).sum()), (draws.L / draws.printed).max()
    return broken == 0, f"{broken} of {len(draws)} draws violate it; the largest L / bound is {worst:.2g}"


def grows_squared(rows: pd.DataFrame) -> tuple[Verdict, str]:
    clean = select(rows, part="overlap", noise=0)
    slopes = {n: log_log_slope(list(group.interference), list(group.L)) for n, group in clean.groupby("tasks")}
    listed_slopes = ", ".join(f"{value:.3f} (T = {tasks})" for tasks, value in slopes.items())
    return all(abs(value - 2) < 0.05 for value in slopes.values()), f"slopes {listed_slopes}"


def holds_as_printed(rows: pd.DataFrame) -> tuple[Verdict, str]:
    apart = select(rows.rename(columns={"row spaces": "spaces"}), part="readings", spaces="orthogonal", a="ℝ^d")
    text = f"L = {number(apart.L.iloc[0])}, bound {number(apart.printed.iloc[0])}"
    return bool(holds(apart, "printed").iloc[0]), f"orthogonal row spaces, η = 0: {text}"


def smaller_is_enough(rows: pd.DataFrame) -> tuple[Verdict, str]:
    draws = select(rows, part="draws")
    tighter, worst = bool(holds(draws, "derived").all()), (draws.L / draws.derived).max()
    violations = f"{'no' if tighter else 'some'} violation in {len(draws)} draws"
    return tighter, f"{violations}; the largest L / bound is {worst:.2g}"


def number(value: float) -> str:
    return "0" if value < ROUNDING**0.5 else f"{value:.3g}"


# Claims, written before the run
SYNTHETIC = "drawn matrices alone: no model and no data enters"

# fmt: off

def claims(options: Options) -> list[Claim]:
    return [
        *(claim for count in options.shown for claim in of_layers(options.run, count)),
        Claim("C3", "The bound L ≤ n (k₃ I + T(T−1) k₄ η)² holds for compact V_t and I as meant.",
              of="no draw violates it", decide=never_broken, caveat=SYNTHETIC),
        Claim("C3", "L grows as I² with the overlap where inputs lie in the row spaces (η = 0).",
              of="slope within 0.05 of 2, for every T", decide=grows_squared, caveat=SYNTHETIC),
        Claim("C3", "The bound holds as printed, for a ∈ ℝ^d.",
              of="one counter-example refutes it", decide=holds_as_printed, caveat=SYNTHETIC),
        Claim("C3", "A smaller constant is enough: k₃ = c r s_max³ / α.", of="no draw violates it", ours=True,
              decide=smaller_is_enough, caveat=SYNTHETIC),
    ]


def of_layers(run: str, count: int) -> list[Claim]:
    layers, where = partial(layers_of, run=run, count=count), f"{count} tasks"

    def lower(measure: str, says: str, ours: bool = False) -> Claim:
        return Claim(
            "C3", says, lambda rows: {"lower at": share_lower(layers(rows), measure)}, setting=where,
            low=100, of="share of the layers and ranks, for every seed,", unit="%", ours=ours,
            also=lambda rows: f" of {len(pairs(layers(rows), measure))} points over all seeds; centred / original "
                              f"in the median {middle_ratio(layers(rows), measure):.2f}")

    return [
        lower("whole", "I(k), as we read Equation 5, is lower for centred task vectors at every layer and rank."),
        lower("spectral", "I(k) as printed, which no direction enters, is lower for centred at every layer and rank."),
        lower("loss", "Task interference L_k is lower for centred task vectors at every layer and rank.", ours=True),
        Claim("C3", "R(k) falls with k, steeply first: the first 8 % of the ranks hold more than half.", setting=where,
              of="R(k) falls at every layer, and the median layer's share ≥ 50 %",
              decide=lambda rows: falls_steeply(layers(rows))),
        Claim("C3", "I(k) rises gradually: at 8 % of the ranks less of it is there than of the task vectors.",
              lambda rows: rises_gradually(layers(rows)), low=0, of="paired difference", setting=where),
    ]

# fmt: on


def lower_table(rows: pd.DataFrame) -> pd.DataFrame:
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for (run, count), case in select(rows, part="layer").groupby(["run", "tasks"], sort=False):
        lines[run, f"{count} tasks"] = {
            "common": with_interval(select(rows, part="common", run=run, tasks=count).common, 3),
            **{label: with_interval(share_lower(case, measure)) for measure, label in MEASURES.items()},
            "I(k) centred / original, median": f"{middle_ratio(case, 'whole'):.2f}",
        }
    return pd.DataFrame(lines).T


def median_table(run: str, count: int, rows: pd.DataFrame) -> pd.DataFrame:
    layers, measures = layers_of(rows, run, count), {**MEASURES, "error": "R(k) / R(0)"}
    of_seeds = layers.groupby(["ratio", "origin", "seed"], sort=False)[list(measures)].median().reset_index()
    wide = {
        (label, origin): table(select(of_seeds, origin=origin), "ratio", value=measure, digits=3)[measure]
        for measure, label in measures.items()
        for origin in ORIGINS
    }
    return pd.DataFrame(wide).rename(index="{:g}".format).rename_axis("k / r")


def constants(rows: pd.DataFrame) -> pd.DataFrame:
    """Return over s_max / α the largest measured L / (n I²), and what the bounds at η = 0 put in its place."""
    part = select(rows, part="condition")
    return part[list(BOUNDS)].div(part.samples * part.interference**2, axis=0).groupby(part.condition).max()


def tables(options: Options) -> Tables:
    return {
        "Share of layers and ranks where centred task vectors have less, %; common: ‖mean τ‖² / mean ‖τ‖²": lower_table,
        **{
            f"{options.run}, {count} tasks: medians over layers; I(k) per pair of tasks": partial(
                median_table, options.run, count
            )
            for count in options.shown
        },
        "Largest L / (n I²) where tasks share the weakest direction, and the bounds' k₃² in its place": lambda rows: (
            constants(rows).map("{:.3g}".format).rename(index="{:g}".format).rename_axis("s_max / α")
        ),
    }


def layers_figure(run: str, count: int, rows: pd.DataFrame) -> Figure:
    """Draw I(k), I(k) as printed and L_k: a point per layer, a line for their median (the paper's Figures 2 and 8)."""
    figure, axes = panels(3, 3, 3.9)
    layers = layers_of(rows, run, count)
    for panel, (measure, title) in zip(axes, DRAWN.items(), strict=True):
        dress(panel, title, "rank ratio k / r", "")
        for place, origin in enumerate(ORIGINS):
            means = select(layers, origin=origin).groupby(["layer", "ratio"])[measure].mean().unstack("layer")
            points = series_style(place) | {"linestyle": "", "markersize": 2.5, "alpha": 0.35}
            panel.plot(means.index * (0.97, 1.03)[place], means, **points)
            panel.plot(means.index, means.median(axis=1), label=f"{origin} task vectors", **series_style(place))
        root_axis(panel, TICKS)
        panel.set_ylim(bottom=0)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def kinds_figure(run: str, count: int, rows: pd.DataFrame) -> Figure:
    """Draw I(k) and R(k) together, a panel per kind of matrix, mean over layers (the paper's Figure 3)."""
    layers = layers_of(rows, run, count)
    full = select(layers, origin="original", ratio=1.0).groupby("kind").whole.mean()
    shares = {
        f"I(k) {origin} / I(r) original": layers.whole / layers.kind.map(full).where(lambda values: values > 0, 1.0)
        for origin in ORIGINS
    }
    parts = [layers.assign(curve=name, share=share)[layers.origin == name.split()[1]] for name, share in shares.items()]
    parts += [select(layers.assign(curve="R(k) / R(0), centred", share=layers.error), origin="centred")]
    how: dict[str, Any] = {"x_label": "k / r", "y_label": "share", "scale": "root", "ticks": TICKS}
    return curves(pd.concat(parts), "ratio", "curve", "share", "kind", **how)


def overlap_figure(rows: pd.DataFrame) -> Figure:
    """Draw L and its bounds over I of four tasks, without noise and with it."""
    overlaps = select(rows, part="overlap", tasks=4).assign(seed=0)
    long = overlaps.melt(["seed", "interference", "noise"], list(BOUNDS), "bound", "limit")
    how: dict[str, Any] = {"scale": "log", "log_y": True, "ticks": (0.01, 0.1, 1, 10), "x_label": "I", "y_label": "L"}
    labels: dict[Any, str] = {**BOUNDS, 0.0: "four tasks, η = 0", 0.01: "four tasks, η = 0.01"}
    return curves(long, "interference", "bound", "limit", "noise", labels=labels, **how)


def condition_figure(rows: pd.DataFrame) -> Figure:
    """Draw what the bounds put in the place of L / (n I²) as the ratio of singular values grows."""
    long = constants(rows).reset_index().assign(seed=0).melt(["seed", "condition"], list(BOUNDS), "bound", "constant")
    how: dict[str, Any] = {"scale": "log", "log_y": True, "x_label": "s_max / α", "y_label": "L / (n I²)"}
    return curves(long, "condition", "bound", "constant", labels=BOUNDS, title="tasks share the weakest", **how)


def figures(options: Options) -> Figures:
    return {
        **{f"layers_{count}": partial(layers_figure, options.run, count) for count in options.shown},
        **{f"kinds_{count}": partial(kinds_figure, options.run, count) for count in options.shown},
        "overlap": overlap_figure,
        "condition": condition_figure,
    }


STUDY = Study(
    options=Options,
    runs=lambda options: [options.run, *options.compared],
    systems=("C3",),
    measure=measure,
    claims=claims,
    tables=tables,
    figures=figures,
)

STUDIES = {"interference": STUDY, "texts_interference": STUDY}
