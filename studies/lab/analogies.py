"""Tables and figures of analogy studies: Δ_A + (Δ_B − Δ_C) against the other ways to reach a target."""

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from studies.lab.claims import Samples
from studies.lab.plots import dots, table
from studies.lab.rows import Row, samples, select

ANALOGY, SUM, TRAINED, NEAREST = "A + B − C", "A + B", "trained on it", "nearest expert"
SINGLE = ("A", "B", "C")
SHOWN = ("base", NEAREST, SUM, ANALOGY, TRAINED)


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


def ways_table(attributes: str, ways: Sequence[str], rows: pd.DataFrame, digits: int = 1) -> pd.DataFrame:
    """Return each way's test figure by target, with the mean λ and the mean over targets."""
    analogies = select(rows, attributes=attributes, way=list(ways))
    scales = analogies.groupby("way").scale.mean().map("{:.2f}".format).replace("nan", "").rename("mean λ")
    wide = table(analogies, "way", "target", value="test", digits=digits).join(
        table(analogies, "way", value="test", digits=digits).rename(columns={"test": "mean"})
    )
    return scales.to_frame().join(wide).reindex([way for way in ways if way in wide.index])


def targets_figure(measured: str, rows: pd.DataFrame, **how: Any) -> Figure:
    """Draw a panel for each pair of attributes: the test figure of each target by the ways that compete."""
    ways = {way: {"way": way} for way in SHOWN}
    return dots(rows, "target", ways, "test", "attributes", y_label=measured, **how)
