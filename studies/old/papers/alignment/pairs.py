"""Pairs of tasks in a matrix of cosines, and the tidy rows of the study `alignment`."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from studies.old.rows import Row, tidy

Matrix = Sequence[Sequence[float]]


def pairs(matrix: Matrix) -> list[float]:
    """Return the entries above the diagonal.

    Example:
        >>> pairs([[1.0, 0.2, 0.3], [0.2, 1.0, 0.4], [0.3, 0.4, 1.0]])
        [0.2, 0.3, 0.4]
    """
    return [value for index, line in enumerate(matrix) for value in line[index + 1 :]]


def pair_names(tasks: Sequence[str]) -> list[str]:
    """Return what the pairs are called, in the order of `pairs`.

    Example:
        >>> pair_names(["a", "b", "c"])
        ['a – b', 'a – c', 'b – c']
    """
    return [f"{one} – {other}" for index, one in enumerate(tasks) for other in tasks[index + 1 :]]


def mean_cosine(matrix: Matrix) -> float:
    """Return the mean over all pairs."""
    return fmean(pairs(matrix))


def tidy_rows(rows: Sequence[Row], named: Sequence[str]) -> list[dict[str, Any]]:
    """Return what was measured, told by `part`.

    Args:
        rows: as of `measure`, for each run and seed.
        named: the pairs, in the order of the matrices.

    Returns:
        `pair`: the cosines of τ and of δ of two tasks after a round. `last`: of the last round ‖s‖ as `shared`, the
        mean over tasks of ‖δ‖ as `increment` and of cos(δ, s) as `towards`.
    """
    cosines = [
        {
            "part": "pair",
            **{name: row[name] for name in ("seed", "run")},
            "round": number,
            "steps": steps,
            "pair": pair,
            "tau": tau,
            "delta": delta,
        }
        for row in rows
        for number, steps in enumerate(row["steps"], start=1)
        for pair, tau, delta in zip(named, pairs(row["tau"][number - 1]), pairs(row["delta"][number - 1]), strict=True)
    ]
    known = ("seed", "run", "shared", "increment", "towards")
    return tidy([*cosines, *({"part": "last", **{name: row[name] for name in known}} for row in rows)])
