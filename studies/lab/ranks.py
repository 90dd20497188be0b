"""How well a number that is known before predicts what is lost: rank correlations."""

from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any

from scipy.stats import spearmanr


def rank_correlation(
    rows: Iterable[Mapping[str, Any]], prediction: Callable[[Any], float], by: str | None = None
) -> float:
    """Return Spearman's correlation of a prediction with the column `loss`.

    Args:
        rows: what was measured.
        prediction: of a row.
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


def _spearman(told: tuple[float, ...], lost: tuple[float, ...]) -> float:
    return float(spearmanr(told, lost).statistic) if len({*told}) > 1 < len({*lost}) else 0.0
