"""Findings, tables and figure of the study `analogy`, from its rows."""

from collections.abc import Sequence
from statistics import fmean
from textwrap import fill

from matplotlib.figure import Figure

from studies.old.claims import judge, paired
from studies.old.results import Cell, Finding, Table, with_interval
from studies.old.rows import Row, by_seed
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, panels
from tasks.plotting.intervals import curve

ANALOGY, SUM, TRAINED, NEAREST = "A + B − C", "A + B", "trained on it", "nearest expert"
SINGLE = ("A", "B", "C")
WAYS = ("base", *SINGLE, NEAREST, SUM, ANALOGY, f"{ANALOGY}, λ = 1", TRAINED)
GAIN, BEHIND = 2.0, 3.0
_BESIDE = 0.13  # between the marks of a target


def with_nearest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, and for each seed and target the single expert that is best on validation.

    Args:
        rows: of all ways.
    """
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        key = (row["seed"], row["attributes"], row["target"])
        if row["way"] in SINGLE and (key not in found or row["validation"] > found[key]["validation"]):
            found[key] = row
    return [*rows, *(row | {"way": NEAREST, "expert": row["way"]} for row in found.values())]


def scores(rows: Sequence[Row], attributes: str, way: str, target: str | None = None) -> list[float]:
    """Return test accuracy, the mean over targets, one number for each seed.

    Args:
        rows: of all ways.
        attributes: which.
        way: which.
        target: of this target alone.
    """
    own = [r for r in rows if (r["attributes"], r["way"]) == (attributes, way) and target in (None, r["target"])]
    return by_seed(own, lambda found: fmean(row["test"] for row in found))


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Judge the analogy against the nearest expert, the sum without C, and training.

    Args:
        rows: of all ways, with the nearest expert.
    """
    found = []
    for name in dict.fromkeys(row["attributes"] for row in rows):
        analogy = scores(rows, name, ANALOGY)

        def less(way: str, name: str = name, analogy: list[float] = analogy) -> dict[str, list[float]]:
            return {f"less {way}": paired(analogy, scores(rows, name, way))}

        rule = f"by ≥ {GAIN:g} points, mean over the four targets"
        claim = f"Δ_A + (Δ_B − Δ_C) reaches a task that nobody trained better than the nearest expert ({name})."
        found.append(judge("P22", claim, less(NEAREST), rule, low=GAIN, ours=True))
        claim = f"With λ = 1, which asks for no labelled data, it is better on that task than the base ({name})."
        unlabelled = paired(scores(rows, name, f"{ANALOGY}, λ = 1"), scores(rows, name, "base"))
        rule = "paired difference ≥ 0, mean over the four targets"
        found.append(judge("P22", claim, {"less base": unlabelled}, rule, low=0))
        claim = f"Taking Δ_C away is worth it ({name})."
        found.append(judge("P22", claim, less(SUM), "paired difference ≥ 0", low=0, ours=True))
        claim = f"Δ_A + (Δ_B − Δ_C) is as good as training on the task ({name})."
        rule = f"at most {BEHIND:g} points behind"
        found.append(judge("P22", claim, less(TRAINED), rule, low=-BEHIND, ours=True))
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return test accuracy of each way, by target, for each pair of attributes.

    Args:
        rows: of all ways, with the nearest expert.
    """
    found = []
    for name in dict.fromkeys(row["attributes"] for row in rows):
        targets = list(dict.fromkeys(row["target"] for row in rows if row["attributes"] == name))
        lines: list[dict[str, Cell]] = []
        for way in WAYS:
            scales = [
                row["scale"] for row in rows if (row["attributes"], row["way"]) == (name, way) and row.get("scale")
            ]
            line: dict[str, Cell] = {"way": way, "mean λ": f"{fmean(scales):.2f}" if scales else ""}
            line |= {target: with_interval(scores(rows, name, way, target)) for target in targets}
            lines.append(line | {"mean": with_interval(scores(rows, name, way))})
        found.append(Table(f"{name}: test accuracy on the target, %", lines))
    return found


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw each target's accuracy by the ways that compete.

    Args:
        rows: of all ways, with the nearest expert.
    """
    return {"targets": draw_targets(rows, "test accuracy, %", height=3.2, wrap=10, sharey=True)}


def draw_targets(rows: Sequence[Row], measured: str, height: float, wrap: int, sharey: bool) -> Figure:
    """Draw a panel for each pair of attributes: the figure of each target by the ways that compete.

    Args:
        rows: of all ways, with the nearest expert.
        measured: what the figure is, with its unit.
        height: of a row of panels, in inches.
        wrap: letters of a line under a target's mark.
        sharey: whether the panels have one scale.
    """
    names = list(dict.fromkeys(row["attributes"] for row in rows))
    figure, axes = panels(len(names), 2, height, sharey=sharey)
    for panel, name in zip(axes, names, strict=True):
        targets = list(dict.fromkeys(row["target"] for row in rows if row["attributes"] == name))
        dress(panel, name, "", measured if panel in axes[::2] else "")
        for number, way in enumerate(("base", NEAREST, SUM, ANALOGY, TRAINED)):
            label = way if panel is axes[0] else "_again"
            found = {
                place + _BESIDE * (number - 2): scores(rows, name, way, target) for place, target in enumerate(targets)
            }
            curve(panel, found, label, number, linestyle="")
        panel.set_xticks(range(len(targets)), labels=[fill(target, wrap) for target in targets])
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return figure
