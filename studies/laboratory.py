"""Study `laboratory`: in the one-layer Transformer of the theory, does what it proves of task vectors hold?

**Question.** *When is Task Vector Provably Effective for Model Editing?* proves for a one-layer Transformer which λ
add a task, which make it forget one, and which reach a task that nobody trained. Each of these statements can be
measured in that model exactly. Which of them hold, and with which constants?

**Method.** Sequences of P = 20 tokens from ±μ and M orthonormal irrelevant patterns (Definition 2, exact counts,
d = 16) and the model of Equation 4 with m = 512, in float64:

    f(X; Ψ) = (1/P) Σ_l aᵀ ReLU(V Σ_s x_s softmax_s(x_sᵀ W x_l)),    ℓ = max(1 − y f(X; Ψ), 0)

W and V are trained by mini-batch SGD (B = 264, η = 0.5, 70 steps) from one small random Ψ^(0) that all tasks of a seed
share; a stays as it is. For two tasks with μ_1ᵀμ_2 = α, Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 is judged on fresh sequences of both. A
task counts as solved up to a hinge loss of 0.05 and as forgotten from 0.5. Tasks that nobody trained have μ = Σ γ_i μ_i
+ κ μ_⊥. Five seeds of the initial weights, the batches and the test sets; verdicts by 95 % intervals over them. Of c
labels one output is measured, for which 1/c of the relevant tokens are left: c varies δ_* too. The error over the batch
is that after 35 steps, two thirds of those that the task needs: after all of them it is 0 for every B, and shows
nothing. The theory gives orders, so the rules leave an exponent much room; an interval inside it can still exclude the
theory's exponent. The rules beside the findings were written before the run, after a look at two of the seeds.

**Source.** Li et al. 2025, Definition 2, Equation 4, Theorems 1 to 3, Corollaries 1 and 2, Lemmas 1 to 5, Appendix F.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic import Field
from torch import Tensor

from mergeflow.errors import MergeflowError
from studies.lab import Claim, Laboratory, Row, Study, curves, select, table
from studies.lab.claims import all_within, with_interval, within
from studies.lab.inputs import grid
from studies.lab.plots import scatter
from studies.theory.coefficients import closed_form, out_of_domain, predicted_outputs
from studies.theory.laboratory import (
    Judged,
    PatternTask,
    Training,
    Weights,
    attention_mass,
    combined,
    fine_tune,
    frobenius_left,
    initial,
    irrelevant_energy,
    judge,
    large_rows,
    leading_cosine,
    related_patterns,
    row_pruned,
    truncated,
)
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.palette import INK
from tasks.plotting.panels import colour_bar, heat_map, over
from tasks.project.sections import Section


class Options(Section):
    seeds: list[int] = Field([0, 1, 2, 3, 4], min_length=2)  # of Ψ^(0), a, the batches and the test sets
    dimensions: int = Field(16, ge=8)  # d
    width: int = Field(512, ge=8)  # m
    tokens: int = Field(20, ge=2)  # P
    relevant: int = Field(8, ge=1)  # δ_* P
    confusing: int = Field(2, ge=0)  # δ_# P
    batch: int = Field(264, ge=1)  # B
    step: float = Field(0.5, gt=0)  # η
    steps: int = Field(70, ge=1)  # T
    samples: int = Field(256, ge=8)  # test sequences per task
    alphas: list[float] = Field([-0.8, -0.65, -0.5, -0.2, 0.0, 0.2, 0.5, 0.8], min_length=2)  # α of the phase diagrams
    # λ of the phase diagrams, ascending, with 0 among them
    scales: list[float] = Field(
        [*range(-12, -4), -4, -3.5, -3, -2.5, -2, -1.5, -1, -0.75, -0.5, -0.25, *grid(0, 1.2, 0.1), 1.5, 2, 3],
        min_length=2,
    )
    solved: float = Field(0.05, gt=0)  # hinge loss up to which a task counts as solved
    # hinge loss from which a task counts as forgotten; c of Theorem 2 is chosen as in the row
    forgotten: float = Field(0.5, gt=0)
    step_sizes: list[float] = Field([0.125, 0.25, 0.5], min_length=2)  # η of the convergence table
    shares: list[int] = Field([4, 6, 8], min_length=2)  # δ_* P of the convergence table
    batches: list[int] = Field([4, 16, 64, 264], min_length=2)  # B of the convergence table and of the rows' table
    early: int = Field(35, ge=1)  # steps after which the error over B is taken, before any B has brought it to 0
    widths: list[int] = Field([128, 512, 1024], min_length=1)  # m of the rows' table
    spreads: list[float] = Field([0.1, 0.5, 1.0], min_length=1)  # ξ√m of the rows' table
    bits: list[int] = Field([1, 2, 3], min_length=2)  # c of the tasks with c labels
    # γ of the tasks that nobody trained; κ completes each to length 1
    targets: list[list[float]] = Field(
        [*([0.8, 0.4], [0.6, -0.5], [0.792, -0.6], [0.5, 0.5, 0.5], [0.7, -0.4, 0.3]), [0.0, 0.0], [-0.5, -0.5]],
        min_length=1,
    )
    drawn: int = Field(40, ge=1)  # λ drawn per target, uniformly in [−1, 3] per coordinate
    c: float = Field(0.2, gt=0, lt=1)  # of Equation 7
    keep: list[float] = Field([0.05, 0.1, 0.25, 0.5, 0.75, 0.9], min_length=1)  # shares of rows kept in pruning


@dataclass(frozen=True)
class Bench:
    """The choices and one seed's Ψ^(0), which all its tasks share, with a, [width]."""

    options: Options
    seed: int
    begin: Weights
    output: Tensor

    @classmethod
    def open(cls, options: Options, seed: int, width: int | None = None, spread: float = 0.5) -> "Bench":
        return cls(options, seed, *initial(options.dimensions, width or options.width, seed, spread))

    def task(self, pattern: Tensor, irrelevant: Tensor) -> PatternTask:
        """Return the task of a pattern [d] with the usual counts; the irrelevant patterns are [M, d]."""
        return PatternTask(pattern, irrelevant, self.options.tokens, self.options.relevant, self.options.confusing)

    def training(self, seed: int) -> Training:
        return Training(self.options.step, self.options.batch, self.options.steps, seed)

    def vector(self, task: PatternTask, training: Training) -> Weights:
        """Return ΔΨ of a task."""
        return fine_tune(self.begin, self.output, task, training).minus(self.begin)

    def judge(self, models: Weights, task: PatternTask, seed: int) -> Judged:
        """Judge a stack of models on test sequences of a task, which no training saw."""
        return judge(models, self.output, *self.test(task, seed))

    def test(self, task: PatternTask, seed: int) -> tuple[Tensor, Tensor]:
        """Return sequences [n, P, d] and labels [n]."""
        return task.draw(self.options.samples, torch.Generator().manual_seed(1_000_003 + seed))

    def sums(self, vectors: Sequence[Weights], scales: Sequence[float]) -> Weights:
        """Return the stack Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 over λ."""
        by = torch.tensor(scales, dtype=torch.float64)
        return combined(self.begin, vectors, torch.stack([torch.ones_like(by), by], 1))


def phase_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield, for every α, every λ and every kind of task vector, how Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 does on both tasks.

    The kinds are the whole vectors (`whole`), their best approximations of rank 1 and 2, and vectors whose MLP keeps a
    share of its rows: the largest (`rows …`), or the smallest, as a control (`smallest …`).
    """
    bench = Bench.open(options, seed)
    first, _, rest = related_patterns(0.0, options.dimensions)  # both are the same for every α
    first_task = bench.task(first, rest)
    vector = bench.vector(first_task, bench.training(2 * seed))
    for alpha in options.alphas:
        second = bench.task(related_patterns(alpha, options.dimensions)[1], rest)
        vectors = [vector, bench.vector(second, bench.training(2 * seed + 1))]
        about: Row = {"seed": seed, "alpha": alpha}
        yield {"part": "structure", **about, **_structure(bench, vector, first_task, second.pattern)}
        for kind, change in _kinds(options, alpha).items():
            scales = options.scales if kind == "whole" else [scale for scale in options.scales if -2 <= scale <= 2]
            models = bench.sums([change(vector) for vector in vectors], scales)
            judged = [bench.judge(models, task, 2 * seed + n) for n, task in enumerate((first_task, second))]
            for index, scale in enumerate(scales):
                row: Row = {"part": "phase", **about, "kind": kind, "scale": scale}
                for number, judgement in enumerate(judged, 1):
                    row |= {f"{name}_{number}": float(values[index]) for name, values in vars(judgement).items()}
                yield row


def _kinds(options: Options, alpha: float) -> dict[str, Callable[[Weights], Weights]]:
    kinds: dict[str, Callable[[Weights], Weights]] = {"whole": lambda vector: vector}
    if alpha in (-0.5, 0.0, 0.5):
        kinds |= {f"rank {rank}": lambda vector, rank=rank: truncated(vector, rank) for rank in (1, 2)}  # type: ignore[misc]
    if alpha == 0.0:
        for keep in options.keep:
            kinds[f"rows {keep:g}"] = lambda vector, keep=keep: row_pruned(vector, keep)  # type: ignore[misc]
            kinds[f"smallest {keep:g}"] = lambda vector, keep=keep: row_pruned(vector, keep, smallest=True)  # type: ignore[misc]
    return kinds


def _structure(bench: Bench, vector: Weights, task: PatternTask, across: Tensor) -> Row:
    """Return the structure of the first task's vector, seen from its own pattern and from the other's."""
    inputs, labels = bench.test(task, bench.seed)
    patterns = (task.pattern, across)
    quadratic = [float(pattern @ vector.attention @ pattern) for pattern in patterns]
    values = [float((vector.value @ pattern).norm()) for pattern in patterns]
    return {
        "attention_ratio": quadratic[1] / quadratic[0],
        "value_ratio": values[1] / values[0],
        "attention_mass": attention_mass(bench.begin.plus(vector), inputs[labels > 0], task.pattern),
        "value_cosine": leading_cosine(vector.value, task.pattern),
        "attention_cosine": leading_cosine(vector.attention, task.pattern),
        "value_left_1": frobenius_left(vector.value, 1),
        "value_left_2": frobenius_left(vector.value, 2),
        "irrelevant_energy": irrelevant_energy(vector, task.pattern, task.irrelevant),
        "large_rows": large_rows(vector),
    }


def convergence_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield the steps until the task is solved over η, δ_*, c and B, and over B the loss early and at the end."""
    bench = Bench.open(options, seed)
    first, _, rest = related_patterns(0.0, options.dimensions)
    task, usual = bench.task(first, rest), bench.training(seed)
    clean = replace(task, confusing=0)  # so that δ_* alone varies
    varied = [
        *(("step", step, task, replace(usual, step=step)) for step in options.step_sizes),
        *(("relevant", count / options.tokens, replace(clean, relevant=count), usual) for count in options.shares),
        *(("bits", bits, _one_bit(options, bits), usual) for bits in options.bits),
        *(("batch", batch, task, replace(usual, batch=batch)) for batch in options.batches),
    ]
    for name, at, changed, training in varied:
        row = _row(seed, name, at, steps=steps_to(bench, changed, training))
        if name == "batch":
            early = _ended(bench, changed, replace(training, steps=options.early))
            row |= _ended(bench, changed, training) | {"early_hinge": early["hinge"]}
        yield row


def row_norm_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield the share of large rows of ΔV over the width and over the spread of the initial weights."""
    first, _, rest = related_patterns(0.0, options.dimensions)
    for name, at, bench in [
        *(("width", width, Bench.open(options, seed, width)) for width in options.widths),
        *(("spread", spread, Bench.open(options, seed, spread=spread)) for spread in options.spreads),
    ]:
        yield _row(seed, name, at, **_ended(bench, bench.task(first, rest), replace(bench.training(seed), batch=64)))


def steps_to(bench: Bench, task: PatternTask, training: Training) -> float:
    """Return the number of steps until the test hinge is at most `solved`, interpolated."""
    solved, history = bench.options.solved, list[tuple[int, float]]()
    longest = round(40 / training.step * (bench.options.tokens / task.relevant) ** 2)
    every = max(1, round(longest / 160))

    def watch(done: int, model: Weights) -> bool:
        if done % every:
            return False
        history.append((done, _hinge(bench, model, task, training.seed)))
        return history[-1][1] <= solved

    fine_tune(bench.begin, bench.output, task, replace(training, steps=longest), watch)
    (before, above), (after, below) = history[-2:]
    assert below <= solved, f"not solved after {after} steps"
    return before + (after - before) * (above - solved) / (above - below)


def _one_bit(options: Options, bits: int) -> PatternTask:
    """Return one label of a task of c: 1/c of the relevant tokens are its own.

    The patterns of the other labels take part like irrelevant ones that come in both signs; the c outputs have weights
    of their own (Equation 170), so that one stands for all.
    """
    axes = torch.eye(options.dimensions, dtype=torch.float64)
    pattern, others, rest = axes[0], axes[1:bits], axes[bits:]
    return PatternTask(pattern, torch.cat([others, -others, rest]), options.tokens, 12 // bits, 0)


def _ended(bench: Bench, task: PatternTask, training: Training) -> dict[str, float]:
    """Return the test hinge after all steps, and the share of large rows of ΔV."""
    model = fine_tune(bench.begin, bench.output, task, training)
    return {"hinge": _hinge(bench, model, task, training.seed), "large_rows": large_rows(model.minus(bench.begin))}


def _hinge(bench: Bench, model: Weights, task: PatternTask, seed: int) -> float:
    return float(bench.judge(Weights(model.attention[None], model.value[None]), task, seed).hinge[0])


def _row(seed: int, varied: str, at: float, **measured: float) -> Row:
    return {"part": "convergence", "seed": seed, "varied": varied, "at": float(at), **measured}


def target_rows(options: Options, seed: int) -> Iterator[Row]:
    """Yield, for every target and every λ, the loss on the target and whether Equation 7 promises success.

    λ are drawn, and both closed forms are tried: `printed` and `derived`. β is measured: what the loss of task 1 rises
    per unit of λ when an orthogonal task is added or taken away, at most over λ in [−3, 3].
    """
    bench, most = Bench.open(options, seed), max(len(gammas) for gammas in options.targets)
    axes = torch.eye(options.dimensions, dtype=torch.float64)
    patterns, beyond, rest = axes[:most], axes[most], axes[most + 1 :]
    tasks = [bench.task(pattern, rest) for pattern in patterns]
    vectors = [bench.vector(task, bench.training(10 * seed + number)) for number, task in enumerate(tasks)]
    tried = [-3, -2, -1, 1, 2, 3]
    cost = bench.judge(bench.sums(vectors[:2], tried), tasks[0], seed)
    beta = float((cost.hinge / torch.tensor(tried).abs()).max())
    draw = np.random.default_rng(seed)
    for number, gammas in enumerate(options.targets):
        towards = torch.tensor(gammas, dtype=torch.float64)
        kappa = float((1 - towards.square().sum()).clamp_min(0).sqrt())
        target = bench.task(towards @ patterns[: len(gammas)] + kappa * beyond, rest)
        chance = draw.uniform(-1, 3, (options.drawn, len(gammas)))
        kinds = [*(("drawn", scales) for scales in chance), *_closed(gammas, options.c)]
        by = np.stack([scales for _, scales in kinds])
        models = combined(bench.begin, vectors[: len(gammas)], torch.from_numpy(by))
        judged = bench.judge(models, target, 100 + seed)
        promised = out_of_domain(by, gammas, beta, options.c)
        for index, (kind, scales) in enumerate(kinds):
            yield {
                "part": "target",
                "seed": seed,
                "target": number,
                "gammas": " ".join(f"{gamma:g}" for gamma in gammas),
                "scales": " ".join(f"{scale:.4f}" for scale in scales),
                "kind": kind,
                "beta": beta,
                "first_sum": float(scales @ np.array(gammas)),
                "second_sum": float(scales @ np.array(gammas) ** 2),
                "promised": bool(promised[index]),
                "hinge_1": float(judged.hinge[index]),
                "accuracy_1": float(judged.accuracy[index]),
            }


def _closed(gammas: list[float], c: float) -> list[tuple[str, np.ndarray]]:
    try:
        return [("printed", closed_form(gammas, c, printed=True)), ("derived", closed_form(gammas, c))]
    except MergeflowError:
        return []


PARTS = {"phases": phase_rows, "convergence": convergence_rows, "row_norms": row_norm_rows, "targets": target_rows}
BETA = 0.1  # the theorems' |λ|β, as an allowance of 0.1 hinge loss per unit of λ
CASE_C = 0.9  # Theorem 2 (C) asks for α < 1 − c; c = 0.9 (1 − α) is taken
NOTES = [
    "*Far below 0.* Theorem 2 lets λ go to −∞ for α = 0 and to −Θ(1/α²) for α < 0; Remark 1 says that no λ solves two "
    "contradictory tasks. With λ < −2 task 2 comes back, for every α: −ΔW turns attention of μ towards −μ, −ΔV turns "
    "the sign once more, and y f rises again. Contradictory tasks are then both solved. The proofs hold attention on "
    "the right tokens fixed. The end down to which task 1 is kept does follow 1/α².",
    "*Case C.* For 0 < α < 1 − c the task is forgotten in hinge loss alone: f ≈ λ + α > 0, and every prediction stays "
    "right. The paper's own Table 1 (90.5 % after unlearning an aligned task) shows it.",
    "*Equations 75 and 76.* With C as printed the second sum of Equation 7 is (1 + c)√(Σγ⁴/Σγ²), less than 1 + c; the "
    "numerator must be √Σγ². No λ exists where all γ that are not 0 are one negative number; the paper names the case "
    "in which all γ are equal. The condition is sufficient and far from necessary.",
    "*Equations 90 and 132* lack the mask 1[y f < 1] of the hinge; with it they agree with automatic differentiation "
    "to 1e-10, and without it they do not (tests/studies/theory/test_provable.py).",
    "*Corollaries.* ΔV has rank 2, not 1: the mean of the irrelevant patterns is its second direction. The two kinds "
    "of rows do not show: nearly all rows of ΔV are large, because a row whose ReLU is closed on μ is open on −μ. "
    "Pruning then costs in proportion to what is cut, whichever rows go.",
    "*Equation 21* holds to rounding by construction: the second task's pattern is orthogonal to all that the first "
    "one's gradients contain but μ_1.",
    "*Not testable as printed.* Table 6 (a = 1/√m) and the proofs (a = √m) differ in notation; the Θ(1/M) of Remark 1 "
    "appears in no theorem; B ≥ ε² log M after Equation 39 must be ε^−2; Remark 1's 1 − β against Theorem 1's 1 + β "
    "lies within the allowance; Theorem 1 does not depend on δ_* − δ_#, though nothing can be learned when that is 0.",
]


def measure(lab: Laboratory, options: Options) -> Iterator[Row]:
    """Yield the rows of every part: `phase`, `structure`, `convergence`, `target`."""
    seeds = ((seed, name) for seed in options.seeds for name in PARTS)
    yield from lab.cached({f"{name}_{seed}": partial(PARTS[name], options, seed) for seed, name in seeds})


# What the rows are asked


def whole(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the phase diagram's rows with whole task vectors."""
    return select(rows, part="phase", kind="whole")


def slopes(rows: pd.DataFrame, points: Callable[[pd.DataFrame], list[tuple[float, float]]]) -> pd.Series:
    """Return the least-squares slope of points (x, y), by seed."""
    fitted = {}
    for seed, group in rows.groupby("seed"):
        x, y = np.array(points(group), dtype=float).T
        fitted[seed] = float(np.polyfit(x, y, 1)[0])
    return pd.Series(fitted)


def by_seed(rows: pd.DataFrame, value: pd.Series, how: str) -> pd.Series:
    """Return the maximum, minimum or mean of a value, by seed."""
    grouped: pd.Series = value.groupby(rows.seed).agg(how)
    return grouped


def convergence_slope(rows: pd.DataFrame, varied: str) -> dict[str, pd.Series]:
    part = select(rows, part="convergence", varied=varied)
    return {"slope": slopes(part, lambda frame: list(zip(np.log(frame["at"]), np.log(frame.steps), strict=True)))}


def batch_gain(rows: pd.DataFrame) -> dict[str, pd.Series]:
    wide = select(rows, part="convergence", varied="batch").pivot(index="seed", columns="at", values="early_hinge")
    first, last = min(wide.columns), max(wide.columns)
    return {f"hinge at B = {first:g} less that at {last:g}": wide[first] - wide[last]}


def crossing(scales: pd.Series, hinge: pd.Series, solved: float, falls: bool) -> float | None:
    """Return the first λ at which a loss passes `solved` on its way down, or up, interpolated; None: it never does."""
    for (near, before), (far, after) in pairwise(zip(scales, hinge, strict=True)):
        if (after <= solved < before) if falls else (before <= solved < after):
            return float(near + (before - solved) / (before - after) * (far - near))
    return None


def critical(rows: pd.DataFrame, solved: float) -> float:
    """Return the smallest λ ≥ 0 from which task 2 is solved; of one α and seed."""
    ahead = rows[rows.scale >= 0].sort_values("scale")
    passed = crossing(ahead.scale, ahead.hinge_2, solved, falls=True)
    return float(ahead.scale.iloc[0]) if passed is None else passed


def retained_until(rows: pd.DataFrame, solved: float) -> float:
    """Return the most negative λ down to which task 1 stays solved; of one α < 0 and seed."""
    below = rows[rows.scale <= 0].sort_values("scale", ascending=False)
    passed = crossing(below.scale, below.hinge_1, solved, falls=False)
    return float(below.scale.iloc[-1]) if passed is None else passed


def over_alpha(measured: Callable[[pd.DataFrame], float]) -> Callable[[pd.DataFrame], list[tuple[float, float]]]:
    return lambda rows: [(float(alpha), measured(group)) for alpha, group in rows.groupby("alpha")]


def retained_points(solved: float) -> Callable[[pd.DataFrame], list[tuple[float, float]]]:
    ends = over_alpha(lambda frame: retained_until(frame, solved))
    return lambda rows: [(np.log(-alpha), np.log(-end)) for alpha, end in ends(rows)]


def case_c(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of Theorem 2 (C): 0 < α and 0 ≤ λ ≤ c/2, with `half`, c/2."""
    curves_of = whole(rows).assign(half=lambda frame: CASE_C * (1 - frame.alpha) / 2)
    return curves_of[(curves_of.alpha > 0) & (curves_of.scale >= 0) & (curves_of.scale <= curves_of.half)]


def case_c_holds(rows: pd.DataFrame, solved: float) -> tuple[bool | None, str]:
    points_of_case = case_c(rows)
    spare = by_seed(points_of_case, points_of_case.hinge_2 - points_of_case.half, "min")
    left = by_seed(points_of_case, points_of_case.hinge_1, "max")
    text = f"hinge of task 2 less c/2 at least {with_interval(spare, 3)}, of task 1 at most {with_interval(left, 3)}"
    return all_within({"task 2": (spare, 0.0, math.inf), "task 1": (left, -math.inf, solved)}), text


def ends_of(
    name: str, how: str, keep: Callable[[pd.DataFrame], pd.Series], column: str
) -> Callable[[pd.DataFrame], dict[str, pd.Series]]:
    """Return the measure of the largest or smallest hinge over the whole task vectors that `keep` chooses."""

    def measured(rows: pd.DataFrame) -> dict[str, pd.Series]:
        points_at = whole(rows)
        points_at = points_at[keep(points_at)].assign(worse=lambda frame: frame[["hinge_1", "hinge_2"]].max(axis=1))
        return {name: by_seed(points_at, points_at[column], how)}

    return measured


def contradictory(rows: pd.DataFrame, low: float) -> pd.Series:
    return (rows.alpha <= -0.2) & (rows.scale >= low)


def irrelevant(rows: pd.DataFrame, low: float) -> pd.Series:
    return (rows.alpha == 0) & rows.scale.between(low, 0)


def kept_excess(rows: pd.DataFrame) -> dict[str, pd.Series]:
    negative = whole(rows)
    negative = negative[(negative.alpha == 0) & (negative.scale <= 0)]
    return {"hinge above |λ|β at most": by_seed(negative, negative.hinge_1 - BETA * negative.scale.abs(), "max")}


def off_prediction(rows: pd.DataFrame) -> dict[str, pd.Series]:
    part = whole(rows)
    part = part[(part.scale >= 0) & (part.scale <= 2)]
    off = ((part.margin_1 - 1 - part.scale * part.alpha).abs() + (part.margin_2 - part.scale - part.alpha).abs()) / 2
    return {"mean distance": by_seed(part, off, "mean")}


def structure(rows: pd.DataFrame, column: str) -> pd.Series:
    structures = select(rows, part="structure")
    return by_seed(structures, structures[column], "mean")


def squares(rows: pd.DataFrame) -> dict[str, pd.Series]:
    structures = select(rows, part="structure")
    return {"slope": slopes(structures, lambda frame: list(zip(frame.alpha**2, frame.attention_ratio, strict=True)))}


def drawn(rows: pd.DataFrame, solved: float) -> pd.DataFrame:
    """Return the drawn λ of tasks that nobody trained, with whether they solve it."""
    targets = select(rows, part="target", kind="drawn")
    return targets.assign(promised=targets.promised.astype(bool), success=targets.hinge_1 <= solved)


def promise(rows: pd.DataFrame, solved: float) -> tuple[bool | None, str]:
    targets, target = drawn(rows, solved), select(rows, part="target")
    promised, succeeded = targets[targets.promised], targets[targets.success]
    if len(promised):
        precise = by_seed(promised, promised.success, "mean")
        share = f"{100 * precise.mean():.1f} % of {len(promised)} drawn λ that meet it succeed"
        verdict = within(precise, low=0.95)
    else:
        share, verdict = "no drawn λ meets it", None
    betas = target.groupby("seed").beta.first()
    return verdict, (
        f"{share}; {100 * succeeded.promised.mean():.0f} % of the {len(succeeded)} that succeed meet it; "
        f"β = {with_interval(betas, 3)}"
    )


def first_sum_decides(rows: pd.DataFrame, solved: float) -> dict[str, pd.Series]:
    targets = drawn(rows, solved)
    return {"right": 100 * by_seed(targets, (targets.first_sum >= 1) == targets.success, "mean")}


def unreachable(rows: pd.DataFrame) -> dict[str, pd.Series]:
    unreached = select(rows, part="target", first_sum=0.0, second_sum=0.0)
    return {"smallest hinge": by_seed(unreached, unreached.hinge_1, "min")}


def closed_form_sums(rows: pd.DataFrame, kind: str) -> dict[str, pd.Series]:
    targets = select(rows, part="target", kind=kind)
    return {"the smaller sum": by_seed(targets, targets[["first_sum", "second_sum"]].min(axis=1), "min")}


def closed_form_hinge(rows: pd.DataFrame, kind: str) -> str:
    targets = select(rows, part="target", kind=kind)
    return f"; the hinge on the targets is at most {with_interval(by_seed(targets, targets.hinge_1, 'max'), 3)}"


def outcomes_changed(rows: pd.DataFrame, rank: int, forgotten: float) -> dict[str, pd.Series]:
    """Return the share of outcomes that a rank changes: solved is judged with half of `forgotten` as limit.

    A loss near a limit may fall on either side of it.
    """
    wide = select(rows, part="phase", kind=["whole", f"rank {rank}"])
    wide = wide.pivot(index=["seed", "alpha", "scale"], columns="kind", values=["hinge_1", "hinge_2"]).dropna()
    pairs = [
        (wide[column, "whole"] <= limit) != (wide[column, f"rank {rank}"] <= limit)
        for column, limit in (("hinge_1", forgotten / 2), ("hinge_2", forgotten / 2))
    ]
    pairs.append((wide["hinge_2", "whole"] >= forgotten) != (wide["hinge_2", f"rank {rank}"] >= forgotten))
    return {"outcomes that differ": 100 * sum(pair.groupby("seed").mean() for pair in pairs) / 3}


def distance_left(rows: pd.DataFrame, rank: int) -> str:
    return f"; relative distance of ΔV {select(rows, part='structure')[f'value_left_{rank}'].mean():.3f}"


def large(rows: pd.DataFrame) -> pd.DataFrame:
    return select(rows, part="convergence").dropna(subset=["large_rows"])


def pruning_loss(rows: pd.DataFrame, kind: str, less: str) -> pd.Series:
    pruned = select(rows, part="phase", alpha=0.0, scale=1.0).drop_duplicates(["seed", "kind"])
    hinge = pruned.set_index(["kind", "seed"]).hinge_1
    return hinge[kind] - hinge[less]


# fmt: off
def training_claims(options: Options) -> list[Claim]:
    def alone(rows: pd.DataFrame) -> pd.DataFrame:
        return select(whole(rows), alpha=0.0, scale=0.0)

    slope: dict[str, Any] = {"of": "log–log slope, up to a fifth of the exponent off,", "unit": "", "digits": 2}
    return [
        Claim("P11", "Fine-tuning brings the generalisation error to order ε.",
              lambda rows: {"test hinge": alone(rows).set_index("seed").hinge_1}, high=1e-3, of="hinge", unit="",
              digits=5, also=lambda rows: f"; accuracy {100 * alone(rows).accuracy_1.min():.1f} % at least"),
        Claim("P12", "The steps needed grow as 1/η.", partial(convergence_slope, varied="step"),
              low=-1.2, high=-0.8, **slope),
        Claim("P12", "The steps needed grow no faster than δ_*^−2.", partial(convergence_slope, varied="relevant"),
              low=-2.4, **slope),
        Claim("P12", "The steps needed grow as fast as δ_*^−2.", partial(convergence_slope, varied="relevant"),
              low=-2.4, high=-1.6, **slope, ours=True),
        Claim("P12", "The error falls as the batch grows.", batch_gain, low=0.001,
              of=f"difference after {options.early} steps", unit="", digits=4,
              caveat="exact counts of tokens leave the batch little to average out"),
        Claim("P23", "With c labels the steps needed grow no faster than c².",
              partial(convergence_slope, varied="bits"), high=2.4, **slope, caveat="three values of c"),
        Claim("P23", "With c labels the steps needed grow as fast as c².", partial(convergence_slope, varied="bits"),
              low=1.6, high=2.4, **slope, ours=True),
    ]


def addition_claims(options: Options) -> list[Claim]:
    """Return which λ solve both tasks."""
    solved, least = options.solved, min(options.scales)
    against = [
        Claim("P13", says, ends_of("the best λ leaves a hinge on one of them", "min",
                                   partial(contradictory, low=low), "worse"),
              low=solved, of="hinge for every α ≤ −0.2 and λ", unit="", digits=3, ours=ours)
        for low, says, ours in ((least, "For α < 0 no λ solves both tasks (Remark 1).", False),
                                (-1.0, "For α < 0 no λ ≥ −1 solves both tasks.", True))
    ]
    return [
        Claim("P13", "For α ≥ 0 every λ ≥ 1 − α + β solves both tasks (Theorem 1).",
              ends_of("largest hinge of either", "max",
                      lambda frame: (frame.alpha >= 0) & (frame.scale >= 1 - frame.alpha + BETA), "worse"),
              high=solved, of=f"hinge, with β = {BETA:g}, λ ≤ {max(options.scales):g},", unit="", digits=3),
        Claim("P13", "The smallest λ that solves both falls with α as 1 − α.",
              lambda rows: {"slope": slopes(whole(rows)[whole(rows).alpha >= 0],
                                            over_alpha(lambda frame: critical(frame, solved)))},
              low=-1.3, high=-0.7, of="slope on α", unit="", digits=2),
        *against,
        Claim("P13", "y f is 1 + λα on task 1 and λ + α on task 2 (Equations 45 to 48).", off_prediction,
              high=0.1, of="mean distance over 0 ≤ λ ≤ 2", unit="", digits=3),
    ]


def unlearning_claims(options: Options) -> list[Claim]:
    """Return which λ keep task 1 and make the model forget task 2."""
    solved, forgotten, least = options.solved, options.forgotten, min(options.scales)

    def case_b(frame: pd.DataFrame) -> pd.Series:
        return (frame.alpha < 0) & (frame.scale <= 0) & (frame.scale >= -1 / frame.alpha.where(frame.alpha != 0) ** 2)

    forgets = [
        Claim("P13", says,
              ends_of("smallest hinge", "min",
                      partial(irrelevant, low=low), "hinge_2"),
              low=forgotten, of="hinge", unit="", digits=2, ours=ours)
        for says, low, ours in (("For α = 0 and every λ ≤ 0 task 2 is forgotten (Theorem 2, A).", least, False),
                                ("For α = 0 and −1 ≤ λ ≤ 0 task 2 is forgotten.", -1.0, True))
    ]
    return [
        Claim("P13", "For α = 0 and every λ ≤ 0 task 1 is kept (Theorem 2, A).", kept_excess,
              high=solved, of=f"hinge less {BETA:g} |λ|", unit="", digits=3),
        *forgets,
        Claim("P13", "For α < 0 and −1/α² ≤ λ ≤ 0 task 1 is kept (Theorem 2, B).",
              ends_of("hinge at most", "max", case_b, "hinge_1"), high=solved, of=f"hinge, λ ≥ {least:g},", unit="",
              digits=3),
        Claim("P13", "For α < 0 and −1/α² ≤ λ ≤ 0 task 2 is forgotten (Theorem 2, B).",
              ends_of("hinge at least", "min", case_b, "hinge_2"), low=forgotten, of=f"hinge, λ ≥ {least:g},", unit="",
              digits=3),
        Claim("P13", "For α < 0 the λ down to which task 1 is kept goes as 1/α² (Theorem 2, B).",
              lambda rows: {"log–log slope": slopes(whole(rows)[whole(rows).alpha <= -0.5], retained_points(solved))},
              low=-2.6, high=-1.4, of="slope", unit="", digits=2),
        Claim("P13",
              "For 0 < α < 1 − c and 0 ≤ λ ≤ c/2 task 1 is kept and the loss of task 2 is at least c/2 (Theorem 2, C).",
              decide=partial(case_c_holds, solved=solved),
              of=f"c = {CASE_C:g} (1 − α): hinge of task 2 ≥ c/2, of task 1 ≤ {solved:g}"),
        Claim("P13", "There its predictions on task 2 are no longer right.",
              lambda rows: {"accuracy at least": 100 * by_seed(case_c(rows), case_c(rows).accuracy_2, "min")},
              high=55, of="accuracy", unit="%", ours=True),
    ]


def structure_claims() -> list[Claim]:
    cosine: dict[str, Any] = {"low": 0.95, "of": "cosine", "unit": "", "digits": 4}
    return [
        Claim("P14", "μ′ᵀΔWμ′ = α² μᵀΔWμ (Equation 21).", squares,
              low=0.8, high=1.2, of="slope on α²", unit="", digits=3),
        Claim("P14", "Rows of ΔV point along ±μ (Lemma 4): its leading direction is μ.",
              lambda rows: {"cosine": structure(rows, "value_cosine")}, **cosine),
        Claim("P14", "ΔW grows along μμᵀ (Lemma 3): its leading direction is μ.",
              lambda rows: {"cosine": structure(rows, "attention_cosine")}, **cosine),
        Claim("P14", "Rows hold at most a share of order 1/M of their energy on irrelevant patterns (Equation 30).",
              lambda rows: {"M · energy": structure(rows, "irrelevant_energy")}, high=2, of="M · energy", unit="",
              digits=2),
        Claim("P14", "Attention between label-relevant tokens goes to 1 (Lemma 1).",
              lambda rows: {"mass when the loss is 0": structure(rows, "attention_mass")}, low=0.95, of="mass", unit="",
              digits=3, also=lambda rows: "; before training δ_* = 0.4"),
    ]


def target_claims(options: Options) -> list[Claim]:
    """Return which λ solve tasks that nobody trained."""
    solved = options.solved
    reachable = [
        Claim("P15", "A task that is irrelevant to all experts is reached by no λ (Theorem 3, A).", unreachable,
              low=options.forgotten, of="hinge", unit="", digits=2)
    ] if [0.0] * 2 in [list(gammas) for gammas in options.targets] else []
    return [
        Claim("P15", "Every λ that meets Equation 7 solves the task that nobody trained (Theorem 3).",
              decide=partial(promise, solved=solved),
              of=f"≥ 95 % of them leave a hinge ≤ {solved:g}, with margin 1 and c = {options.c:g}"),
        Claim("P15",
              "Whether λ solves the task is decided by Σ λγ ≥ 1 alone; the second sum of Equation 7 does not matter.",
              partial(first_sum_decides, solved=solved), low=95, unit="%", ours=True,
              of="share of the drawn λ for which it is right (a rule that was written after the first run of these "
                 "seeds)"),
        *reachable,
        *(Claim("P9", f"The closed form of λ, as {kind}, meets both sums of Equation 7 (Equations 75 and 76).",
                partial(closed_form_sums, kind=kind), low=1 + options.c - 1e-9, unit="", digits=3, ours=ours,
                of="smaller sum on every target with a solution", also=partial(closed_form_hinge, kind=kind))
          for kind, ours in (("printed", False), ("derived", True))),
    ]


def reduced_claims(options: Options) -> list[Claim]:
    most = max(options.keep)
    return [
        *(Claim("P16", f"Task vectors of rank {rank} give the same outcomes (Corollary 1).",
                partial(outcomes_changed, rank=rank, forgotten=options.forgotten), high=2, unit="%", ours=rank == 2,
                of=f"share that differs of the outcomes solved or not (hinge ≤ {options.forgotten / 2:g}, both tasks) "
                   f"and forgotten or not (≥ {options.forgotten:g}, task 2)",
                also=partial(distance_left, rank=rank)) for rank in (1, 2)),
        Claim("P17", "A constant share of the rows of ΔV is large and the rest is small (Corollary 2).",
              lambda rows: {"smallest share": 100 * by_seed(large(rows), large(rows).large_rows, "min")},
              low=10, of="share of large rows, for every B, m and ξ tried,", unit="%",
              also=lambda rows: f"; {100 * large(rows).large_rows.mean():.1f} % of rows have at least half of the "
                                "largest norm"),
        Claim("P17", "Leaving out the small rows of ΔV changes nothing (Corollary 2).",
              lambda rows: {f"rise with the largest {most:.0%}": pruning_loss(rows, f"rows {most:g}", "whole")},
              high=0.05, of="rise of the hinge of task 1", unit="", digits=3,
              caveat="about 95 % of the rows are large"),
        Claim("P17", "Leaving out the smaller half of the rows of ΔV changes nothing either.",
              lambda rows: {"rise with the larger half": pruning_loss(rows, "rows 0.5", "whole")},
              high=0.05, of="rise of the hinge of task 1", unit="", digits=3, ours=True),
        Claim("P17", "Leaving out the large rows instead costs much more.",
              lambda rows: {"with the smaller half, more": pruning_loss(rows, "smallest 0.5", "rows 0.5")},
              low=0.25, of="rise of the hinge of task 1, less that with the larger half,", unit="", digits=3,
              ours=True),
    ]


def claims(options: Options) -> list[Claim]:
    return [*training_claims(options), *addition_claims(options), *unlearning_claims(options), *structure_claims(),
            *target_claims(options), *reduced_claims(options)]
# fmt: on


def convergence_table(rows: pd.DataFrame) -> pd.DataFrame:
    convergence, digits = select(rows, part="convergence"), {"steps": 0, "early_hinge": 4, "hinge": 4, "large_rows": 3}
    order = convergence[["varied", "at"]].drop_duplicates()
    parts = [table(convergence.dropna(subset=[n]), ["varied", "at"], value=n, digits=d) for n, d in digits.items()]
    return pd.concat(parts, axis=1).reindex(pd.MultiIndex.from_frame(order)).fillna("")


def structure_table(rows: pd.DataFrame) -> pd.DataFrame:
    keys = ["attention_ratio", "value_ratio", "attention_mass", "value_cosine", "value_left_1", "value_left_2"]
    return select(rows, part="structure").groupby("alpha")[keys].mean().round(3)


def target_table(rows: pd.DataFrame, solved: float) -> pd.DataFrame:
    targets = drawn(rows, solved).assign(both=lambda frame: frame.promised & frame.success)
    counts = targets.groupby("gammas", sort=False)[["promised", "both", "success"]].sum()
    counts = counts.rename(columns={"promised": "λ that meet Eq. 7", "both": "of them solved", "success": "solved"})
    closed = select(rows, part="target", kind=["printed", "derived"])
    return counts.join(table(closed, "gammas", "kind", value="hinge_1", digits=3)).fillna("")


def phase_figure(rows: pd.DataFrame, solved: float) -> Figure:
    """Draw hinge loss and accuracy of both tasks over α and λ, with predicted and measured boundaries."""
    figure, axes = panels(4, 2, 3.4, sharex=True, sharey=True)
    phases = whole(rows)
    phases = phases[phases.scale.between(-3, 3)]
    for row, (key, label) in enumerate({"hinge": "hinge loss, cut at 1", "accuracy": "accuracy, %"}.items()):
        for number, panel in enumerate(axes[2 * row : 2 * row + 2], 1):
            dress(panel, f"Task {number}: {label}", "α" if row else "", "λ" if number == 1 else "")
            cells = phases.pivot_table(index="scale", columns="alpha", values=f"{key}_{number}")
            shown = cells.clip(upper=1) if key == "hinge" else 100 * cells
            alphas = list(cells.columns)
            top = 1 if key == "hinge" else 100
            drawn_map = heat_map(panel, alphas, list(cells.index), shown.to_numpy(), vmin=0, vmax=top)
            panel.set_ylim(-3, 3)
            _boundaries(panel, alphas)
            if number == 2:
                addable = [alpha for alpha in alphas if alpha >= 0]
                of_alpha = (select(phases, alpha=alpha).groupby("seed") for alpha in addable)
                least = [float(np.mean([critical(group, solved) for _, group in seeds])) for seeds in of_alpha]
                over(panel, addable, least, "smallest λ that solves task 2", marker="o", linestyle="")
        colour_bar(axes[2 * row : 2 * row + 2], drawn_map, label)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def _boundaries(panel: Axes, alphas: Sequence[float]) -> None:
    """Draw where Theorems 1 and 2 see the ends of addition, of unlearning, and of unlearning in case C."""
    line = np.linspace(min(alphas), max(alphas), 200)
    positive, negative = line[line >= 0], line[line < -1e-9]
    over(panel, positive, 1 - positive, "λ = 1 − α")
    over(panel, negative, -1 / negative**2, "λ = −1/α²", linestyle="--")
    over(panel, positive, CASE_C * (1 - positive) / 2, f"λ = c/2, c = {CASE_C:g} (1 − α)", linestyle=":")


def curve_figure(rows: pd.DataFrame) -> Figure:
    """Draw y f over λ on both tasks, measured and predicted, for a contradictory, an irrelevant and an aligned pair."""
    points = whole(rows)[["seed", "alpha", "scale", "margin_1", "margin_2"]]
    alphas = sorted(points.alpha.unique())
    chosen = [min(alphas, key=lambda alpha, near=near: abs(alpha - near)) for near in (-0.5, 0.0, 0.5)]  # type: ignore[misc]
    points = points[points.alpha.isin(chosen) & points.scale.between(-8, 2)]
    first, two = predicted_outputs(points.alpha, points.scale)
    labels = {"margin_1": "task 1, measured", "margin_2": "task 2, measured"}
    labels |= {"predicted_1": "task 1, predicted", "predicted_2": "task 2, predicted"}
    long = points.assign(predicted_1=first, predicted_2=two).melt(
        ["seed", "alpha", "scale"], list(labels), "of", "value"
    )
    names = labels | {alpha: f"α = {alpha:g}" for alpha in chosen}
    return curves(long, "scale", "of", "value", "alpha", labels=names, x_label="λ", y_label="mean y f", columns=3)


def convergence_figure(rows: pd.DataFrame) -> Figure:
    """Draw the steps until the task is solved over η, δ_*, c and B, on logarithmic axes."""
    names = {"step": "step size η, theory −1", "relevant": "share δ_*, theory −2", "bits": "labels c, theory 2"}
    names |= {"batch": "batch B"}
    convergence = select(rows, part="convergence", varied=list(names))
    return curves(
        convergence, "at", value="steps", panel="varied", labels=names, x_label="value tried",
        y_label="steps until solved", scale="log", log_y=True,
    )  # fmt: skip


def target_figure(rows: pd.DataFrame, c: float, solved: float) -> Figure:
    """Draw every drawn λ by its two sums, and whether the task was solved, with the corner that Equation 7 asks for."""
    targets, labels = drawn(rows, solved).sort_values("success"), {True: "solved", False: "not solved"}
    sums = {"first_sum": "Σ λγ"}
    figure = scatter(targets, sums, "second_sum", "success", y_label="Σ λγ²", labels=labels, height=4.6)
    _corner(figure.axes[0], 1 + c)
    return figure


def _corner(panel: Axes, at: float) -> None:
    right, top = panel.get_xlim()[1], panel.get_ylim()[1]
    panel.plot([at, at, right], [top, at, at], color=INK, linewidth=1, label="the corner of Equation 7")


def pruning_figure(rows: pd.DataFrame) -> Figure:
    """Draw the loss of task 1 in the sum of two irrelevant tasks over the share of rows of ΔV that are kept."""
    pruning = select(rows, part="phase", alpha=0.0, scale=1.0)
    words = pruning.kind.str.partition(" ")
    pruned = pruning.assign(which=words[0], share=pd.to_numeric(words[2], errors="coerce"))
    shown = select(pruned, which=["rows", "smallest"])
    labels = {"rows": "the largest", "smallest": "the smallest (control)"}
    return curves(shown, "share", "which", "hinge_1", labels=labels, title="Rows of ΔV kept", x_label="share of rows",
                  y_label="hinge loss on task 1")  # fmt: skip


STUDY = Study(
    options=Options,
    systems=("P9", "P11", "P12", "P13", "P14", "P15", "P16", "P17", "P23"),
    measure=measure,
    claims=claims,
    tables=lambda options: {
        "P12, P17, P23: steps until solved, hinge after some and after all steps, share of large rows of ΔV": (
            convergence_table
        ),
        "P14, P16: the task vector of task 1 seen from both patterns": structure_table,
        "P9, P15: tasks that nobody trained": partial(target_table, solved=options.solved),
    },
    figures=lambda options: {
        "phases": partial(phase_figure, solved=options.solved),
        "curves": curve_figure,
        "convergence": convergence_figure,
        "targets": partial(target_figure, c=options.c, solved=options.solved),
        "pruning": pruning_figure,
    },
    notes=lambda rows, options: NOTES,
)
