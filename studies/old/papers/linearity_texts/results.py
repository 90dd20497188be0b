"""Findings and tables of the study `linearity_texts`, from its rows."""

from collections.abc import Mapping, Sequence

from studies.lab.linear_rows import by_seed, mean_over
from studies.old.claims import judge
from studies.old.papers.linearity_edits import study as edits
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row

PLACES, FEATURES, KEPT = 1.0, 1e-5, 1e-6  # units of the last place; shares of a length; shares of a number
Rows = Mapping[str, list[Row]]


def largest(rows: Sequence[Row], column: str, **wanted: str) -> list[float]:
    """Return the largest value of a column for each seed."""
    return [max(row[column] for row in own) for own in by_seed(rows, **wanted).values()]


def findings(rows: Rows, scale: float, scales: Sequence[float]) -> list[Finding]:
    """Hold the paper's statements, and what the measuring stands on, against the rows.

    Args:
        rows: part of the study → its rows.
        scale: λ at which Equations 2 and 3 are judged.
        scales: λ at which Equation 4 is.
    """
    types = dict.fromkeys(row["type"] for row in rows["vectors"])
    return [
        judge(
            "L10",
            "A model and its task vector are the same: θ0 + 1·τ is θ_t.",
            {name: largest(rows["vectors"], "places", type=name) for name in types},
            f"largest difference ≤ {PLACES:g} unit of the last place of the larger of |θ0| and |θ_t|, any entry",
            high=PLACES,
            unit=" units",
            digits=2,
            ours=True,
        ),
        *edits.findings(rows["edits"], scale, scales),
        judge(
            "L16",
            "A text's features do not depend on the texts beside it: batches, order and padding change nothing.",
            {"10⁶ × the largest difference": [1e6 * one for one in largest(rows["features"], "apart")]},
            f"largest difference ≤ {1e6 * FEATURES:g} · 10⁻⁶ of the feature's length, any block and task",
            high=1e6 * FEATURES,
            unit="",
            digits=2,
            ours=True,
        ),
        judge(
            "L20",
            "The samples that a study keeps give its tables again.",
            {"10⁶ × the largest difference": [1e6 * one for one in largest(rows["samples"], "apart")]},
            f"means and medians of the file within {1e6 * KEPT:g} · 10⁻⁶ of the rows'",
            high=1e6 * KEPT,
            unit="",
            digits=2,
            ours=True,
        ),
    ]


def tables(rows: Rows) -> list[Table]:
    """Return the experts' answers, the equations by block, and the identities."""
    answered: list[Row] = [
        {
            "task": task,
            "pre-trained, %": with_interval(mean_over(rows["experts"], "start", tasks=task)),
            "expert, %": with_interval(mean_over(rows["experts"], "expert", tasks=task)),
        }
        for task in dict.fromkeys(row["tasks"] for row in rows["experts"])
    ]
    vectors: list[Row] = [
        {
            "type": name,
            "same bits, %": with_interval(mean_over(rows["vectors"], "same", type=name), 2),
            "largest difference, units of the last place": with_interval(
                largest(rows["vectors"], "places", type=name), 2
            ),
        }
        for name in dict.fromkeys(row["type"] for row in rows["vectors"])
    ]
    features: list[Row] = [
        {
            "texts": way,
            "10⁶ × the largest difference": with_interval(
                [1e6 * one for one in largest(rows["features"], "apart", way=way)], 2
            ),
        }
        for way in dict.fromkeys(row["way"] for row in rows["features"])
    ]
    return [
        *([Table("Whole answers that are right, on test", answered)] if answered else []),
        *edits.tables(rows["edits"]),
        Table("θ0 + 1·τ against θ_t", vectors),
        Table("Features of a text among others against those of the text alone", features),
    ]
