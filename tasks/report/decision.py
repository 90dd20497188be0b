"""The gates' decision as a picture: the gain with its interval, and each task's change, against what is allowed."""

from matplotlib.figure import Figure

from tasks.plotting.drawing import SMALL, dress, new_figure, plain
from tasks.plotting.palette import INK, MUTED, SERIES
from tasks.report.files import Json

_WORSE, _BETTER = SERIES[1], SERIES[2]


def decision_figure(decision: Json | None) -> Figure | None:
    """Return the picture; None where there was no champion to compare with."""
    numbers = (decision or {}).get("numbers") or {}
    changes: dict[str, float] = numbers.get("change") or {}
    if "gain" not in numbers or not changes:
        return None
    gain, allowed = numbers["gain"], numbers["settings"]["tolerance"]
    low, high = numbers.get("interval") or [gain, gain]
    reach = 1.15 * max(map(abs, [*changes.values(), low, high, allowed, numbers["settings"]["margin"], 0.005]))
    figure = new_figure(9.0, 0.36 * len(changes) + 1.3)
    axes = figure.subplots()
    dress(axes, "worse ← the champion → better", grid="x")
    axes.set(xlim=(-reach, reach), ylim=(len(changes) + 0.6, -0.6), xticks=[])
    axes.set_yticks(range(len(changes) + 1), labels=map(plain, ["mean, normalised", *changes]), color=INK)
    axes.axvline(0, color=MUTED)
    axes.plot([-allowed, -allowed], [0.5, len(changes) + 0.6], color=_WORSE, linestyle=(0, (5, 4)))
    axes.annotate(f"allowed: {_points(-allowed)}", (-allowed, len(changes) + 0.6), (0, -12), textcoords="offset points",
                  ha="center", fontsize=SMALL, color=MUTED)  # fmt: skip
    axes.errorbar(gain, 0, xerr=[[gain - low], [high - gain]], fmt="o", color=INK, capsize=4, markersize=7)
    for row, change in enumerate(changes.values(), start=1):
        too_much = change < -allowed - 1e-12
        bar = axes.barh(
            row, change, 0.55, color=_BETTER if change >= 0 else _WORSE, alpha=0.6 if change < 0 and not too_much else 1
        )
        bar[0].set_gid("worse" if too_much else f"change-{row}")
    for row, value in enumerate([gain, *changes.values()]):
        axes.annotate(_points(value), (1, row), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      va="center", fontsize=SMALL, color=MUTED if row else INK)  # fmt: skip
    return figure


def _points(value: float) -> str:
    """Return a fraction as points with its sign.

    Example:
        >>> _points(-0.0125)
        '−1.25'
    """
    return f"{100 * value:+.2f}".replace("-", "−")
