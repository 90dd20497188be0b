"""What the study `many_tasks` says: tables, findings and figures of its rows, one row per count, seed and model."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from matplotlib.figure import Figure

from mergeflow.evaluation.statistics import normalised
from tasks.studies.inputs import mean_accuracy
from tasks.studies.papers.many_tasks.figures import loss_figure, radar_figure
from tasks.studies.pieces import Row
from tasks.studies.results import Cell, Finding, Table, with_interval

NAMES = {
    "zero_shot": "zero-shot",
    "individual": "individual",
    "joint": "joint training",
    "mima": "MIMA",
    "average": "average",
    "task_arithmetic": "task arithmetic",
    "ties": "TIES",
    "consensus": "Consensus TA",
    "cart": "CART",
    "tsv": "TSV-M",
    "iso_c": "Iso-C",
    "iso_cts": "Iso-CTS",
    "wudi": "WUDI",
    "pcb": "PCB",
    "adamerging_ta": "AdaMerging + TA",
    "adamerging_cart": "AdaMerging + CART",
}
BASELINES = ("task_arithmetic", "ties", "consensus")
RADAR = ("task_arithmetic", "ties", "consensus", "cart", "adamerging_cart")


class Results:
    """The rows, asked by count and model."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {(row["tasks"], row["seed"], row["model"]): row for row in rows}
        self.counts = sorted({row["tasks"] for row in rows})
        self.seeds = sorted({row["seed"] for row in rows})
        self.models = [name for name in NAMES if any(row["model"] == name for row in rows)]

    def row(self, count: int, seed: int, model: str) -> Row:
        return self._rows[count, seed, model]

    def absolute(self, count: int, model: str) -> list[float]:
        """Return mean test accuracy in %, one value per seed."""
        return [mean_accuracy(self.row(count, seed, model)["test"]) for seed in self.seeds]

    def relative(self, count: int, model: str) -> list[float]:
        """Return normalised test accuracy in %, one value per seed."""
        pairs = [(self.row(count, seed, model), self.row(count, seed, "individual")) for seed in self.seeds]
        return [100 * normalised(one["test"], own["test"]) for one, own in pairs]

    def per_task(self, count: int, model: str) -> dict[str, list[float]]:
        """Return test accuracy in % of each task, one value per seed."""
        tests = [self.row(count, seed, model)["test"] for seed in self.seeds]
        return {task: [100 * test[task] for test in tests] for task in tests[0]}


def tables(rows: Sequence[Row]) -> list[Table]:
    """Return the paper's Table 1 with its further rows, accuracy per task, and what was chosen."""
    found = Results(rows)
    return [
        Table("Mean test accuracy, %", [_line(found, model, found.absolute) for model in found.models]),
        Table("Normalised test accuracy, %", [_line(found, model, found.relative) for model in found.models]),
        *(_per_task(found, count) for count in found.counts),
        Table("Chosen on validation, one value per seed", _chosen(found)),
    ]


def _line(found: Results, model: str, values: Callable[[int, str], list[float]]) -> dict[str, Cell]:
    first, last = found.counts[0], found.counts[-1]
    change = [after - before for before, after in zip(values(first, model), values(last, model), strict=True)]
    return {
        "model": NAMES[model],
        **{f"{count} tasks": with_interval(values(count, model)) for count in found.counts},
        f"{first} → {last}": with_interval(change),
    }


def _per_task(found: Results, count: int) -> Table:
    def line(model: str) -> dict[str, Cell]:
        return {"model": NAMES[model], **{t: f"{fmean(v):.1f}" for t, v in found.per_task(count, model).items()}}

    return Table(f"Test accuracy per task, %, {count} tasks, mean over seeds", [line(model) for model in found.models])


def _chosen(found: Results) -> list[dict[str, Cell]]:
    lines: list[dict[str, Cell]] = []
    for model in found.models:
        rows = {count: [found.row(count, seed, model) for seed in found.seeds] for count in found.counts}
        if "args" in rows[found.counts[0]][0]:
            lines.append(
                {
                    "method": NAMES[model],
                    **{f"{count} tasks": "; ".join(_said(row["args"]) for row in own) for count, own in rows.items()},
                    "tried": str(rows[found.counts[0]][0]["tried"]),
                }
            )
    return lines


def _said(args: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in args.items())


def findings(rows: Sequence[Row]) -> list[Finding]:
    """Hold the paper's statements against the table."""
    found = Results(rows)
    models = set(found.models)
    asked = [*(_compare(found, "C1", "cart", other) for other in BASELINES if other in models), *_order(found)]
    if "cart" in models and len(found.counts) > 1:
        asked.append(_loses_least(found))
    for start in ("ta", "cart"):
        if f"adamerging_{start}" in models:
            asked.append(_compare(found, "C4", f"adamerging_{start}", "task_arithmetic" if start == "ta" else "cart"))
    if {"adamerging_ta", "adamerging_cart"} <= models:
        asked.append(_compare(found, "C4", "adamerging_cart", "adamerging_ta"))
    return asked


def _compare(found: Results, system: str, better: str, worse: str) -> Finding:
    """Compare two models on the same experts: the mean over seeds of the difference, at every count."""
    gains = {
        count: [a - b for a, b in zip(found.absolute(count, better), found.absolute(count, worse), strict=True)]
        for count in found.counts
    }
    return Finding(
        system,
        f"{NAMES[better]} is at least as good as {NAMES[worse]}, whatever the number of tasks.",
        "; ".join(f"{count} tasks: {with_interval(gain)} points" for count, gain in gains.items()),
        all(fmean(gain) >= 0 for gain in gains.values()),
    )


def _order(found: Results) -> list[Finding]:
    ladder = [
        name for name in ("zero_shot", "average", "task_arithmetic", "cart", "individual") if name in found.models
    ]
    means = {count: [fmean(found.absolute(count, name)) for name in ladder] for count in found.counts}
    words = " < ".join(NAMES[name] for name in ladder)
    measured = "; ".join(f"{count} tasks: {', '.join(f'{v:.1f}' for v in line)}" for count, line in means.items())
    holds = all(low < high for line in means.values() for low, high in pairwise(line))
    return [Finding("C6", f"{words}, whatever the number of tasks.", measured, holds)]


def _loses_least(found: Results) -> Finding:
    first, last = found.counts[0], found.counts[-1]
    compared = [name for name in (*BASELINES, "cart") if name in found.models]
    drops = {name: fmean(found.relative(first, name)) - fmean(found.relative(last, name)) for name in found.models}
    lost = [f"{NAMES[name]} {drops[name]:.1f}" for name in (*compared, "average") if name in drops]
    return Finding(
        "C6",
        f"From {first} to {last} tasks CART loses least of {', '.join(NAMES[name] for name in compared)}; the average "
        "has less to lose, in the paper's Table 1 too.",
        f"normalised points lost: {', '.join(lost)}",
        min(compared, key=lambda name: drops[name]) == "cart",
    )


def notes(rows: Sequence[Row]) -> list[str]:
    """Return what decides the table."""
    found = Results(rows)
    last = found.counts[-1]
    merged = [name for name in found.models if name not in ("zero_shot", "individual", "joint", "mima")]
    best = max(merged, key=lambda name: fmean(found.absolute(last, name)))
    gaps = {
        count: fmean(found.absolute(count, "individual")) - max(fmean(found.absolute(count, name)) for name in merged)
        for count in found.counts
    }
    edges = _edges(found)
    return [
        f"The best merge of {last} tasks is {NAMES[best]}. The best merge stays below the experts by "
        + ", ".join(f"{gap:.1f} points ({count} tasks)" for count, gap in gaps.items())
        + ".",
        "Tasks differ in what there is to lose: the tables per task show where merging fails.",
        *([f"At the end of its grid stood the scale of {', '.join(edges)}."] if edges else []),
    ]


def _edges(found: Results) -> list[str]:
    return [
        f"{NAMES[model]} ({count} tasks)"
        for model in found.models
        for count in found.counts
        if any(found.row(count, seed, model).get("edge") for seed in found.seeds)
    ]


def figures(rows: Sequence[Row]) -> dict[str, Figure]:
    found = Results(rows)
    shown = [name for name in RADAR if name in found.models]
    radar = {
        count: {
            NAMES[model]: {
                task: fmean(values) / fmean(found.per_task(count, "individual")[task]) * 100
                for task, values in found.per_task(count, model).items()
            }
            for model in shown
        }
        for count in found.counts
    }
    curves = {NAMES[m]: {count: found.relative(count, m) for count in found.counts} for m in found.models}
    del curves[NAMES["individual"]]  # 100 by definition
    return {"radar": radar_figure(radar), "counts": loss_figure(curves)}
