"""Findings of the study `laboratory` on training, on the structure of task vectors, and on untrained tasks."""

from collections.abc import Iterator
from statistics import fmean

import numpy as np

from studies.old.papers.laboratory.options import Options
from studies.old.papers.laboratory.rows import Rows, slope, whole
from studies.old.results import Finding, with_interval
from studies.old.rows import Row, by_seed, picked
from studies.old.verdicts import within


def training_findings(rows: Rows, options: Options) -> Iterator[Finding]:
    """Judge whether and how fast training solves a task (P11, P12, P23)."""
    alone = picked(whole(rows), alpha=0.0, scale=0.0)
    loss = by_seed(alone, lambda own: own[0]["hinge_1"])
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
        own = picked(rows, part="convergence", varied=varied)
        slopes = by_seed(own, lambda one: slope((np.log(row["at"]), np.log(row["steps"])) for row in one))
        rule = f"log–log slope in {low} … {high}"
        yield Finding("P12", claim, f"slope {with_interval(slopes, 2)}", within(slopes, low, high), rule)
    own = picked(rows, part="convergence", varied="batch")
    gains = by_seed(own, lambda one: one[0]["early_hinge"] - one[-1]["early_hinge"])
    ends = f"{own[0]['at']:g} and {own[-1]['at']:g}"
    yield Finding(
        "P12",
        "The error falls as the batch grows.",
        f"hinge at B = {ends} differs by {with_interval(gains, 4)} after {options.early} steps",
        within(gains, low=0.001),
        "difference ≥ 0.001",
    )
    own = picked(rows, part="convergence", varied="bits")
    slopes = by_seed(own, lambda one: slope((np.log(row["at"]), np.log(row["steps"])) for row in one))
    yield Finding(
        "P23",
        "With c labels the steps needed grow as c².",
        f"slope {with_interval(slopes, 2)} over c = {', '.join(f'{bits}' for bits in options.bits)}",
        within(slopes, 1.4, 2.6),
        "log–log slope in 1.4 … 2.6",
    )


def structure_findings(rows: Rows) -> Iterator[Finding]:
    """Judge what task vectors look like (P14)."""
    own = picked(rows, part="structure")
    squares = by_seed(own, lambda one: slope((row["alpha"] ** 2, row["attention_ratio"]) for row in one))
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
        values = by_seed(own, lambda one, key=key: fmean(row[key] for row in one))  # type: ignore[misc]
        yield Finding("P14", claim, f"cosine {with_interval(values, 4)}", within(values, low=low), f"cosine ≥ {low:g}")
    energy = by_seed(own, lambda one: fmean(row["irrelevant_energy"] for row in one))
    yield Finding(
        "P14",
        "Rows hold at most a share of order 1/M of their energy on irrelevant patterns (Equation 30).",
        f"M · energy is {with_interval(energy, 2)}",
        within(energy, high=2.0),
        "M · energy ≤ 2",
    )
    mass = by_seed(own, lambda one: fmean(row["attention_mass"] for row in one))
    yield Finding(
        "P14",
        "Attention between label-relevant tokens goes to 1 (Lemma 1).",
        f"mass {with_interval(mass, 3)} when the loss is 0; before training δ_* = 0.4",
        within(mass, low=0.95),
        "mass ≥ 0.95",
    )


def target_findings(rows: Rows, options: Options) -> Iterator[Finding]:
    """Judge which λ solve tasks that nobody trained (P9, P15)."""
    own = picked(rows, part="target")
    promised = [row for row in own if row["promised"] and row["kind"] == "drawn"]
    if promised:
        precise = by_seed(promised, lambda one: fmean(row["hinge_1"] <= options.solved for row in one))
        share = f"{100 * fmean(precise):.1f} % of {len(promised)} drawn λ that meet it succeed"
        verdict = within(precise, low=0.95)
    else:
        share, verdict = "no drawn λ meets it", None
    succeeded = [row for row in own if row["kind"] == "drawn" and row["hinge_1"] <= options.solved]
    recall = fmean(row["promised"] for row in succeeded)
    betas = by_seed(own, lambda one: one[0]["beta"])
    yield Finding(
        "P15",
        "Every λ that meets Equation 7 solves the task that nobody trained (Theorem 3).",
        f"{share}; {100 * recall:.0f} % of the {len(succeeded)} that succeed meet it; β = {with_interval(betas, 3)}",
        verdict,
        f"≥ 95 % of them leave a hinge ≤ {options.solved:g}, with margin 1 and c = {options.c:g}",
    )
    drawn = picked(own, kind="drawn")
    agree = by_seed(
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
        least = by_seed(none, lambda one: min(row["hinge_1"] for row in one))
        yield Finding(
            "P15",
            "A task that is irrelevant to all experts is reached by no λ (Theorem 3, A).",
            f"smallest hinge {with_interval(least, 2)}",
            within(least, low=options.forgotten),
            f"hinge ≥ {options.forgotten:g}",
        )
    for kind, ours in (("printed", False), ("derived", True)):
        closed = picked(own, kind=kind)
        least = by_seed(closed, lambda one: min(min(row["first_sum"], row["second_sum"]) for row in one))
        worst = by_seed(closed, lambda one: max(row["hinge_1"] for row in one))
        yield Finding(
            "P9",
            f"The closed form of λ, as {kind}, meets both sums of Equation 7 (Equations 75 and 76).",
            f"the smaller sum is {min(least):.3f}; the hinge on the targets is at most {with_interval(worst, 3)}",
            within(least, low=1 + options.c - 1e-9),
            f"both sums ≥ {1 + options.c:g} on every target with a solution",
            ours,
        )


def reduced_findings(rows: Rows, options: Options) -> Iterator[Finding]:
    """Judge what can be left out of task vectors (P16, P17)."""
    for rank in (1, 2):
        changed = by_seed(picked(rows, part="phase"), lambda own, rank=rank: _changed(own, f"rank {rank}", options))  # type: ignore[misc]
        left = picked(rows, part="structure")
        yield Finding(
            "P16",
            f"Task vectors of rank {rank} give the same outcomes (Corollary 1).",
            f"{100 * fmean(changed):.1f} % of outcomes differ; relative distance of ΔV "
            f"{fmean(row[f'value_left_{rank}'] for row in left):.3f}",
            within(changed, high=0.02),
            "at most 2 % of the outcomes solved / not and forgotten / not differ",
            ours=rank == 2,
        )
    norms = [row for row in picked(rows, part="convergence") if row.get("large_rows") is not None]
    shares = by_seed(norms, lambda own: max(row["large_rows"] for row in own))
    yield Finding(
        "P17",
        "A constant share of the rows of ΔV is large and the rest is small (Corollary 2).",
        f"{100 * fmean(row['large_rows'] for row in norms):.1f} % of rows have at least half of the largest norm",
        within(shares, 0.1, 0.9),
        "between 10 and 90 % of rows are large, for every B, m and ξ tried",
    )
    half = [
        row
        for row in picked(rows, part="phase", alpha=0.0, scale=1.0)
        if row["kind"] in ("rows 0.5", "smallest 0.5", "whole")
    ]
    lost = by_seed(half, lambda own: _lost(own, "rows 0.5"))
    control = by_seed(half, lambda own: _lost(own, "smallest 0.5") - _lost(own, "rows 0.5"))
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
    before = {(row["alpha"], row["scale"]): _outcome(row, options) for row in picked(rows, kind="whole")}
    after = {(row["alpha"], row["scale"]): _outcome(row, options) for row in picked(rows, kind=kind)}
    return fmean(one != two for key in after for one, two in zip(before[key], after[key], strict=True))


def _outcome(row: Row, options: Options) -> tuple[bool, bool, bool]:
    # a loss near a limit may fall on either side of it, so that solved is judged with half of `forgotten` as limit
    middle = options.forgotten / 2
    return row["hinge_1"] <= middle, row["hinge_2"] <= middle, row["hinge_2"] >= options.forgotten


def _lost(rows: Rows, kind: str) -> float:
    return float(picked(rows, kind=kind)[0]["hinge_1"] - picked(rows, kind="whole")[0]["hinge_1"])
