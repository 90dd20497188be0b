"""The findings of studies that judge pieces, from the tidy rows that were written of these pieces."""

from collections.abc import Iterable, Sequence
from fractions import Fraction

from tasks.studies.papers.adaptation import results as adaptation
from tasks.studies.results import Finding
from tasks.studies.rows import Row, picked

_VARIANT = ("on", "granularity", "images", "seed")


def adaptation_findings(rows: Sequence[Row]) -> list[Finding]:
    """Return what the rules of `adaptation` make of its rows."""
    merges = picked(rows, part="merges")
    adapted = [
        {**{name: one[name] for name in _VARIANT}, "test": shares(group)}
        for one, group in groups((row for row in merges if row["granularity"] != "static"), _VARIANT)
    ]
    starts = [
        {"seed": one["seed"], **{own["on"]: {"test": shares(group)} for own, group in groups(of_seed, ("on",))}}
        for one, of_seed in groups(picked(merges, granularity="static"), ("seed",))
    ]
    return adaptation.findings(adapted, starts, picked(rows, part="memory"), _labels(picked(rows, part="labels")))


def _labels(rows: Sequence[Row]) -> Row:
    runs: Row = {}
    for one, group in groups(rows, ("labels",)):
        coefficients: Row = {}
        for row in group:
            if row["coefficient"] is not None:
                coefficients.setdefault(row["task"], {})[row["tensor"]] = row["coefficient"]
        runs[one["labels"]] = {
            "coefficients": coefficients,
            "losses": [row["loss"] for row in group if row["loss"] is not None],
            "accuracy": shares(row for row in group if row["accuracy"] is not None),
        }
    return {"runs": runs}


def groups(rows: Iterable[Row], columns: Sequence[str]) -> list[tuple[Row, list[Row]]]:
    """Return the rows by their values in some columns, in the order of the first of each: (first row, all rows)."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in columns), []).append(row)
    return [(group[0], group) for group in found.values()]


def shares(rows: Iterable[Row], column: str = "accuracy") -> dict[str, float]:
    """Return a column in % as a share for each task, as it was measured: so many of a few thousand examples.

    `100 * share / 100` is not always the share to the last bit.
    """
    return {row["task"]: float(Fraction(row[column] / 100).limit_denominator(10_000)) for row in rows}
