"""Findings, tables and the figure of the study `linearity_matching`, from its rows."""

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from studies.lab.linear_rows import mean_over
from studies.old.claims import judge, paired
from studies.old.results import Finding, Table, with_interval
from studies.old.rows import Row
from tasks.plotting.drawing import FULL_WIDTH, SMALL, dress, legend, panels
from tasks.plotting.intervals import curve

PAYS, NEEDLESS, BEHIND, NEAR = 10.0, 0.5, 1.0, 5.0  # points of accuracy
STARTS, KINDS = ("pre-trained", "common start", "different starts"), ("one task", "two tasks")


def gain(rows: Sequence[Row], world: str, start: str, tasks: str) -> list[float]:
    """Return how many points the average is better with matched units, for each seed.

    Args:
        rows: of all worlds.
        world: which one.
        start: how its nets begin.
        tasks: one or two.
    """
    own = [row for row in rows if (row["world"], row["start"], row["tasks"]) == (world, start, tasks)]
    return paired(mean_over(own, "accuracy_matched"), mean_over(own, "accuracy_plain"))


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Say of each world when matching pays.

    Args:
        rows: a row for each world, seed, start and number of tasks.
    """
    found = []
    for world in dict.fromkeys(row["world"] for row in rows):

        def values(column: str, start: str, tasks: str, world: str = world) -> list[float]:
            return mean_over(rows, column, world=world, start=start, tasks=tasks)

        different = {kind: values("accuracy_matched", "different starts", kind) for kind in KINDS}
        claims = (
            (
                "Matching pays for nets of different starts",
                {kind: gain(rows, world, "different starts", kind) for kind in KINDS},
                f"accuracy of the average gains ≥ {PAYS:g} points",
                (PAYS, math.inf),
            ),
            (
                "It is needless for nets that begin with the same weights, pre-trained or not",
                {f"{start}, {kind}": gain(rows, world, start, kind) for start in STARTS[:2] for kind in KINDS},
                f"accuracy changes by at most {NEEDLESS:g} points",
                (-NEEDLESS, NEEDLESS),
            ),
            (
                "It stands in for the same beginning",
                {kind: paired(different[kind], values("accuracy_plain", "common start", kind)) for kind in KINDS},
                f"matched averages of different starts at most {BEHIND:g} point behind plain ones of a common start",
                (-BEHIND, math.inf),
            ),
            (
                "Matched nets of one task may be averaged",
                {"less the ends": paired(different["one task"], values("ends", "different starts", "one task"))},
                f"the average of different starts loses at most {NEAR:g} points against its ends",
                (-NEAR, math.inf),
            ),
        )
        for claim, told, rule, (low, high) in claims:
            found.append(judge("L17", f"{claim}: {world}.", told, rule, low=low, high=high, ours=True))
    return found


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return what averages reach, by world, start and number of tasks."""
    lines: list[Row] = []
    for world, start, kind in dict.fromkeys((row["world"], row["start"], row["tasks"]) for row in rows):
        wanted = {"world": world, "start": start, "tasks": kind}
        lines.append(
            {
                **wanted,
                "ends, %": with_interval(mean_over(rows, "ends", **wanted)),
                "average, %": with_interval(mean_over(rows, "accuracy_plain", **wanted)),
                "matched, %": with_interval(mean_over(rows, "accuracy_matched", **wanted)),
                "loss, nat": with_interval(mean_over(rows, "loss_plain", **wanted), 2),
                "matched, nat": with_interval(mean_over(rows, "loss_matched", **wanted), 2),
                "units moved, %": with_interval(mean_over(rows, "moved", **wanted), 0),
            }
        )
    return [Table("½θ_i + ½θ_j on the tests of both tasks", lines)]


def figure(rows: Sequence[Row]) -> Figure:
    """Draw accuracies of the ends, the average and the matched average, a panel for each world."""
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    shown, axes = panels(len(worlds), 2, 3.6, sharey=True)
    places = {(start, kind): n for n, (start, kind) in enumerate((s, k) for k in KINDS for s in STARTS)}
    for index, (panel, world) in enumerate(zip(axes, worlds, strict=True)):
        dress(panel, world, "", "" if index % 2 else "accuracy, %")
        for number, (column, label) in enumerate(
            (("ends", "each net alone"), ("accuracy_plain", "average"), ("accuracy_matched", "average, units matched"))
        ):
            samples = {
                place + 0.14 * (number - 1): mean_over(rows, column, world=world, start=start, tasks=kind)
                for (start, kind), place in places.items()
            }
            curve(panel, samples, label if index == 0 else "_hidden", number, linestyle="")
        names = [f"{start}\n{kind}" for start, kind in places]
        panel.set_xticks(range(len(places)), labels=names, fontsize=SMALL - 1, rotation=40, ha="right")
    legend(shown, FULL_WIDTH, loc="outside lower center")
    return shown
