"""Columns with mean 0 and variance 1, whatever their unit; rounding gives a constant no spread."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Standardised:
    """Columns in a unit of their own.

    Attributes:
        values: With mean 0 and variance 1; 0 in a column that counts as constant. [n, D].
        mean: Of the columns as they were, in spreads; 0 where one counts as constant. [D].
        spread: Of the columns as they were; 0 where one counts as constant. [D].
    """

    values: np.ndarray
    mean: np.ndarray
    spread: np.ndarray


def standardised(columns: np.ndarray, rounding: float, smallest: float = 0.0) -> Standardised:
    """Return columns in a unit of their own.

    Args:
        columns: float64 [n, D].
        rounding: A column counts as constant whose spread is no larger share of its largest value.
        smallest: Or whose spread is no larger than this.
    """
    # A power of two changes no bit, and squares of 1e200 or 1e-200 are numbers in this unit.
    unit = np.ldexp(1.0, np.maximum(np.frexp(np.abs(columns).max(axis=0))[1], -1021) - 1)
    scaled = columns / unit
    mean, spread = scaled.mean(axis=0), scaled.std(axis=0)
    changes = (spread > rounding * np.abs(scaled).max(axis=0)) & (spread * unit > smallest)
    divisor = np.where(changes, spread, 1.0)
    values = np.where(changes, (scaled - mean) / divisor, 0.0)
    return Standardised(values, np.where(changes, mean / divisor, 0.0), np.where(changes, spread * unit, 0.0))
