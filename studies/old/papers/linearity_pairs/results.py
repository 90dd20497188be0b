"""Findings, tables and notes of the study `linearity_pairs`, from its rows."""

import numpy as np

from mergeflow.linearity.affine import DIRECTION
from studies.lab.linear_rows import (
    DIRECTION_RULE,
    LENGTH_RULE,
    by_seed,
    direction,
    length,
    loss_gaps,
    mean_over,
    worst_share,
)
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row
from studies.old.verdicts import within

FLAT, SLACK, SHARE = 0.1, 0.02, 0.9  # nats of LMC, nats above the chord, share of Lemma 1
Rows = dict[str, list[Row]]


def judged(rows: list[Row]) -> list[Row]:
    """Return the rows that verdicts count: hidden layers, BatchNorm's statistics computed again where there are any."""
    return [row for row in rows if row.get("statistics") != "interpolated" and row["layer"] != "logits"]


def findings(rows: dict[str, list[Row]]) -> list[Finding]:
    """Hold the paper's statements against the rows."""
    found = []
    features = judged(rows["features"])
    for world in dict.fromkeys(row["world"] for row in features):
        system = "L2" if "digits" in world else "L3"
        told, verdict = direction(features, world=world)
        claim = f"Features of averaged weights point where averaged features do (LLFC): {world}, all pairs, layers, α."
        found.append(Finding(system, claim, told, verdict, DIRECTION_RULE))
        told, verdict = length(features, world=world)
        claim = f"It has their length too (the other half of CTL): {world}, all pairs, layers and α."
        found.append(Finding(system, claim, told, verdict, LENGTH_RULE))
        found += _connectivity(rows["paths"], world)
        shares = [_share_below(own) for own in by_seed(rows["paths"], world=world).values()]
        claim = f"The loss of averaged weights is at most the average of the losses (Lemma 1): {world}."
        rule = f"at most {SLACK} nat above it at a share of {SHARE} of (pair, α, D)"
        found.append(Finding("L9", claim, f"share {with_interval(shares, 3)}", within(shares, low=SHARE), rule))
        many = rows["simplex"]
        told, verdict = direction(many, world=world)
        claim = f"It holds for any weights of m nets, as for pairs (Lemma 2), in direction: {world}, m up to 4."
        found.append(Finding("L8", claim, told, verdict, DIRECTION_RULE))
    return found


def _connectivity(rows: list[Row], world: str) -> list[Finding]:
    """Judge LMC on the pair's own tasks, and on the task of the pre-training."""
    rule = f"the larger of (difference of the ends, barrier) above {FLAT} nat, for each pair and D"
    own, first = [], []
    for gaps in loss_gaps(rows, world=world).values():
        own.append(min(value for (pair, on), value in gaps.items() if on in pair.split(" – ")))
        first.append(min(value for (pair, on), value in gaps.items() if on not in pair.split(" – ")))
    claim = f"Linear mode connectivity fails between nets tuned on different tasks: {world}"
    return [
        Finding(
            "L4", f"{claim}, on D_i and D_j.", f"smallest {with_interval(own, 2)} nat", within(own, low=FLAT), rule
        ),
        Finding(
            "L4", f"{claim}, on D_PT too.", f"smallest {with_interval(first, 2)} nat", within(first, low=FLAT), rule
        ),
    ]


def _share_below(rows: list[Row]) -> float:
    ends = {(row["pair"], row["on"], row["alpha"]): row["loss"] for row in rows if row["alpha"] in (0.0, 1.0)}
    inner = [row for row in rows if row["alpha"] not in (0.0, 1.0)]
    excess = [
        row["loss"]
        - row["alpha"] * ends[row["pair"], row["on"], 1.0]
        - (1 - row["alpha"]) * ends[row["pair"], row["on"], 0.0]
        for row in inner
    ]
    return float(np.mean([one <= SLACK for one in excess]))


def tables(rows: dict[str, list[Row]]) -> list[Table]:
    """Return accuracies, the layers, the pairs with their verdicts, and m nets."""
    made = []
    for world in dict.fromkeys(row["world"] for row in rows["features"]):
        shown = [
            {
                "task": task,
                "accuracy, %": with_interval(mean_over(rows["accuracy"], "accuracy", world=world, task=task)),
            }
            for task in dict.fromkeys(row["task"] for row in rows["accuracy"] if row["world"] == world)
        ]
        made.append(Table(f"{world}: each net on its own test (the first is the pre-trained one)", shown))
        for mode in dict.fromkeys(row["statistics"] for row in rows["features"] if row["world"] == world):
            told = "" if mode == "none" else f", BatchNorm's statistics {mode}"
            made.append(Table(f"{world}: means over pairs and α{told}", _layer_lines(rows["features"], world, mode)))
        made.append(Table(f"{world}: pairs, α = ½ for features, all α for the loss", _pair_lines(rows, world)))
        lines = [
            {
                "m": m,
                "worst share of the baseline": with_interval(
                    [worst_share(own) for own in by_seed(rows["simplex"], world=world, models=m).values()], 2
                ),
                "coef": with_interval(mean_over(rows["simplex"], "coef", world=world, models=m), 2),
            }
            for m in sorted({row["models"] for row in rows["simplex"] if row["world"] == world})
        ]
        made.append(Table(f"{world}: weights of the simplex over m nets", lines))
    return made


def _layer_lines(rows: list[Row], world: str, mode: str) -> list[Row]:
    lines = []
    for layer in dict.fromkeys(row["layer"] for row in rows if row["world"] == world):
        wanted = {"world": world, "statistics": mode, "layer": layer}
        lines.append(
            {
                "layer": layer,
                **{
                    label: with_interval(mean_over(rows, key, **wanted), 3)
                    for label, key in (
                        ("1 − cos", "distance"),
                        ("baseline", "base"),
                        ("coef", "coef"),
                        ("error", "error"),
                    )
                },
                "worst share": with_interval([worst_share(own) for own in by_seed(rows, **wanted).values()], 2),
            }
        )
    return lines


def _pair_lines(rows: dict[str, list[Row]], world: str) -> list[Row]:
    features, lines = judged(rows["features"]), []
    gaps = loss_gaps(rows["paths"], world=world)
    for pair in dict.fromkeys(row["combination"] for row in features if row["world"] == world):
        wanted = {"world": world, "combination": pair}
        (_, llfc), (_, long) = direction(features, **wanted), length(features, **wanted)
        least = [min(value for (own, _), value in found.items() if own == pair) for found in gaps.values()]
        lines.append(
            {
                "pair": pair,
                "worst share": with_interval([worst_share(own) for own in by_seed(features, **wanted).values()], 2),
                "coef": with_interval(mean_over(features, "coef", **wanted, alpha=0.5), 2),
                "LLFC": _word(llfc),
                "CTL": _word(False if False in (llfc, long) else None if None in (llfc, long) else True),
                "LMC": _word(within(least, high=FLAT)),
                "ends or barrier, nat": with_interval(least, 2),
            }
        )
    return lines


def _word(verdict: bool | None) -> str:
    return {True: "holds", False: "does not", None: "undecided"}[verdict]


def notes(rows: dict[str, list[Row]]) -> list[str]:
    """Return what the verdicts depend on."""
    features = judged(rows["features"])
    said = []
    for world in dict.fromkeys(row["world"] for row in features):
        own = [row for row in features if row["world"] == world]
        farthest = max(own, key=lambda row: abs(row["coef"] - 1))
        said.append(
            f"{world}: the length is worst for {farthest['combination']} at layer {farthest['layer']} "
            f"(coef {farthest['coef']:.2f}, baseline {farthest['base']:.2f}, seed {farthest['seed']}); the direction "
            f"stays within {worst_share(own):.2f} of the baseline, against the margin {DIRECTION}."
        )
    return said
