"""Curves of means over seeds with their 95 % intervals; shared by the studies' figures."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mergeflow.evaluation.averages import mean_interval
from tasks.plotting.drawing import plain, series_style

Samples = Mapping[Any, Sequence[float]]  # x → one value per seed


def curve(axes: Axes, samples: Samples, label: str, number: int, **style: Any) -> None:
    """Draw the mean of each x's samples as series `number`, with an error bar where an x has two or more."""
    xs = sorted(samples)
    centres, halves = zip(*(mean_interval(samples[x]) for x in xs), strict=True)
    bars = [half if np.isfinite(half) else 0.0 for half in halves]
    drawn = series_style(number) | style
    axes.errorbar(xs, centres, yerr=bars, label=plain(label), capsize=2.5, elinewidth=1.0, **drawn)


def round_axis(axes: Axes, rounds: Sequence[int]) -> None:
    """Make x a logarithmic axis of numbers of rounds, marked where something was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks([], minor=True)
    shown = [number for number in rounds if number + 4 not in rounds or number < 16]  # 16 and 20 would touch
    axes.set_xticks(shown, labels=[str(number) for number in shown])
