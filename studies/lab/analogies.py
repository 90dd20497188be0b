"""Analogies of task vectors: Δ_A + (Δ_B − Δ_C) against the other ways to reach a target, as rows, table and figure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from studies.lab.claims import Samples
from studies.lab.plots import dots, table
from studies.lab.rows import Row, samples, select
from studies.lab.tuning import best_scale

BASE, ANALOGY, SUM, TRAINED, NEAREST = "base", "A + B − C", "A + B", "trained on it", "nearest expert"
UNLABELLED = f"{ANALOGY}, λ = 1"
SINGLE = ("A", "B", "C")
WAYS = (BASE, *SINGLE, NEAREST, SUM, ANALOGY, UNLABELLED, TRAINED)
SHOWN = (BASE, NEAREST, SUM, ANALOGY, TRAINED)
LOOKED_AT = ("validation", "test")
Measured = Callable[[Mapping[str, float], str], float]


def target_rows(figure: Measured, scales: Sequence[float], target: str, others: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of one target: signs of the other tasks' vectors with λ by validation, and what has no λ.

    Args:
        figure: how good Ψ^(0) + Σ λ Δ is on the target, of λ by task and a split.
        others: A, B and C, tasks that share with it one attribute, the other one, and none.
    """
    a, b, c = others
    sums: dict[str, dict[str, float]] = {"A": {a: 1}, "B": {b: 1}, "C": {c: 1}, SUM: {a: 1, b: 1}}
    sums[ANALOGY] = {**sums[SUM], c: -1}

    def scaled(signs: Mapping[str, float], scale: float, split: str) -> float:
        return figure({task: scale * sign for task, sign in signs.items()}, split)

    chosen: dict[str, tuple[Mapping[str, float], float | None]] = {
        way: (signs, best_scale(scales, partial(scaled, signs, split="validation"))) for way, signs in sums.items()
    }
    chosen |= {BASE: ({}, None), UNLABELLED: (sums[ANALOGY], None), TRAINED: ({target: 1}, None)}
    for way, (signs, scale) in chosen.items():
        figures = {split: scaled(signs, 1 if scale is None else scale, split) for split in LOOKED_AT}
        yield {"target": target, "way": way, "scale": scale, **figures}


def with_nearest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows, and for each seed and target the single expert that is best on validation."""
    given, nearest = list(rows), dict[tuple[object, ...], Row]()
    for row in given:
        key = (row["seed"], row["attributes"], row["target"])
        if row["way"] in SINGLE and (key not in nearest or row["validation"] > nearest[key]["validation"]):
            nearest[key] = row
    return [*given, *(row | {"way": NEAREST, "expert": row["way"]} for row in nearest.values())]


def less(way: str, other: str, rows: pd.DataFrame) -> Samples:
    """Return one way's test figure less another's, the mean over targets, by seed."""
    return {f"less {other}": samples(rows, "test", way=way) - samples(rows, "test", way=other)}


def ways_table(attributes: str, rows: pd.DataFrame, digits: int = 1) -> pd.DataFrame:
    """Return each way's test figure by target, with the mean λ and the mean over targets."""
    analogies = select(rows, attributes=attributes, way=list(WAYS))
    scales = analogies.groupby("way").scale.mean().map("{:.2f}".format).replace("nan", "").rename("mean λ")
    wide = table(analogies, "way", "target", value="test", digits=digits).join(
        table(analogies, "way", value="test", digits=digits).rename(columns={"test": "mean"})
    )
    return scales.to_frame().join(wide).reindex([way for way in WAYS if way in wide.index])


def targets_figure(measured: str, rows: pd.DataFrame, **how: Any) -> Figure:
    """Draw a panel for each pair of attributes: the test figure of each target by the ways that compete."""
    ways = {way: {"way": way} for way in SHOWN}
    return dots(rows, "target", ways, "test", "attributes", y_label=measured, **how)
