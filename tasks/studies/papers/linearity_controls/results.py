"""Findings and tables of the study `linearity_controls`, from its rows."""

import numpy as np

from tasks.studies.linear_rows import by_seed, mean_over
from tasks.studies.results import Finding, Table, with_interval
from tasks.studies.rows import Row
from tasks.studies.verdicts import all_hold, within

ORDER = ("normal", "common start", "weight matching", "activation matching", "none")
RATIO = 3.0  # of 1 − cos with random labels to that with true ones, in the last half of the blocks
LENGTH = 0.1


def _distances(rows: list[Row], setting: str) -> np.ndarray:
    """Return 1 − cos, the mean over hidden layers, one value for each seed."""
    return np.array(mean_over(rows, "distance", combination=setting))


def _lengths(rows: list[Row], setting: str) -> np.ndarray:
    return np.array(mean_over(rows, "coef", combination=setting))


def findings(rows: dict[str, list[Row]]) -> list[Finding]:
    """Hold the paper's statements and our control against the rows."""
    digits = rows["matching"]
    normal, start, weights, activations, none = (_distances(digits, name) for name in ORDER)
    told = ", ".join(f"{name} {with_interval(list(_distances(digits, name)), 3)}" for name in ORDER)
    steps = [list(none - np.maximum(weights, activations)), list(np.minimum(weights, activations) - normal)]
    lengths = ", ".join(f"{name} {with_interval(list(_lengths(digits, name)), 2)}" for name in ORDER)
    rule = "paired differences of the mean 1 − cos over hidden layers above 0, over seeds"
    return [
        Finding(
            "L17",
            "1 − cos: normal < matched (both ways) < unmatched.",
            told,
            all_hold([within(one, low=0) for one in steps]),
            rule,
        ),
        Finding(
            "L17",
            "Without pre-training coef deviates from 1.",
            lengths,
            within(list(np.abs(_lengths(digits, "none") - 1)), low=LENGTH),
            f"|coef − 1| of `none`, mean over layers, above {LENGTH}",
        ),
        Finding(
            "L17",
            "With it coef is near 1.",
            lengths,
            within(list(np.abs(_lengths(digits, "normal") - 1)), high=LENGTH),
            f"|coef − 1| of `normal`, mean over layers, at most {LENGTH}",
        ),
        Finding(
            "L17",
            "A common start without pre-training is less linear than pre-training: the pre-training matters.",
            told,
            within(list(start - normal), low=0),
            "paired difference of 1 − cos to `normal` above 0",
            ours=True,
        ),
        Finding(
            "L17",
            "A common start without pre-training is more linear than any pair of different starts, matched or not.",
            told,
            within(list(np.minimum(weights, activations) - start), low=0),
            "paired difference of the better matching to it above 0",
            ours=True,
        ),
        *_label_findings(rows["labels"]),
    ]


def _label_findings(rows: list[Row]) -> list[Finding]:
    deepest = max(row["depth"] for row in rows)
    late = [row for row in rows if row["depth"] > deepest / 2]
    found = []
    for kind in ("one task", "two tasks"):
        true, random = (_distances(late, f"{name} labels, {kind}") for name in ("true", "random"))
        ratio = list(random / true)
        told = f"random {with_interval(list(random), 4)}, true {with_interval(list(true), 4)}"
        told += f", ratio {with_interval(ratio)}"
        claim = f"Pre-training on random labels leaves features less linear: nets tuned on {kind}."
        found.append(
            Finding(
                "L18",
                claim,
                told,
                within(ratio, low=RATIO),
                f"ratio of 1 − cos in the last half of the blocks above {RATIO:g}",
            )
        )
        off = [
            max(abs(row["coef"] - 1) for row in own)
            for own in by_seed(late, combination=f"random labels, {kind}").values()
        ]
        claim = f"Their coef deviates from 1: nets tuned on {kind}."
        found.append(
            Finding(
                "L18",
                claim,
                f"largest |median coef − 1| {with_interval(off, 2)}",
                within(off, low=LENGTH),
                f"above {LENGTH} in a block of the last half",
            )
        )
    return found


def tables(rows: dict[str, list[Row]], facts: list[Row]) -> list[Table]:
    """Return 1 − cos, its baseline and coef by layer for each setting, and what the settings are."""
    made = []
    for name, own in rows.items():
        lines = []
        for setting in dict.fromkeys(row["combination"] for row in own):
            for layer in dict.fromkeys(row["layer"] for row in own):
                wanted = {"combination": setting, "layer": layer}
                lines.append(
                    {
                        "setting": setting,
                        "layer": layer,
                        "1 − cos": with_interval(mean_over(own, "distance", **wanted), 4),
                        "baseline": with_interval(mean_over(own, "base", **wanted), 3),
                        "coef": with_interval(mean_over(own, "coef", **wanted), 2),
                    }
                )
        made.append(
            Table(
                {"matching": "Rotated digits, α = ½", "labels": "Class splits, α = ½, true and random labels"}[name],
                lines,
            )
        )
    lines = []
    for setting in dict.fromkeys(row["setting"] for row in facts):
        own = [row for row in facts if row["setting"] == setting]
        apart = [row["distance of weights"] for row in own]
        lines.append(
            {
                "setting": setting,
                "‖θ_i − θ_j‖": None if np.isnan(apart[0]) else with_interval(apart, 1),
                "accuracy, %": with_interval([row["accuracy"] for row in own]),
            }
        )
    title = "Distance of the two nets; accuracy on their own test, or of the pre-training on its own training labels"
    return [*made, Table(title, lines)]
