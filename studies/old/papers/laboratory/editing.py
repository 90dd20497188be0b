"""Findings of the study `laboratory` on adding a task and on forgetting one, over α and λ."""

from collections.abc import Iterator
from statistics import fmean

import numpy as np

from studies.old.papers.laboratory.options import Options
from studies.old.papers.laboratory.rows import CASE_C, Rows, critical, retained_until, slope, whole
from studies.old.results import Finding, with_interval
from studies.old.rows import Row, by_seed, picked
from studies.old.verdicts import all_hold, within

BETA = 0.1  # the theorems' |λ|β, as an allowance of 0.1 hinge loss per unit of λ


def addition_findings(rows: Rows, options: Options) -> Iterator[Finding]:
    """Judge which λ solve both tasks (P13)."""
    ahead = [row for row in whole(rows) if row["alpha"] >= 0 and row["scale"] >= 1 - row["alpha"] + BETA]
    worst = by_seed(ahead, lambda own: max(max(row["hinge_1"], row["hinge_2"]) for row in own))
    yield Finding(
        "P13",
        "For α ≥ 0 every λ ≥ 1 − α + β solves both tasks (Theorem 1).",
        f"largest hinge of either {with_interval(worst, 3)}",
        within(worst, high=options.solved),
        f"hinge ≤ {options.solved:g} with β = {BETA:g}, λ ≤ {max(options.scales):g}",
    )
    aligned = [row for row in whole(rows) if row["alpha"] >= 0]
    slopes = by_seed(aligned, lambda own: slope(_criticals(own, options.solved)))
    yield Finding(
        "P13",
        "The smallest λ that solves both falls with α as 1 − α.",
        f"slope {with_interval(slopes, 2)}",
        within(slopes, -1.3, -0.7),
        "slope on α in −1.3 … −0.7",
    )
    against = [row for row in whole(rows) if row["alpha"] <= -0.2]
    for low, claim, ours in (
        (min(options.scales), "For α < 0 no λ solves both tasks (Remark 1).", False),
        (-1.0, "For α < 0 no λ ≥ −1 solves both tasks.", True),
    ):
        near = [row for row in against if row["scale"] >= low]
        best = by_seed(near, lambda own: min(max(row["hinge_1"], row["hinge_2"]) for row in own))
        measured = f"the best λ leaves a hinge of {with_interval(best, 3)} on one of them"
        rule = f"hinge ≥ {options.solved:g} for every α ≤ −0.2 and λ"
        yield Finding("P13", claim, measured, within(best, low=options.solved), rule, ours)
    usual = [row for row in whole(rows) if 0 <= row["scale"] <= 2]
    off = by_seed(usual, lambda own: fmean(_off(row) for row in own))
    yield Finding(
        "P13",
        "y f is 1 + λα on task 1 and λ + α on task 2 (Equations 45 to 48).",
        f"mean distance {with_interval(off, 3)} over 0 ≤ λ ≤ 2",
        within(off, high=0.1),
        "mean distance ≤ 0.1",
    )


def _off(row: Row) -> float:
    alpha, scale = row["alpha"], row["scale"]
    return 0.5 * (abs(row["margin_1"] - 1 - scale * alpha) + abs(row["margin_2"] - scale - alpha))


def _criticals(rows: Rows, solved: float) -> list[tuple[float, float]]:
    alphas = sorted({row["alpha"] for row in rows})
    return [(alpha, critical(picked(rows, alpha=alpha), solved)) for alpha in alphas]


def unlearning_findings(rows: Rows, options: Options) -> Iterator[Finding]:
    """Judge which λ keep task 1 and make the model forget task 2 (P13)."""
    solved, forgotten = options.solved, options.forgotten
    apart = [row for row in whole(rows) if row["alpha"] == 0 and row["scale"] <= 0]
    excess = by_seed(apart, lambda own: max(row["hinge_1"] - BETA * abs(row["scale"]) for row in own))
    yield Finding(
        "P13",
        "For α = 0 and every λ ≤ 0 task 1 is kept (Theorem 2, A).",
        f"hinge above |λ|β at most {with_interval(excess, 3)}",
        within(excess, high=solved),
        f"hinge ≤ {solved:g} + {BETA:g} |λ|",
    )
    for claim, low, ours in (
        ("For α = 0 and every λ ≤ 0 task 2 is forgotten (Theorem 2, A).", min(options.scales), False),
        ("For α = 0 and −1 ≤ λ ≤ 0 task 2 is forgotten.", -1.0, True),
    ):
        near = [row for row in apart if row["scale"] >= low]
        least = by_seed(near, lambda own: min(row["hinge_2"] for row in own))
        measured = f"smallest hinge {with_interval(least, 2)}"
        yield Finding("P13", claim, measured, within(least, low=forgotten), f"hinge ≥ {forgotten:g}", ours)
    against = [row for row in whole(rows) if row["alpha"] < 0 and -(row["alpha"] ** -2) <= row["scale"] <= 0]
    for number, claim in ((1, "task 1 is kept"), (2, "task 2 is forgotten")):
        pick, key = (max, "hinge_1") if number == 1 else (min, "hinge_2")
        ends = by_seed(against, lambda own, pick=pick, key=key: pick(row[key] for row in own))  # type: ignore[misc]
        limits = {"high": solved} if number == 1 else {"low": forgotten}
        rule = f"hinge ≤ {solved:g}" if number == 1 else f"hinge ≥ {forgotten:g}"
        yield Finding(
            "P13",
            f"For α < 0 and −1/α² ≤ λ ≤ 0 {claim} (Theorem 2, B).",
            f"hinge {'at most' if number == 1 else 'at least'} {with_interval(ends, 3)}",
            within(ends, **limits),
            f"{rule}, λ ≥ {min(options.scales):g}",
        )
    opposed = [row for row in whole(rows) if row["alpha"] <= -0.5]
    slopes = by_seed(opposed, lambda own: slope(_retained(own, solved)))
    yield Finding(
        "P13",
        "For α < 0 the λ down to which task 1 is kept goes as 1/α² (Theorem 2, B).",
        f"log–log slope {with_interval(slopes, 2)}",
        within(slopes, -2.6, -1.4),
        "slope in −2.6 … −1.4",
    )
    aligned = [row for row in whole(rows) if row["alpha"] > 0 and 0 <= row["scale"] <= _c(row["alpha"]) / 2]
    spare = by_seed(aligned, lambda own: min(row["hinge_2"] - _c(row["alpha"]) / 2 for row in own))
    kept = by_seed(aligned, lambda own: max(row["hinge_1"] for row in own))
    yield Finding(
        "P13",
        "For 0 < α < 1 − c and 0 ≤ λ ≤ c/2 task 1 is kept and the loss of task 2 is at least c/2 (Theorem 2, C).",
        f"hinge of task 2 less c/2 at least {with_interval(spare, 3)}, of task 1 at most {with_interval(kept, 3)}",
        all_hold([within(spare, low=0.0), within(kept, high=solved)]),
        f"c = {CASE_C:g} (1 − α): hinge of task 2 ≥ c/2, of task 1 ≤ {solved:g}",
    )
    right = by_seed(aligned, lambda own: min(row["accuracy_2"] for row in own))
    yield Finding(
        "P13",
        "There its predictions on task 2 are no longer right.",
        f"accuracy {100 * min(right):.1f} % at least",
        within(right, high=0.55),
        "accuracy ≤ 55 %",
        ours=True,
    )


def _c(alpha: float) -> float:
    return CASE_C * (1 - alpha)


def _retained(rows: Rows, solved: float) -> list[tuple[float, float]]:
    alphas = sorted({row["alpha"] for row in rows})
    return [(np.log(-alpha), np.log(-retained_until(picked(rows, alpha=alpha), solved))) for alpha in alphas]
