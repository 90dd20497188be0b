"""What claims, tables and figures ask of a study's tidy rows: a row for each seed, setting, model and task."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any

import pandas as pd
from scipy.stats import spearmanr

from studies.lab.claims import Samples

Row = dict[str, Any]


def tidy(rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return rows that all have the same columns; what a row does not have is None.

    Example:
        >>> tidy([{"a": 1}, {"b": 2}])
        [{'a': 1, 'b': None}, {'a': None, 'b': 2}]
    """
    given = list(rows)
    columns = list(dict.fromkeys(name for row in given for name in row))
    return [{name: row.get(name) for name in columns} for row in given]


def accuracy_rows(accuracy: Mapping[str, float], **settings: Any) -> list[Row]:
    """Return one row for each task: the settings, `task`, `accuracy` in %, and the examples' `scores` of a `Judged`.

    Args:
        accuracy: task → a fraction in [0, 1].
        settings: what the rows have in common, such as `model` and `seed`.

    Example:
        >>> accuracy_rows({"digits": 0.5}, model="average", seed=0)
        [{'model': 'average', 'seed': 0, 'task': 'digits', 'accuracy': 50.0}]
    """
    return [
        {**settings, "task": task, "accuracy": 100 * value}
        | ({"scores": value.scores.tolist()} if hasattr(value, "scores") else {})
        for task, value in accuracy.items()
    ]


def select(rows: pd.DataFrame, **where: Any) -> pd.DataFrame:
    """Return the rows with these values; of a column that should be empty, None; of several values, a list.

    Raises:
        KeyError: there is no such column.

    Example:
        >>> rows = pd.DataFrame({"N": [1, 4, 8], "kind": [None, "a", "a"]})
        >>> len(select(rows, N=[1, 4])), len(select(rows, kind="a")), len(select(rows, kind=None))
        (2, 2, 1)
    """
    for column, value in where.items():
        values = rows[column]
        if value is None:
            rows = rows[values.isna()]
        else:
            rows = rows[values.isin(list(value)) if isinstance(value, list | tuple | set) else values == value]
    return rows


def per_seed(rows: pd.DataFrame, *over: str, value: str = "accuracy", **where: Any) -> pd.DataFrame:
    """Return the mean of `value` over everything else: a row for each value of `over`, a column for each seed.

    Seeds that not every row of the result has are left out, so that differences of two results are paired.

    Args:
        rows: tidy, with the column `seed`.
        over: columns that become the index; none gives one row.

    Example:
        >>> rows = pd.DataFrame({"N": [1, 1, 8, 8], "seed": [0, 0, 0, 0], "accuracy": [50.0, 70.0, 80.0, 90.0]})
        >>> per_seed(rows, "N").loc[8, 0]
        np.float64(85.0)
    """
    rows = select(rows, **where)
    if not over:
        return rows.groupby("seed")[value].mean().to_frame("").T
    return rows.groupby([*over, "seed"])[value].mean().unstack("seed").dropna(axis=1)


def samples(rows: pd.DataFrame, value: str = "accuracy", **where: Any) -> pd.Series:
    """Return the mean of `value` over everything else, indexed by seed."""
    return select(rows, **where).groupby("seed")[value].mean()


def shares(accuracy: pd.Series, experts: pd.Series) -> pd.Series:
    """Return accuracy relative to the experts', in %; of an expert at 0 there is no share: 100 + the difference counts.

    Args:
        accuracy: in %.
        experts: accuracy of the task's own expert in %, with the same index.

    Example:
        >>> shares(pd.Series([45.0, 5.0]), pd.Series([50.0, 0.0])).tolist()
        [90.0, 105.0]
    """
    return (100 * accuracy / experts).where(experts > 0, 100 + accuracy - experts)


def steps(frame: pd.DataFrame, label: str = "N", sign: int = 1) -> dict[str, pd.Series]:
    """Return the paired difference from each value of the index to the next; with sign −1 that of a fall."""
    return {f"{label} = {a:g} → {b:g}": sign * (frame.loc[b] - frame.loc[a]) for a, b in pairwise(frame.index)}


def ends(frame: pd.DataFrame, label: str = "N") -> dict[str, pd.Series]:
    """Return the paired difference from the first value of the index to the last."""
    first, last = frame.index[0], frame.index[-1]
    return {f"{label} = {first:g} → {last:g}": frame.loc[last] - frame.loc[first]}


def at(frame: pd.DataFrame, least: float = -math.inf, label: str = "N") -> dict[str, pd.Series]:
    """Return the values at each index from `least` on."""
    return {f"{label} = {n:g}": frame.loc[n] for n in frame.index if n >= least}


def each(names: Iterable[str], measure: Callable[[str], Samples]) -> dict[str, Any]:
    """Measure several models or tasks, each under its name.

    Example:
        >>> each(["average"], lambda name: {"N = 1": [0.5]})
        {'average, N = 1': [0.5]}
    """
    return {f"{name}, {what}": values for name in names for what, values in measure(name).items()}


def least(measured: Samples) -> dict[str, Any]:
    """Return the quantity with the smallest mean, under its name; nothing of nothing."""
    ascending = sorted(measured, key=lambda what: float(pd.Series(list(measured[what])).mean()))
    return {name: measured[name] for name in ascending[:1]}


def paired(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return first − second, seed by seed.

    Example:
        >>> paired([3.0, 4.0], [1.0, 1.5])
        [2.0, 2.5]
    """
    return [a - b for a, b in zip(first, second, strict=True)]


def rank_correlation(
    rows: Iterable[Mapping[str, Any]], prediction: Callable[[Any], float], by: str | None = None
) -> float:
    """Return Spearman's correlation of a prediction with the column `loss`.

    Args:
        by: the column whose values divide the rows into groups; the mean over them counts. One group by default.

    Returns:
        In [−1, 1]; a group in which either is constant counts as 0.

    Example:
        >>> rows = [{"loss": 1.0, "x": 5.0}, {"loss": 2.0, "x": 7.0}, {"loss": 4.0, "x": 6.0}]
        >>> round(rank_correlation(rows, lambda row: row["x"]), 3)
        0.5
    """
    groups: dict[Any, list[tuple[float, float]]] = {}
    for row in rows:
        groups.setdefault(row[by] if by else None, []).append((prediction(row), row["loss"]))
    return fmean(_spearman(*zip(*pairs, strict=True)) for pairs in groups.values())


def _spearman(predicted: tuple[float, ...], lost: tuple[float, ...]) -> float:
    return float(spearmanr(predicted, lost).statistic) if len({*predicted}) > 1 < len({*lost}) else 0.0
