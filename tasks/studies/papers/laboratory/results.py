"""What the study `laboratory` makes of its rows: tables, findings, and notes on the published text."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import numpy as np

from tasks.studies.papers.laboratory.options import Options
from tasks.studies.results import Cell, Finding, StudyResult, Table, with_interval
from tasks.studies.verdicts import all_hold, within

Row = Mapping[str, Any]
Rows = Sequence[Row]
BETA = 0.1  # the theorems' |λ|β, as an allowance of 0.1 hinge loss per unit of λ
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
    "to 1e-10, and without it they do not (tests/analysis/test_provable.py).",
    "*Corollaries.* ΔV has rank 2, not 1: the mean of the irrelevant patterns is its second direction. The two kinds "
    "of rows do not show: nearly all rows of ΔV are large, because a row whose ReLU is closed on μ is open on −μ. "
    "Pruning then costs in proportion to what is cut, whichever rows go.",
    "*Equation 21* holds to rounding by construction: the second task's pattern is orthogonal to all that the first "
    "one's gradients contain but μ_1.",
    "*Not testable as printed.* Table 6 (a = 1/√m) and the proofs (a = √m) differ in notation; the Θ(1/M) of Remark 1 "
    "appears in no theorem; B ≥ ε² log M after Equation 39 must be ε^−2; Remark 1's 1 − β against Theorem 1's 1 + β "
    "lies within the allowance; Theorem 1 does not depend on δ_* − δ_#, though nothing can be learned when that is 0.",
]


def study_result(rows: Rows, options: Options) -> StudyResult:
    """Return tables, findings, notes and tidy rows."""
    found = [
        *_training(rows, options),
        *_addition(rows, options),
        *_unlearning(rows, options),
        *_structure(rows),
        *_targets(rows, options),
        *_reduced(rows, options),
    ]
    tables = [*_phase_tables(rows), _convergence_table(rows), _structure_table(rows), _target_table(rows, options)]
    return StudyResult(tables, found, NOTES, tidy(rows))


def tidy(rows: Rows) -> list[dict[str, Any]]:
    """Return rows that all have the same columns; what a part does not measure is None."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return [{name: row.get(name) for name in columns} for row in rows]


def part(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row.get(name) == value for name, value in wanted.items())]


def per_seed(rows: Rows, measure: Callable[[Rows], float]) -> list[float]:
    """Return `measure` of each seed's rows, by seed."""
    seeds = sorted({row["seed"] for row in rows})
    return [measure([row for row in rows if row["seed"] == seed]) for seed in seeds]


def whole(rows: Rows) -> list[Row]:
    """Return the phase diagram's rows with whole task vectors."""
    return part(rows, part="phase", kind="whole")


def critical(rows: Rows, solved: float) -> float:
    """Return the smallest λ ≥ 0 from which task 2 is solved, interpolated; rows of one α and seed, ascending in λ."""
    ahead = [row for row in rows if row["scale"] >= 0]
    for before, after in pairwise(ahead):
        if after["hinge_2"] <= solved < before["hinge_2"]:
            share = (before["hinge_2"] - solved) / (before["hinge_2"] - after["hinge_2"])
            return float(before["scale"] + share * (after["scale"] - before["scale"]))
    return float(ahead[0]["scale"])


def retained_until(rows: Rows, solved: float) -> float:
    """Return the most negative λ down to which task 1 stays solved, interpolated; rows of one α < 0 and seed."""
    below = sorted((row for row in rows if row["scale"] <= 0), key=lambda row: -float(row["scale"]))
    for before, after in pairwise(below):
        if before["hinge_1"] <= solved < after["hinge_1"]:
            share = (solved - before["hinge_1"]) / (after["hinge_1"] - before["hinge_1"])
            return float(before["scale"] + share * (after["scale"] - before["scale"]))
    return float(below[-1]["scale"])


def slope(points: Iterable[tuple[float, float]]) -> float:
    """Return the least-squares slope of y on x."""
    x, y = np.array(list(points), dtype=float).T
    return float(np.polyfit(x, y, 1)[0])


def _training(rows: Rows, options: Options) -> Iterator[Finding]:
    alone = part(whole(rows), alpha=0.0, scale=0.0)
    loss = per_seed(alone, lambda own: own[0]["hinge_1"])
    yield Finding(
        "P11",
        "Fine-tuning brings the generalisation error to order ε.",
        f"test hinge {max(loss):.1e} at most, accuracy {100 * min(row['accuracy_1'] for row in alone):.1f} % at least",
        within(loss, high=1e-3),
        "hinge ≤ 0.001",
    )
    for varied, claim, low, high in (
        ("step", "The steps needed grow as 1/η.", -1.2, -0.8),
        ("relevant", "The steps needed grow as δ_*^−2.", -2.6, -1.4),
    ):
        own = part(rows, part="convergence", varied=varied)
        slopes = per_seed(own, lambda one: slope((np.log(row["at"]), np.log(row["steps"])) for row in one))
        rule = f"log–log slope in {low} … {high}"
        yield Finding("P12", claim, f"slope {with_interval(slopes, 2)}", within(slopes, low, high), rule)
    own = part(rows, part="convergence", varied="batch")
    gains = per_seed(own, lambda one: one[0]["hinge"] - one[-1]["hinge"])
    ends = f"{own[0]['at']:g} and {own[-1]['at']:g}"
    yield Finding(
        "P12",
        "The error falls as the batch grows.",
        f"hinge at B = {ends} differs by {with_interval(gains, 4)} after {options.steps} steps",
        within(gains, low=0.001),
        "difference ≥ 0.001",
    )
    own = part(rows, part="convergence", varied="bits")
    slopes = per_seed(own, lambda one: slope((np.log(row["at"]), np.log(row["steps"])) for row in one))
    yield Finding(
        "P23",
        "With c labels the steps needed grow as c².",
        f"slope {with_interval(slopes, 2)} over c = {', '.join(f'{bits}' for bits in options.bits)}",
        within(slopes, 1.4, 2.6),
        "log–log slope in 1.4 … 2.6",
    )


def _addition(rows: Rows, options: Options) -> Iterator[Finding]:
    ahead = [row for row in whole(rows) if row["alpha"] >= 0 and row["scale"] >= 1 - row["alpha"] + BETA]
    worst = per_seed(ahead, lambda own: max(max(row["hinge_1"], row["hinge_2"]) for row in own))
    yield Finding(
        "P13",
        "For α ≥ 0 every λ ≥ 1 − α + β solves both tasks (Theorem 1).",
        f"largest hinge of either {with_interval(worst, 3)}",
        within(worst, high=options.solved),
        f"hinge ≤ {options.solved:g} with β = {BETA:g}, λ ≤ {max(options.scales):g}",
    )
    aligned = [row for row in whole(rows) if row["alpha"] >= 0]
    slopes = per_seed(aligned, lambda own: slope(_criticals(own, options.solved)))
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
        best = per_seed(near, lambda own: min(max(row["hinge_1"], row["hinge_2"]) for row in own))
        measured = f"the best λ leaves a hinge of {with_interval(best, 3)} on one of them"
        rule = f"hinge ≥ {options.solved:g} for every α ≤ −0.2 and λ"
        yield Finding("P13", claim, measured, within(best, low=options.solved), rule, ours)
    usual = [row for row in whole(rows) if 0 <= row["scale"] <= 2]
    off = per_seed(usual, lambda own: fmean(_off(row) for row in own))
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
    return [(alpha, critical(part(rows, alpha=alpha), solved)) for alpha in alphas]


def _unlearning(rows: Rows, options: Options) -> Iterator[Finding]:
    solved, forgotten = options.solved, options.forgotten
    apart = [row for row in whole(rows) if row["alpha"] == 0 and row["scale"] <= 0]
    excess = per_seed(apart, lambda own: max(row["hinge_1"] - BETA * abs(row["scale"]) for row in own))
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
        least = per_seed(near, lambda own: min(row["hinge_2"] for row in own))
        measured = f"smallest hinge {with_interval(least, 2)}"
        yield Finding("P13", claim, measured, within(least, low=forgotten), f"hinge ≥ {forgotten:g}", ours)
    against = [row for row in whole(rows) if row["alpha"] < 0 and -(row["alpha"] ** -2) <= row["scale"] <= 0]
    for number, claim in ((1, "task 1 is kept"), (2, "task 2 is forgotten")):
        pick, key = (max, "hinge_1") if number == 1 else (min, "hinge_2")
        ends = per_seed(against, lambda own, pick=pick, key=key: pick(row[key] for row in own))  # type: ignore[misc]
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
    slopes = per_seed(opposed, lambda own: slope(_retained(own, solved)))
    yield Finding(
        "P13",
        "For α < 0 the λ down to which task 1 is kept goes as 1/α² (Theorem 2, B).",
        f"log–log slope {with_interval(slopes, 2)}",
        within(slopes, -2.6, -1.4),
        "slope in −2.6 … −1.4",
    )
    aligned = [row for row in whole(rows) if row["alpha"] > 0 and 0 <= row["scale"] <= _c(row["alpha"]) / 2]
    spare = per_seed(aligned, lambda own: min(row["hinge_2"] - _c(row["alpha"]) / 2 for row in own))
    kept = per_seed(aligned, lambda own: max(row["hinge_1"] for row in own))
    yield Finding(
        "P13",
        "For 0 < α < 1 − c and 0 ≤ λ ≤ c/2 task 1 is kept and the loss of task 2 is at least c/2 (Theorem 2, C).",
        f"hinge of task 2 less c/2 at least {with_interval(spare, 3)}, of task 1 at most {with_interval(kept, 3)}",
        all_hold([within(spare, low=0.0), within(kept, high=solved)]),
        f"c = 0.9 (1 − α): hinge of task 2 ≥ c/2, of task 1 ≤ {solved:g}",
    )
    right = per_seed(aligned, lambda own: min(row["accuracy_2"] for row in own))
    yield Finding(
        "P13",
        "There its predictions on task 2 are no longer right.",
        f"accuracy {100 * min(right):.1f} % at least",
        within(right, high=0.55),
        "accuracy ≤ 55 %",
        ours=True,
    )


def _c(alpha: float) -> float:
    return 0.9 * (1 - alpha)


def _retained(rows: Rows, solved: float) -> list[tuple[float, float]]:
    alphas = sorted({row["alpha"] for row in rows})
    return [(np.log(-alpha), np.log(-retained_until(part(rows, alpha=alpha), solved))) for alpha in alphas]


def _structure(rows: Rows) -> Iterator[Finding]:
    own = part(rows, part="structure")
    squares = per_seed(own, lambda one: slope((row["alpha"] ** 2, row["attention_ratio"]) for row in one))
    yield Finding(
        "P14",
        "μ′ᵀΔWμ′ = α² μᵀΔWμ (Equation 21).",
        f"slope on α² {with_interval(squares, 3)}",
        within(squares, 0.8, 1.2),
        "slope in 0.8 … 1.2",
    )
    for key, claim, low in (
        ("value_cosine", "Rows of ΔV point along ±μ (Lemma 4): its leading direction is μ.", 0.95),
        ("attention_cosine", "ΔW grows along μμᵀ (Lemma 3): its leading direction is μ.", 0.95),
    ):
        values = per_seed(own, lambda one, key=key: fmean(row[key] for row in one))  # type: ignore[misc]
        yield Finding("P14", claim, f"cosine {with_interval(values, 4)}", within(values, low=low), f"cosine ≥ {low:g}")
    energy = per_seed(own, lambda one: fmean(row["irrelevant_energy"] for row in one))
    yield Finding(
        "P14",
        "Rows hold at most a share of order 1/M of their energy on irrelevant patterns (Equation 30).",
        f"M · energy is {with_interval(energy, 2)}",
        within(energy, high=2.0),
        "M · energy ≤ 2",
    )
    mass = per_seed(own, lambda one: fmean(row["attention_mass"] for row in one))
    yield Finding(
        "P14",
        "Attention between label-relevant tokens goes to 1 (Lemma 1).",
        f"mass {with_interval(mass, 3)} when the loss is 0; before training δ_* = 0.4",
        within(mass, low=0.95),
        "mass ≥ 0.95",
    )


def _targets(rows: Rows, options: Options) -> Iterator[Finding]:
    own = part(rows, part="target")
    promised = [row for row in own if row["promised"] and row["kind"] == "drawn"]
    if promised:
        precise = per_seed(promised, lambda one: fmean(row["hinge_1"] <= options.solved for row in one))
        share = f"{100 * fmean(precise):.1f} % of {len(promised)} drawn λ that meet it succeed"
        verdict = within(precise, low=0.95)
    else:
        share, verdict = "no drawn λ meets it", None
    succeeded = [row for row in own if row["kind"] == "drawn" and row["hinge_1"] <= options.solved]
    recall = fmean(row["promised"] for row in succeeded)
    betas = per_seed(own, lambda one: one[0]["beta"])
    yield Finding(
        "P15",
        "Every λ that meets Equation 7 solves the task that nobody trained (Theorem 3).",
        f"{share}; {100 * recall:.0f} % of the {len(succeeded)} that succeed meet it; β = {with_interval(betas, 3)}",
        verdict,
        f"≥ 95 % of them leave a hinge ≤ {options.solved:g}, with margin 1 and c = {options.c:g}",
    )
    drawn = part(own, kind="drawn")
    agree = per_seed(
        drawn, lambda one: fmean((row["first_sum"] >= 1) == (row["hinge_1"] <= options.solved) for row in one)
    )
    yield Finding(
        "P15",
        "Whether λ solves the task is decided by Σ λγ ≥ 1 alone; the second sum of Equation 7 does not matter.",
        f"right for {100 * fmean(agree):.1f} % of the drawn λ",
        within(agree, low=0.95),
        "right for ≥ 95 % of them; this rule was written after the first run of these seeds",
        ours=True,
    )
    none = [row for row in own if not float(row["first_sum"]) and not float(row["second_sum"])]
    if none:
        least = per_seed(none, lambda one: min(row["hinge_1"] for row in one))
        yield Finding(
            "P15",
            "A task that is irrelevant to all experts is reached by no λ (Theorem 3, A).",
            f"smallest hinge {with_interval(least, 2)}",
            within(least, low=options.forgotten),
            f"hinge ≥ {options.forgotten:g}",
        )
    for kind, ours in (("printed", False), ("derived", True)):
        closed = part(own, kind=kind)
        least = per_seed(closed, lambda one: min(min(row["first_sum"], row["second_sum"]) for row in one))
        worst = per_seed(closed, lambda one: max(row["hinge_1"] for row in one))
        yield Finding(
            "P9",
            f"The closed form of λ, as {kind}, meets both sums of Equation 7 (Equations 75 and 76).",
            f"the smaller sum is {min(least):.3f}; the hinge on the targets is at most {with_interval(worst, 3)}",
            within(least, low=1 + options.c - 1e-9),
            f"both sums ≥ {1 + options.c:g} on every target with a solution",
            ours,
        )


def _reduced(rows: Rows, options: Options) -> Iterator[Finding]:
    for rank in (1, 2):
        changed = per_seed(part(rows, part="phase"), lambda own, rank=rank: _changed(own, f"rank {rank}", options))  # type: ignore[misc]
        left = part(rows, part="structure")
        yield Finding(
            "P16",
            f"Task vectors of rank {rank} give the same outcomes (Corollary 1).",
            f"{100 * fmean(changed):.1f} % of outcomes differ; relative distance of ΔV "
            f"{fmean(row[f'value_left_{rank}'] for row in left):.3f}",
            within(changed, high=0.02),
            "at most 2 % of the outcomes solved / not and forgotten / not differ",
            ours=rank == 2,
        )
    norms = [row for row in part(rows, part="convergence") if row.get("large_rows") is not None]
    shares = per_seed(norms, lambda own: max(row["large_rows"] for row in own))
    yield Finding(
        "P17",
        "A constant share of the rows of ΔV is large and the rest is small (Corollary 2).",
        f"{100 * fmean(row['large_rows'] for row in norms):.1f} % of rows have at least half of the largest norm",
        within(shares, 0.1, 0.9),
        "between 10 and 90 % of rows are large, for every B, m and ξ tried",
    )
    half = [
        row
        for row in part(rows, part="phase", alpha=0.0, scale=1.0)
        if row["kind"] in ("rows 0.5", "smallest 0.5", "whole")
    ]
    lost = per_seed(half, lambda own: _lost(own, "rows 0.5"))
    control = per_seed(half, lambda own: _lost(own, "smallest 0.5") - _lost(own, "rows 0.5"))
    yield Finding(
        "P17",
        "Leaving out the small rows of ΔV changes nothing (Corollary 2).",
        f"with the larger half of rows the hinge of task 1 rises by {with_interval(lost, 3)}",
        within(lost, high=0.05),
        "rise ≤ 0.05",
    )
    yield Finding(
        "P17",
        "Leaving out the large rows instead costs much more.",
        f"with the smaller half it rises by {with_interval(control, 3)} more",
        within(control, low=0.25),
        "0.25 more",
        ours=True,
    )


def _changed(rows: Rows, kind: str, options: Options) -> float:
    before = {(row["alpha"], row["scale"]): _outcome(row, options) for row in part(rows, kind="whole")}
    after = {(row["alpha"], row["scale"]): _outcome(row, options) for row in part(rows, kind=kind)}
    return fmean(one != two for key in after for one, two in zip(before[key], after[key], strict=True))


def _outcome(row: Row, options: Options) -> tuple[bool, bool, bool]:
    # a loss near a limit may fall on either side of it, so that solved is judged with half of `forgotten` as limit
    middle = options.forgotten / 2
    return row["hinge_1"] <= middle, row["hinge_2"] <= middle, row["hinge_2"] >= options.forgotten


def _lost(rows: Rows, kind: str) -> float:
    return float(part(rows, kind=kind)[0]["hinge_1"] - part(rows, kind="whole")[0]["hinge_1"])


def _phase_tables(rows: Rows) -> Iterator[Table]:
    shown = [-3, -2, -1, -0.5, 0, 0.2, 0.5, 0.8, 1, 2]
    for number in (1, 2):
        lines: list[dict[str, Cell]] = []
        for alpha in sorted({row["alpha"] for row in whole(rows)}):
            line: dict[str, Cell] = {"α": f"{alpha:g}"}
            for scale in shown:
                cells = part(whole(rows), alpha=alpha, scale=scale)
                if cells:
                    hinge = fmean(row[f"hinge_{number}"] for row in cells)
                    line[f"λ = {scale:g}"] = (
                        f"{hinge:.2f} ({100 * fmean(row[f'accuracy_{number}'] for row in cells):.0f})"
                    )
            lines.append(line)
        yield Table(f"P13: hinge loss (and accuracy in %) of Ψ^(0) + ΔΨ_1 + λ ΔΨ_2 on task {number}", lines)


def _convergence_table(rows: Rows) -> Table:
    names = {"step": "η", "relevant": "δ_*", "batch": "B", "bits": "labels c", "width": "m", "spread": "ξ√m"}
    lines: list[dict[str, Cell]] = []
    own = part(rows, part="convergence")
    for varied, at in dict.fromkeys((row["varied"], row["at"]) for row in own):
        cells = part(own, varied=varied, at=at)
        line: dict[str, Cell] = {"varied": f"{names[varied]} = {at:g}"}
        for key, digits in (("steps", 0), ("hinge", 4), ("large_rows", 3)):
            values = [row[key] for row in cells if row.get(key) is not None]
            line[key.replace("_", " ")] = with_interval(values, digits) if values else None
        lines.append(line)
    return Table("P12, P17, P23: steps until solved, hinge after all steps, share of large rows of ΔV", lines)


def _structure_table(rows: Rows) -> Table:
    own = part(rows, part="structure")
    keys = ["attention_ratio", "value_ratio", "attention_mass", "value_cosine", "value_left_1", "value_left_2"]
    lines: list[dict[str, Cell]] = []
    for alpha in sorted({row["alpha"] for row in own}):
        cells = part(own, alpha=alpha)
        line: dict[str, Cell] = {"α": f"{alpha:g}", "α²": f"{alpha**2:.3f}"}
        line |= {key.replace("_", " "): f"{fmean(row[key] for row in cells):.3f}" for key in keys}
        lines.append(line)
    return Table("P14, P16: the task vector of task 1 seen from both patterns", lines)


def _target_table(rows: Rows, options: Options) -> Table:
    own = part(rows, part="target")
    lines: list[dict[str, Cell]] = []
    for gammas in dict.fromkeys(row["gammas"] for row in own):
        cells = part(own, gammas=gammas)
        drawn = part(cells, kind="drawn")
        line: dict[str, Cell] = {
            "γ": gammas,
            "λ that meet Eq. 7": sum(row["promised"] for row in drawn),
            "of them solved": sum(row["promised"] and row["hinge_1"] <= options.solved for row in drawn),
            "solved of all": f"{sum(row['hinge_1'] <= options.solved for row in drawn)} of {len(drawn)}",
        }
        for kind in ("printed", "derived"):
            closed = part(cells, kind=kind)
            line[f"hinge, {kind} λ"] = with_interval([row["hinge_1"] for row in closed], 3) if closed else None
        lines.append(line)
    return Table("P9, P15: tasks that nobody trained", lines)
