"""Findings, tables and figure of the study `unseen_tasks`, from its rows."""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from studies.old.claims import judge, paired
from studies.old.results import Cell, Finding, Table, with_interval
from studies.old.rows import Row, by_seed
from tasks.plotting.drawing import FULL_WIDTH, dress, legend, number_ticks, panels
from tasks.plotting.intervals import curve
from tasks.plotting.palette import MUTED

NEAREST, THEORY, RIDGE, SEARCH, TUNED = "nearest expert", "theory", "ridge", "search", "tuned on the samples"
FEW = (NEAREST, THEORY, RIDGE, SEARCH, TUNED)
WITHOUT = ("base", "mean of the experts", "trained on all")
BEHIND = 1.0


def scores(rows: Sequence[Row], group: str, way: str, samples: int | None = None) -> list[float]:
    """Return test accuracy, the mean over targets and numbers of samples, one number for each seed.

    Args:
        rows: of all ways.
        group: which.
        way: which.
        samples: with so many alone.
    """
    own = [r for r in rows if (r["group"], r["way"]) == (group, way) and samples in (None, r["samples"])]
    return by_seed(own, lambda found: fmean(row["test"] for row in found))


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Judge each way of finding coefficients, the mean over targets and numbers of samples.

    Args:
        rows: of all ways.
    """
    found = []
    claims = [
        (SEARCH, NEAREST, "Searched coefficients are better than the nearest expert", 0.0),
        (THEORY, NEAREST, "Coefficients by the corrected Equations 75 and 76 are better than the nearest expert", 0.0),
        (RIDGE, THEORY, "Ridge regression on the experts' answers is better than the equations", 0.0),
        (RIDGE, SEARCH, "Ridge regression, which merges once, stands instead of a search of sixty merges", -BEHIND),
        (RIDGE, TUNED, "A merge with coefficients by ridge is better than tuning on the same samples", 0.0),
    ]
    for group in dict.fromkeys(row["group"] for row in rows):
        for way, other, claim, low in claims:
            gained = {f"{way} less {other}": paired(scores(rows, group, way), scores(rows, group, other))}
            rule = f"paired difference ≥ {low:g} points"
            found.append(judge("P9", f"{claim} ({group}).", gained, rule, low=low, ours=way != SEARCH))
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return test accuracy of each way by the number of samples, the mean over targets, for each group.

    Args:
        rows: of all ways.
    """
    found = []
    for group in dict.fromkeys(row["group"] for row in rows):
        lines: list[dict[str, Cell]] = []
        for way in (*WITHOUT, *FEW):
            line: dict[str, Cell] = {"way": way}
            for count in _counts(rows):
                asked = None if way in WITHOUT else count
                line[f"{count} samples"] = with_interval(scores(rows, group, way, asked))
            lines.append(line)
        found.append(Table(f"{group}: test accuracy on tasks that nobody trained, mean of three, %", lines))
    return found


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    """Draw test accuracy over the number of samples, a line for each way.

    Args:
        rows: of all ways.
    """
    groups = list(dict.fromkeys(row["group"] for row in rows))
    figure, axes = panels(len(groups), 2, 3.2)
    for panel, group in zip(axes, groups, strict=True):
        first = panel is axes[0]
        dress(panel, group.capitalize(), "labelled samples", "test accuracy, %" if first else "", "both")
        for number, way in enumerate(FEW):
            found = {count: scores(rows, group, way, count) for count in _counts(rows)}
            curve(panel, found, way if first else "_again", number)
        for way, line in zip(WITHOUT, (":", "-.", "--"), strict=True):
            label = way if first else "_again"
            panel.axhline(fmean(scores(rows, group, way)), color=MUTED, linestyle=line, linewidth=1, label=label)
        number_ticks(panel, _counts(rows), logarithmic=True)
    legend(figure, FULL_WIDTH, loc="outside lower center")
    return {"samples": figure}


def _counts(rows: Sequence[Row]) -> list[int]:
    return sorted({row["samples"] for row in rows if row["way"] in FEW})
