"""Search along one argument: the best of many values of `scale` without trying them all."""

from collections.abc import Callable, Sequence


def best_along(
    values: Sequence[float], start: float, score: Callable[[float], float], slack: float = 0.01
) -> tuple[float, float]:
    """Return the value with the highest score, walking from `start` both ways until the score has fallen by `slack`.

    The answer is that of trying all values wherever the score has no dip deeper than `slack`; accuracy over the scale
    of a merge has one hump, and costs a quarter of the grid this way. Of equal scores the smaller value wins.

    Args:
        values: ascending, at least one.
        start: where to begin; the nearest value is taken.
        score: what to maximise; called once for each value that is tried.
        slack: at least 0, in units of the score.

    Returns:
        (value, its score).

    Example:
        >>> tried = []
        >>> def score(x):
        ...     tried.append(x)
        ...     return -abs(x - 0.3)
        >>> best_along([0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6], 0.2, score, slack=0.05)
        (0.3, -0.0)
        >>> tried
        [0.2, 0.3, 0.4, 0.1]
    """
    assert list(values) == sorted(values)
    first = min(range(len(values)), key=lambda i: abs(values[i] - start))
    scores = {first: score(values[first])}
    for step in (1, -1):
        index = first + step
        while 0 <= index < len(values):
            scores[index] = score(values[index])
            if scores[index] < max(scores.values()) - slack:
                break
            index += step
    best = max(scores, key=lambda i: (scores[i], -i))
    return values[best], scores[best]
