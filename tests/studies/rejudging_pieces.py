"""Back from the tidy rows of a study to the pieces that it measured."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import yaml

from flows.study_commands import find_studies
from tasks.project.studies import find_study_modules, load_declaration
from tasks.studies.rows import Row
from tests.studies.small_lab import ROOT

Rows = Sequence[Row]


def choices(study: str) -> Any:
    """Return the choices with which a study was recorded, those of the project's params.yaml it belongs to."""
    written = yaml.safe_load((find_studies(ROOT)[study].root / "studies/params.yaml").read_text())["studies"][study]
    return load_declaration(ROOT, find_study_modules(ROOT)[study]).options.model_validate(written)


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


def by_task(rows: Iterable[Row], column: str = "accuracy") -> dict[str, float]:
    """Return task → accuracy, the fraction that was measured."""
    return {row["task"]: fraction(row[column]) for row in rows}


def fraction(percentage: float) -> float:
    """Return the fraction that was measured: so many of at most some thousand examples.

    Dividing the percentage by 100 may miss it by the last bit, which shows where two models are equal.
    """
    return float(Fraction(percentage / 100).limit_denominator(10_000))
