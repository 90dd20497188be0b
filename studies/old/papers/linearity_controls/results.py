"""Findings and tables of the study `linearity_controls`, from its rows."""

from collections.abc import Callable, Sequence
from statistics import fmean

import numpy as np

from studies.lab.linear_rows import DIRECTION, by_seed, mean_over, worst_length, worst_share
from studies.old.claims import judge, paired
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row
from studies.old.verdicts import within

ORDER = ("normal", "common start", "weight matching", "activation matching", "none")
RATIO = 3.0  # of 1 − cos with random labels to that with true ones, in the last half of the blocks
LENGTH = 0.1
_BY_LAYER = "paired difference of 1 − cos above 0 over seeds in every hidden layer, of which the smallest is told"


def _distances(rows: list[Row], setting: str) -> np.ndarray:
    """Return 1 − cos, the mean over hidden layers, one value for each seed."""
    return np.array(mean_over(rows, "distance", combination=setting))


def _struggles(rows: list[Row]) -> Finding:
    def worst(measure: Callable[[list[Row]], float], name: str) -> list[float]:
        return [measure(own) for own in by_seed(rows, combination=name).values()]

    lengths = ", ".join(f"{name} {with_interval(worst(worst_length, name), 2)}" for name in ORDER)
    return judge(
        "L17",
        "Without pre-training nets struggle to satisfy CTL even after their units are aligned.",
        {name: worst(worst_share, name) for name in ORDER[2:]},
        f"worst 1 − cos ≥ {DIRECTION} of the baseline, which is no direction by our rule; the length cannot tell, "
        "since that of pre-trained nets fails too",
        low=DIRECTION,
        unit="",
        digits=2,
        beside=f"; worst |coef − 1|: {lengths}",
    )


def _in_each_layer(rows: list[Row], claim: str, pairs: Sequence[tuple[str, str]], beside: str = "") -> Finding:
    """Judge that 1 − cos is larger in one setting than in another, by the layer where that is least so.

    Args:
        rows: of the digits.
        claim: in words.
        pairs: the setting that is said to have the larger 1 − cos, and the other one.
        beside: said after the measured values.
    """
    measured = {words: own for pair in pairs for words, own in _smallest(rows, *pair).items()}
    return judge("L17", claim, measured, _BY_LAYER, low=0, unit="", digits=4, beside=beside)


def _smallest(rows: list[Row], larger: str, smaller: str) -> dict[str, list[float]]:
    """Return the paired differences of 1 − cos in the layer where their mean is the smallest, in words.

    Args:
        rows: of the digits.
        larger: the setting that is said to have the larger 1 − cos.
        smaller: the other one.
    """
    layers = dict.fromkeys(row["layer"] for row in rows)
    by_layer = {
        layer: paired(*(mean_over(rows, "distance", combination=name, layer=layer) for name in (larger, smaller)))
        for layer in layers
    }
    least = min(by_layer, key=lambda layer: fmean(by_layer[layer]))
    return {f"{larger} less {smaller}, layer {least}": by_layer[least]}


def _lengths(rows: list[Row], setting: str) -> np.ndarray:
    return np.array(mean_over(rows, "coef", combination=setting))


def findings(rows: dict[str, list[Row]]) -> list[Finding]:
    """Hold the paper's statements and our control against the rows."""
    digits = rows["matching"]
    normal, start, weights, activations, _ = (_distances(digits, name) for name in ORDER)
    told = ", ".join(f"{name} {with_interval(list(_distances(digits, name)), 3)}" for name in ORDER)
    lengths = ", ".join(f"{name} {with_interval(list(_lengths(digits, name)), 2)}" for name in ORDER)
    off = {name: np.abs(_lengths(digits, name) - 1) for name in ORDER}
    return [
        _struggles(digits),
        _in_each_layer(
            digits,
            "Without pre-training 1 − cos is not close to 0 compared with pre-trained nets, in each layer.",
            [("none", "normal")],
            beside=f"; mean over layers: {told}",
        ),
        _in_each_layer(
            digits,
            "Matching, by either way, brings 1 − cos closer to 0, in each layer.",
            [("none", "weight matching"), ("none", "activation matching")],
        ),
        _in_each_layer(
            digits,
            "After either matching 1 − cos is still larger than that of pre-trained nets, in each layer.",
            [("weight matching", "normal"), ("activation matching", "normal")],
        ),
        judge(
            "L17",
            "Without pre-training coef deviates from 1, matched or not.",
            {f"{name} less normal": list(off[name] - off["normal"]) for name in ORDER[2:]},
            "paired difference of |coef − 1|, mean over layers, above 0",
            low=0,
            unit="",
            digits=3,
            beside=f"; coef: {lengths}",
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
        claim = (
            f"After pre-training on random labels 1 − cos is far from 0 compared with true ones: nets tuned on {kind}."
        )
        found.append(
            Finding(
                "L18",
                claim,
                told,
                within(ratio, low=RATIO),
                f"ratio of 1 − cos in the last half of the blocks above {RATIO:g}",
            )
        )
        found.append(
            judge(
                "L18",
                f"Random labels leave features less linear at all: nets tuned on {kind}.",
                {"random less true": list(random - true)},
                "paired difference of 1 − cos in the last half of the blocks above 0",
                low=0,
                unit="",
                digits=4,
                ours=True,
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
