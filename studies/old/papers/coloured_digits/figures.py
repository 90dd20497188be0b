"""Figures of the study `coloured_digits`, from its rows alone."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from studies.old.papers.coloured_digits.measuring import CASES, SCALES
from studies.old.rows import Row, picked
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels, series_style
from tasks.plotting.heat import OUTLINED, colour_bar, heat_map, numbered, over
from tasks.plotting.palette import INK


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Return the study's figures, name → figure."""
    return {"scales": scales_figure(rows), "targets": targets_figure(rows), "pairs": pairs_figure(rows)}


def scales_figure(rows: Sequence[Row]) -> Figure:
    """Draw validation accuracy on both tasks over λ, a panel for each length and case."""
    lengths = sorted({row["steps"] for row in rows})
    figure, axes = panels(len(lengths) * len(CASES), len(CASES), 2.8, sharey=True)
    for index, (panel, (steps, case)) in enumerate(
        zip(axes, ((steps, case) for steps in lengths for case in CASES), strict=True)
    ):
        dress(panel, f"{case}, {steps} steps", "λ", "accuracy, %" if index % len(CASES) == 0 else "", "both")
        own = picked(rows, part="curve", steps=steps, case=case)
        for number in (1, 2):
            means = [fmean(row[f"validation_{number}"] for row in picked(own, scale=scale)) for scale in SCALES]
            label = f"T{number}" if index == 0 else "_again"
            panel.plot(SCALES, means, label=label, **{**series_style(number - 1), "markersize": 3})
        panel.axvline(0, color=INK, linewidth=0.6)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def targets_figure(rows: Sequence[Row]) -> Figure:
    """Draw validation accuracy on the third task over λ_1 and λ_2, with the two regions of Equation 7 and the best."""
    lengths = sorted({row["steps"] for row in rows})
    figure, axes = panels(len(lengths), 2, 3.9, sharey=True)
    for panel, steps in zip(axes, lengths, strict=True):
        own = picked(rows, part="grid", steps=steps)
        values = sorted({row["scale_1"] for row in own})
        at = {(row["scale_1"], row["scale"]): picked(own, scale_1=row["scale_1"], scale=row["scale"]) for row in own}

        def mean(key: str, at: Any = at, values: list[float] = values) -> np.ndarray:
            return np.array([[fmean(float(row[key]) for row in at[one, two]) for one in values] for two in values])

        dress(panel, f"{steps} steps", "λ₁", "λ₂" if panel is axes[0] else "")
        drawn = heat_map(panel, values, values, mean("validation_1"))
        for margin, style in (("0.2", "solid"), ("1", "dashed")):
            promised = mean(f"promised_{margin}")
            if promised.min() < 0.5 < promised.max():
                lines = panel.contour(values, values, promised, levels=[0.5], colors="white", linestyles=style)
                lines.set_path_effects(OUTLINED)
                over(panel, [], [], f"Equation 7, margin {margin}", linestyle=style)
        two, one = np.unravel_index(mean("validation_1").argmax(), (len(values), len(values)))
        over(panel, [values[one]], [values[two]], "the best of the grid", marker="*", markersize=11, linestyle="")
        over(panel, [1, 0], [0, 1], "each expert alone", marker="o", markersize=5, linestyle="")
    colour_bar(axes, drawn, "accuracy on the third task, %")
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure


def pairs_figure(rows: Sequence[Row]) -> Figure:
    """Draw α̂ of all experts, the cosines of their task vectors, and each expert's accuracy on every task."""
    lengths = sorted({row["steps"] for row in rows})
    shown = {"alpha": "α̂", "cosine": "cosine", "test_1": "accuracy, %"}
    figure, axes = panels(len(lengths) * len(shown), len(shown), 3.1)
    for index, panel in enumerate(axes):
        steps, key = lengths[index // len(shown)], list(shown)[index % len(shown)]
        own = picked(rows, part="pair", steps=steps)
        names = sorted({row["first"] for row in own}, key=lambda name: float(name[1:]))
        cells = [[fmean(row[key] for row in picked(own, first=one, second=two)) for two in names] for one in names]
        dress(panel, f"{shown[key]}, {steps} steps", "task, r_o", "expert, r_o" if key == "alpha" else "")
        numbered(panel, [name[1:] for name in names], cells, *((0, 100) if key == "test_1" else (-1, 1)))
    return figure
