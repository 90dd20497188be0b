"""Whether features combine as weights do, layer by layer: it holds, does not hold, or is undecided."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy import stats

from mergeflow.linearity.affine import Linearity

# Ours, written before any study ran: the paper says "close to 0" and "close to 1" and prints no threshold.
DIRECTION = 0.3  # 1 − cos at most this share of the baseline's
TRIVIAL = 0.02  # a smaller baseline says nothing: the models' features are nearly the same
LENGTH = 0.1  # the median of coef within 1 ± this
CONFIDENCE = 0.95


@dataclass(frozen=True)
class LayerVerdict:
    """What one combination gives at one layer; three numbers are the lower quartile, the middle, the upper quartile.

    Attributes:
        layer: Name of the layer.
        distance: 1 − cos over samples; the middle is the mean.
        base: Mean of the baseline.
        coef: Over samples; the middle is the median.
        error: Mean relative error ‖f − g‖² / ‖g‖².
        direction: Whether 1 − cos ≤ 0.3 of the baseline; None is undecided.
        length: Whether the median of coef is within 1 ± 0.1; None is undecided.
    """

    layer: str
    distance: tuple[float, float, float]
    base: float
    coef: tuple[float, float, float]
    error: float
    direction: bool | None
    length: bool | None


def judge(found: Mapping[str, Linearity]) -> list[LayerVerdict]:
    """Judge each layer of one combination by 95 % intervals over samples.

    Direction: the interval of the paired mean of (1 − cos) − 0.3 · base lies below 0 (holds) or above (does not);
    undecided where it has 0 in it or where the baseline is below 0.02. Length: the interval of coef's median, by order
    statistics, lies within 1 ± 0.1 (holds), outside (does not) or on a border.
    """
    return [_judge(layer, values) for layer, values in found.items()]


def overall(verdicts: list[LayerVerdict]) -> dict[str, bool | None]:
    """Return one verdict for all layers: `LLFC` for the direction alone, `CTL` for direction and length.

    One layer where it fails is enough for a failure; layers that the baseline cannot decide do not count, unless there
    are no others.
    """
    directions = [one.direction for one in verdicts if one.base > TRIVIAL]
    llfc = _all(directions) if directions else None
    return {"LLFC": llfc, "CTL": _all([llfc, *(one.length for one in verdicts)])}


def word(verdict: bool | None) -> str:
    """Return the verdict as a person reads it.

    Example:
        >>> word(True), word(False), word(None)
        ('holds', 'does not hold', 'undecided')
    """
    return "undecided" if verdict is None else "holds" if verdict else "does not hold"


def _all(verdicts: list[bool | None]) -> bool | None:
    return False if False in verdicts else None if None in verdicts else True


def _judge(layer: str, found: Linearity) -> LayerVerdict:
    low, high = np.quantile(found.distance, [0.25, 0.75])
    base = float(found.base.mean())
    return LayerVerdict(
        layer,
        (float(low), float(found.distance.mean()), float(high)),
        base,
        tuple(float(q) for q in np.quantile(found.coef, [0.25, 0.5, 0.75])),  # type: ignore[arg-type]
        float(found.error.mean()),
        _below(found.distance - DIRECTION * found.base) if base > TRIVIAL else None,
        _within(found.coef),
    )


def _below(values: np.ndarray) -> bool | None:
    """Whether the mean is below 0, by its interval over samples."""
    centre, count = float(values.mean()), len(values)
    spread = float(values.std(ddof=1)) / sqrt(count) if count > 1 else float("inf")
    half = float(stats.t.ppf(0.5 + CONFIDENCE / 2, max(count - 1, 1))) * spread
    return True if centre + half < 0 else False if centre - half > 0 else None


def _within(coef: np.ndarray) -> bool | None:
    """Whether the median is within 1 ± LENGTH, by its interval from order statistics."""
    values, count = np.sort(coef), len(coef)
    low = int(stats.binom.ppf(0.5 - CONFIDENCE / 2, count, 0.5))
    left, right = values[max(low - 1, 0)], values[min(count - low, count - 1)]
    if left >= 1 - LENGTH and right <= 1 + LENGTH:
        return True
    return False if right < 1 - LENGTH or left > 1 + LENGTH else None
