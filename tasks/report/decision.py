"""The gates' decision as a picture: the gain with its interval, and each task's change, against what is allowed."""

from tasks.report.files import Json
from tasks.report.svg import Picture

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 760.0, 190.0, 690.0, 30.0, 34.0


def decision_picture(decision: Json | None) -> str | None:
    """Return the picture as SVG; None where there was no champion to compare with."""
    numbers = (decision or {}).get("numbers") or {}
    changes: dict[str, float] = numbers.get("change") or {}
    if "gain" not in numbers or not changes:
        return None
    interval = numbers.get("interval") or [numbers["gain"], numbers["gain"]]
    allowed, needed = numbers["settings"]["tolerance"], numbers["settings"]["margin"]
    reach = 1.15 * max(abs(value) for value in [*changes.values(), *interval, allowed, needed, 0.005])
    scale = (_RIGHT - _LEFT) / 2 / reach
    zero = (_LEFT + _RIGHT) / 2
    bottom = _TOP + _ROW * (len(changes) + 1) + 8
    picture = Picture(_WIDTH, bottom + 22, "Change against the champion, in points of validation accuracy")
    picture.line(zero, _TOP - 8, zero, bottom, "axis")
    limit = zero - allowed * scale
    picture.line(limit, _TOP + _ROW, limit, bottom, "limit")
    picture.text(limit, bottom + 15, f"allowed: {_points(-allowed)}", "quiet", end="middle")
    picture.text(zero, 14, "worse ← the champion → better", "quiet", end="middle")
    _gain(picture, numbers["gain"], interval, zero, scale)
    for row, (task, change) in enumerate(changes.items(), start=1):
        middle = _TOP + _ROW * (row + 0.5)
        width = abs(change) * scale
        style = "worse" if change < -allowed - 1e-12 else "down" if change < 0 else "up"
        picture.rect(zero - (width if change < 0 else 0), middle - 8, width, 16, style, 2)
        picture.text(_LEFT - 12, middle + 4, task, "", _LEFT - 12, "end")
        picture.text(_WIDTH - 4, middle + 4, _points(change), "quiet", end="end")
    return picture.markup()


def _gain(picture: Picture, gain: float, interval: list[float], zero: float, scale: float) -> None:
    middle = _TOP + _ROW / 2
    low, high = (zero + end * scale for end in interval)
    picture.text(_LEFT - 12, middle + 4, "mean, normalised", "strong", _LEFT - 12, "end")
    picture.line(low, middle, high, middle, "whisker")
    for end in (low, high):
        picture.line(end, middle - 6, end, middle + 6, "whisker")
    picture.rect(zero + gain * scale - 5, middle - 5, 10, 10, "dot", 5)
    picture.text(_WIDTH - 4, middle + 4, _points(gain), "strong", end="end")


def _points(value: float) -> str:
    """Return a fraction as points with its sign.

    Example:
        >>> _points(-0.0125)
        '−1.25'
    """
    return f"{100 * value:+.2f}".replace("-", "−")
