"""Back from the tidy rows of a study to the pieces that it measured."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from studies.old.rows import Row

Rows = Sequence[Row]


def grouped(rows: Iterable[Row], *columns: str) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows by the values of some columns, in order of appearance."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in columns), []).append(row)
    return found


def measured(rows: Rows, *settings: str, model: str = "model") -> list[Row]:
    """Return the pieces that `accuracy_rows` made rows of: model → task → accuracy, a fraction."""
    return [
        {
            **dict(zip(settings, key, strict=True)),
            **{name: by_task(own) for (name,), own in grouped(one, model).items()},
        }
        for key, one in grouped(rows, *settings).items()
    ]


def given(row: Row, *columns: str) -> Row:
    """Return a row's values of these columns, without those that it does not have."""
    return {name: row[name] for name in columns if row.get(name) is not None}


def by_task(rows: Iterable[Row], column: str = "accuracy") -> dict[str, float]:
    """Return task → accuracy, the fraction that was measured."""
    return {row["task"]: fraction(row[column]) for row in rows}


def fraction(percentage: float) -> float:
    """Return the fraction that was measured: so many of at most some thousand examples.

    Dividing the percentage by 100 may miss it by the last bit, which shows where two models are equal.
    """
    return float(Fraction(percentage / 100).limit_denominator(10_000))
