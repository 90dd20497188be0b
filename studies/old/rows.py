"""Tidy rows: one for each seed, setting, model and task, which every interval can be recomputed from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Row = dict[str, Any]
Piece = Mapping[str, Any]
AnyRow = TypeVar("AnyRow", bound=Piece)


def accuracy_rows(
    pieces: Iterable[Piece], settings: Sequence[str], models: Sequence[str], as_column: str = "model"
) -> list[dict[str, Any]]:
    """Return one row for each piece, model and task, with the test accuracy in %.

    Args:
        pieces: what a study measured; `piece[model]` is accuracy per task, a fraction.
        settings: the keys of a piece that say what it is, `seed` among them.
        models: which of its models.
        as_column: what the column with the model's name is called.

    Example:
        >>> accuracy_rows([{"seed": 0, "N": 4, "average": {"a": 0.5}}], ["seed", "N"], ["average"])
        [{'seed': 0, 'N': 4, 'model': 'average', 'task': 'a', 'accuracy': 50.0}]
    """
    return [
        {**{name: piece[name] for name in settings}, as_column: model, "task": task, "accuracy": 100 * value}
        for piece in pieces
        for model in models
        if model in piece
        for task, value in piece[model].items()
    ]


def tidy(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows that all have the same columns; what a row does not have is None.

    Example:
        >>> tidy([{"a": 1}, {"b": 2}])
        [{'a': 1, 'b': None}, {'a': None, 'b': 2}]
    """
    known = list(rows)
    columns = list(dict.fromkeys(name for row in known for name in row))
    return [{name: row.get(name) for name in columns} for row in known]


def picked(rows: Iterable[AnyRow], **wanted: Any) -> list[AnyRow]:
    """Return the rows with these values.

    Args:
        rows: of any columns.
        wanted: column → value; a row without the column has None.

    Raises:
        KeyError: there are rows, but none has one of the columns; a slip of the pen would pick no row.

    Example:
        >>> picked([{"seed": 0, "N": 4}, {"seed": 1, "N": 4}, {"seed": 0}], seed=0, N=4)
        [{'seed': 0, 'N': 4}]
    """
    given = list(rows)
    for name in wanted:
        if given and not any(name in row for row in given):
            raise KeyError(name)
    return [row for row in given if all(row.get(name) == value for name, value in wanted.items())]


def of(pieces: Iterable[AnyRow], **wanted: Any) -> list[AnyRow]:
    """Return the pieces with these values, in order of their seed."""
    return sorted(picked(pieces, **wanted), key=lambda piece: int(piece["seed"]))


def by_seed(rows: Sequence[Row], value: Callable[[list[Row]], float]) -> list[float]:
    """Return one number for each seed.

    Args:
        rows: with `seed`.
        value: of the rows of one seed.
    """
    return [value(picked(rows, seed=seed)) for seed in sorted({row["seed"] for row in rows})]


def mean_over(rows: Sequence[Row], value: str, **wanted: Any) -> list[float]:
    """Return the mean of a column over the rows with these values, one for each seed."""
    own = picked(rows, **wanted)
    return by_seed(own, lambda one: sum(row[value] for row in one) / len(one))
