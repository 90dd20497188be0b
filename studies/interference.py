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

with λ = 1 as there. Unlike I(k) it sees that contributions of opposite sign cancel.

*The bound.* Random tasks on the linear model in float64, with a known overlap of their row spaces, a known ratio
s_max / α of singular values and noise η on the inputs. `studies.theory.interference` has what is printed,
what must be read otherwise, and a constant that is smaller by s_max / α.

`texts_interference` is the same on a real encoder, all-MiniLM-L6-v2, tuned on eight real tasks (worlds/real-texts).

**Source.** CART, Section 4.2, equations 5 to 7 and 9, Figures 2, 3 and 8, appendices A and C.1. The constant called
derived is derived in `studies/theory/interference.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.merging.matrices import rank_of
from studies.lab import Claim, Laboratory, Row, Section, Study
from studies.lab.claims import Samples, Verdict, with_interval, within
from studies.lab.plots import root_axis
from studies.lab.rows import select
from studies.lab.study import Figures, Tables
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
from tasks.plotting.palette import INK, SERIES

ORIGINS = ("centred", "original")
USED = 0.08
MEASURES = {"whole": "I(k)", "kept": "I(k), Σ̃ by what is kept", "spectral": "I(k) as printed", "loss": "L_k"}
DRAWN = {"whole": "I(k), a pair of tasks", "spectral": "I(k) as printed", "loss": "task interference L_k"}
BOUNDS = {"printed": "printed, k₃ = c r s_max⁴/α²", "derived": "derived, k₃ = c r s_max³/α", "pairwise": "pairwise"}
OVERLAPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
CONDITIONS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
ROUNDING = 1e-18


class Options(Section):
    """The study's choices.

    Attributes:
        run: whose experts.
        counts: the first so many of their tasks; `shown` of them have figures and findings.
        shown: see above.
        compared: run → number of tasks: experts that share more.
        ratios: k / r, ascending; 0.08 and 1 are among them.
        draws: random draws of the linear model for each of its settings.
    """

    run: str
    counts: list[int]
    shown: list[int]
    compared: dict[str, int]
    ratios: list[float]
    draws: int = Field(2, ge=1)


# Design and measurement


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
                common += common_part(vectors)
    for tensor, origins in layers.items():
        for origin, curves in origins.items():
            for place, ratio in enumerate(ratios):
                layer = {"layer": tensor, "kind": kind_of(tensor), "origin": origin, "ratio": ratio}
                measured = {measure: values[place] for measure, values in curves.items()}
                yield {"part": "layer", **about, **layer, **measured}
    yield {"part": "common", **about, "common": float(common[0] / common[1])}


def common_part(vectors: Sequence[Tensor]) -> Tensor:
    stack = torch.stack(list(vectors))
    return torch.stack([stack.mean(dim=0).square().sum(), stack.square().sum() / len(stack)])


def curves_of(factors: TaskFactors, ratios: Sequence[float]) -> dict[str, list[float]]:
    """Return the curves over the ratios."""
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


def medians(rows: pd.DataFrame, origin: str, measure: str, ratio: float) -> pd.Series:
    """Return the median over layers at a ratio, by seed."""
    return select(rows, origin=origin, ratio=ratio).groupby("seed")[measure].median()


def falls_steeply(rows: pd.DataFrame) -> tuple[Verdict, str]:
    left = 100 * (1 - medians(rows, "centred", "error", USED))
    curves = select(rows, origin="centred").sort_values("ratio").groupby(["seed", "layer"]).error
    falling = bool((curves.diff().dropna() <= 0).all())
    text = f"the median layer has {with_interval(left)} % of ‖θ_t − θ̄‖² in the first 8 %"
    return within(left, low=50) if falling else False, text


def rises_gradually(rows: pd.DataFrame) -> Samples:
    """Return the share of the task vectors at 8 % of the ranks less that of I(r), in points, of the median layer."""
    centred = select(rows, origin="centred").set_index(["seed", "layer"])
    risen = select(centred, ratio=USED).whole / select(centred, ratio=1.0).whole
    share = 1 - medians(rows, "centred", "error", USED)
    return {"share of ‖θ_t − θ̄‖² less share of I(r), median layer": 100 * share - 100 * risen.groupby("seed").median()}


# What the draws of the linear model are asked


def holds(rows: pd.DataFrame, bound: str) -> pd.Series:
    return rows[bound] * (1 + 1e-9) + ROUNDING >= rows.L


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of log y over log x by least squares.

    Example:
        >>> round(slope([1.0, 2.0, 4.0], [3.0, 12.0, 48.0]), 6)
        2.0
    """
    return float(np.polyfit(np.log(xs), np.log(ys), 1)[0])


def slope_of(rows: pd.DataFrame) -> float:
    return slope(list(rows.interference), list(rows.L))


def never_broken(rows: pd.DataFrame) -> tuple[Verdict, str]:
    draws = select(rows, part="draws")
    broken, worst = int((~holds(draws, "printed")).sum()), (draws.L / draws.printed).max()
    return broken == 0, f"{broken} of {len(draws)} draws violate it; the largest L / bound is {worst:.2g}"


def grows_squared(rows: pd.DataFrame) -> tuple[Verdict, str]:
    clean = select(rows, part="overlap", noise=0)
    slopes = {tasks: slope_of(group) for tasks, group in clean.groupby("tasks")}
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

# fmt: off

def claims(options: Options) -> list[Claim]:
    return [
        *(claim for count in options.shown for claim in of_layers(options.run, count)),
        Claim("C3", "The bound L ≤ n (k₃ I + T(T−1) k₄ η)² holds for compact V_t and I as meant.",
              of="no draw violates it", decide=never_broken),
        Claim("C3", "L grows as I² with the overlap where inputs lie in the row spaces (η = 0).",
              of="slope within 0.05 of 2, for every T", decide=grows_squared),
        Claim("C3", "The bound holds as printed, for a ∈ ℝ^d.",
              of="one counter-example refutes it", decide=holds_as_printed),
        Claim("C3", "A smaller constant is enough: k₃ = c r s_max³ / α.", of="no draw violates it", ours=True,
              decide=smaller_is_enough),
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

# What is shown


def cases_of(rows: pd.DataFrame) -> dict[tuple[str, int], pd.DataFrame]:
    return dict(iter(select(rows, part="layer").groupby(["run", "tasks"], sort=False)))


def lower_table(rows: pd.DataFrame) -> pd.DataFrame:
    common, lines = select(rows, part="common"), {}
    for (run, count), case in cases_of(rows).items():
        lines[run, f"{count} tasks"] = {
            "common": with_interval(select(common, run=run, tasks=count).common, 3),
            **{label: with_interval(share_lower(case, measure)) for measure, label in MEASURES.items()},
            "I(k) centred / original, median": f"{middle_ratio(case, 'whole'):.2f}",
        }
    return pd.DataFrame(lines).T


def median_table(run: str, count: int, rows: pd.DataFrame) -> pd.DataFrame:
    layers, lines = layers_of(rows, run, count), {}
    for ratio in layers.ratio.unique():
        lines[f"{ratio:g}"] = {
            f"{label}, {origin}": with_interval(medians(layers, origin, measure, ratio), 3)
            for measure, label in {**MEASURES, "error": "R(k) / R(0)"}.items()
            for origin in ORIGINS
        }
    return pd.DataFrame(lines).T.rename_axis("k / r")


def kind_table(run: str, count: int, rows: pd.DataFrame) -> pd.DataFrame:
    lines = {}
    for kind, of_kind in layers_of(rows, run, count).groupby("kind", sort=False):
        cells = {"layers": str(of_kind.layer.nunique())}
        for measure, origin in product(("whole", "spectral", "loss"), ORIGINS):
            cells[f"{MEASURES[measure]}, {origin}"] = with_interval(medians(of_kind, origin, measure, USED), 3)
        cells["R(k) / R(0), centred"] = with_interval(medians(of_kind, "centred", "error", USED), 3)
        cells["I(k) lower at, %"] = f"{share_lower(of_kind, 'whole').mean():.0f}"
        lines[kind] = cells
    return pd.DataFrame(lines).T


def loose_table(rows: pd.DataFrame) -> pd.DataFrame:
    draws, lines = select(rows, part="draws"), {}
    for bound, label in BOUNDS.items():
        shares = (draws.L / draws[bound]).groupby(draws.condition)
        lines[label] = {
            f"s_max/α = {condition:g}, {name}": f"{value:.2g}"
            for condition, share in shares
            for name, value in (("median", share.median()), ("largest", share.max()))
        }
    return pd.DataFrame(lines).T


def slope_table(rows: pd.DataFrame) -> pd.DataFrame:
    lines = {}
    for tasks, group in select(rows, part="overlap").groupby("tasks"):
        clean, noisy = select(group, noise=0), group[group.noise > 0]
        slopes = {"η = 0": clean, "η = 0.01": noisy, "η = 0.01, the smallest overlaps": noisy.iloc[:3]}
        lines[f"{tasks} tasks"] = {name: f"{slope_of(part):.3f}" for name, part in slopes.items()}
    return pd.DataFrame(lines).T


def constants(rows: pd.DataFrame) -> pd.DataFrame:
    """Return over s_max / α the largest measured L / (n I²), and what the bounds at η = 0 put in its place."""
    part = select(rows, part="condition")
    names = ["L", "pairwise", "derived", "printed"]
    return part[names].div(part.samples * part.interference**2, axis=0).groupby(part.condition).max()


def condition_table(rows: pd.DataFrame) -> pd.DataFrame:
    largest = constants(rows)
    late = largest.iloc[2:]
    slopes = {name: f"{slope(list(late.index), list(late[name])):.2f}" for name in largest}
    table = largest.map("{:.3g}".format).rename(index="{:g}".format)
    return pd.concat([table, pd.DataFrame([slopes], index=["slope"])]).rename_axis("s_max / α")


def reading_table(rows: pd.DataFrame) -> pd.DataFrame:
    part = select(rows, part="readings").set_index(["row spaces", "a"])
    columns = {"L": "L", "I": "interference", "bound": "printed", "I as printed": "spectral"}
    cells = {label: part[name].map(number) for label, name in {**columns, "bound with it": "printed_spectral"}.items()}
    return pd.DataFrame({**cells, "holds": holds(part, "printed").map({True: "yes", False: "no"})})


def tables(options: Options) -> Tables:
    made: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
        "Share of layers and ranks where centred task vectors have less, %; common: ‖mean τ‖² / mean ‖τ‖²": lower_table
    }
    for count in options.shown:
        name = f"{options.run}, {count} tasks"
        made[f"{name}: medians over layers; I(k) per pair of tasks"] = partial(median_table, options.run, count)
        made[f"{name}: by kind of matrix at k / r = {USED:g}"] = partial(kind_table, options.run, count)
    return made | {
        "L / bound over draws of the linear model; 1 would be tight, above 1 a violation": loose_table,
        "Slope of log L over log I as the overlap varies": slope_table,
        "Largest L / (n I²) where tasks share the weakest direction, and the bounds' k₃² in its place": condition_table,
        "The theorem's readings at η = 0: row spaces, inputs x = V a with a in ℝ^r (compact V) or ℝ^d (as printed)": (
            reading_table
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
            style: dict[str, Any] = {
                "color": SERIES[place],
                "linestyle": "",
                "marker": "o",
                "markersize": 2.5,
                "alpha": 0.35,
            }
            panel.plot(means.index * (0.97, 1.03)[place], means, **style)
            panel.plot(means.index, means.median(axis=1), label=f"{origin} task vectors", **series_style(place))
        root_axis(panel, (0, 0.08, 0.32, 1))
        panel.set_ylim(bottom=0)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def kinds_figure(run: str, count: int, rows: pd.DataFrame) -> Figure:
    """Draw I(k) and R(k) together, a panel per kind of matrix, mean over layers and seeds (the paper's Figure 3).

    I(k) is shown as a share of that of the original task vectors at full rank.
    """
    kinds = list(layers_of(rows, run, count).groupby("kind", sort=False))
    figure, axes = panels(len(kinds), 4, 2.7, sharey=True)
    for index, (panel, (kind, of_kind)) in enumerate(zip(axes, kinds, strict=True)):
        dress(panel, str(kind), "k / r" if index >= len(kinds) - 4 else "", "share" if index % 4 == 0 else "")
        means = of_kind.groupby(["ratio", "origin"])[["whole", "error"]].mean().unstack("origin")
        full = means.whole.original.iloc[-1] or 1.0
        for place, origin in enumerate(ORIGINS):
            style = series_style(place) | {"markersize": 4}
            panel.plot(means.index, means.whole[origin] / full, label=f"I(k) {origin} / I(r) original", **style)
        dashed: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1.5}
        panel.plot(means.index, means.error.centred, label="R(k) / R(0), centred", **dashed)
        root_axis(panel, (0, 0.08, 0.32, 1))
        panel.set_ylim(bottom=0)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def bound_figure(rows: pd.DataFrame) -> Figure:
    """Draw L and its bounds over I, without noise and with it, and L / (n I²) over s_max / α."""
    figure, axes = panels(3, 3, 3.9)
    labels = {"L": "measured", "printed": "bound as printed", "derived": "bound with derived k₃"}
    labels["pairwise"] = "pairwise bound"
    for panel, noise in zip(axes, (0.0, 0.01), strict=False):
        dress(panel, f"T = 4, η = {noise:g}", "I", "L" if noise == 0 else "", grid="both")
        overlaps = select(rows, part="overlap", noise=noise, tasks=4)
        lines(panel, list(overlaps.interference), overlaps, labels)
        panel.set_xscale("log")
    dress(axes[2], "tasks share the weakest", "s_max / α", "L / (n I²)", grid="both")
    largest = constants(rows)
    lines(axes[2], list(largest.index), largest, labels)
    axes[2].set_xscale("log", base=2)
    axes[2].set_xticks(largest.index, labels=[f"{condition:g}" for condition in largest.index])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def lines(panel: Axes, xs: Sequence[float], rows: pd.DataFrame, labels: Mapping[str, str]) -> None:
    for place, (name, label) in enumerate(labels.items()):
        panel.plot(xs, rows[name], label=label, **series_style(place))
    panel.set_yscale("log")


def figures(options: Options) -> Figures:
    made: dict[str, Callable[[pd.DataFrame], Figure]] = {}
    for count in options.shown:
        made[f"layers_{count}"] = partial(layers_figure, options.run, count)
        made[f"kinds_{count}"] = partial(kinds_figure, options.run, count)
    return made | {"bound": bound_figure}


def notes(rows: pd.DataFrame, options: Options) -> list[str]:
    common = select(rows, part="common").groupby(["run", "tasks"]).common.mean()
    course = "; ".join(
        f"{run}, {count} tasks: common part {common[run, count]:.2f}, I(k) lower at "
        f"{share_lower(case, 'whole').mean():.0f} %, L_k at {share_lower(case, 'loss').mean():.0f} %"
        for (run, count), case in cases_of(rows).items()
    )
    layers = layers_of(rows, options.run, options.shown[0])
    informative = 100 * (select(layers, origin="centred").theorem < 1).mean()
    low, full = (medians(layers, "centred", "theorem", ratio).mean() for ratio in (USED, 1.0))
    return [
        "Centring takes away what all task vectors have in common and makes the rest add up to zero, so that each lies "
        "in the span of the others: with two tasks the centred ones are ±1 times one matrix, and I(k) is the largest "
        "there is. I(k) adds norms, so it counts directions that cancel as much as directions that add up; L_k does "
        f"not. Task vectors at right angles have a common part of 1/T; the measured ones: {course}.",
        f"The theorem's term k₃ I, set beside what ‖V_sᵀ V_t‖ ≤ 1 gives without any measurement, is {low:.3g} times "
        f"as large in the median layer at 8 % and {full:.3g} times at full rank ({options.shown[0]} tasks, centred); "
        f"it is smaller, so that I says anything, at {informative:.1f} % of layers and ranks. The ratio of the largest "
        "to the smallest singular value enters it squared.",
        "`visual.proj` is measured transposed, since it multiplies its inputs from the right; position embeddings meet "
        "no input but one-hot positions, and are measured as they are stored.",
        theorem_note(rows),
    ]


def theorem_note(rows: pd.DataFrame) -> str:
    """Return notes on errors and slack in the printed theorem."""
    draws = select(rows, part="draws")
    spread = draws.condition.max()
    draws = draws[(draws.condition == spread) & (draws["rank"] > 1)]
    medians = ", ".join(f"{(draws.L / draws[bound]).median():.2g} ({bound})" for bound in BOUNDS)
    noisy = select(rows, part="overlap", overlap=OVERLAPS[0])
    noisy = noisy[noisy.noise > 0]
    return (
        "Errors of the printed theorem: I is printed with a product that no direction enters, so that the right side "
        "is the same for equal and for orthogonal tasks; a ∈ ℝ^d with a full V_t makes every input lie 'in the row "
        "space' (both in the table of readings); r_t s_max² should be √(r_t r_s) s_max², which the largest rank "
        f"covers; and L ≤ O(I²) is true at η = 0 only: L stays at {(noisy.L / noisy.samples).mean():.2g} per n as I "
        f"goes to 0 with η = 0.01. T > 2 is not needed. The bound is loose: at s_max/α = {spread:g}, L / bound is in "
        f"the median {medians}; most is lost by α, of which L needs one power and the proof takes two."
    )


STUDY = Study(
    options=Options,
    runs=lambda options: [options.run, *options.compared],
    systems=("C3",),
    measure=measure,
    claims=claims,
    tables=tables,
    figures=figures,
    notes=notes,
)

STUDIES = {"interference": STUDY, "texts_interference": STUDY}
