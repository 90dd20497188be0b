"""The findings of studies that judge pieces, from the tidy rows that were written of these pieces."""

from collections.abc import Iterable, Sequence
from fractions import Fraction

from mergeflow.evaluation.averages import normalised
from tasks.studies.papers.adaptation import results as adaptation
from tasks.studies.papers.cart_landscape import results as cart_landscape
from tasks.studies.papers.compression import results as compression
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


def compression_findings(rows: Sequence[Row], target: float) -> list[Finding]:
    """Return what the rules of `compression` make of its rows; the rank ratio of the claims is that of `own`.

    Args:
        rows: tidy.
        target: the share of individual accuracy that is to be kept, of the study's choices.
    """
    suites = picked(rows, part="suites")
    found = []
    for one, group in groups(suites, ("tasks", "seed", "kind", "rank_ratio", "threshold")):
        relative = {
            row["split"]: normalised(shares(own), shares(own, "expert")) for row, own in groups(group, ("split",))
        }
        found.append({**one, "args": {"rank_ratio": one["rank_ratio"]}, "relative": relative})
    return compression.findings(found, picked(suites, kind="own")[0]["rank_ratio"], target)


def cart_landscape_findings(rows: Sequence[Row]) -> list[Finding]:
    """Return what the rules of `cart_landscape` make of its rows."""
    return cart_landscape.findings([_seed(group) for _, group in groups(picked(rows, part="models"), ("seed",))])


def _seed(rows: Sequence[Row]) -> Row:
    models = []
    for one, group in groups(rows, ("kind", "scale", "rank", "expert")):
        losses = {row["task"]: row["loss"] for row in group}
        models.append({**one, "task": one["expert"], "losses": losses, "place": (one["x"], one["y"])})
    (addition,) = {row["scale"] for row in rows if row["chosen"]}
    return {"seed": rows[0]["seed"], "tasks": list(models[0]["losses"]), "addition": addition, "models": models}


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
